"""What convert_to_relu does and what it leaves: closed forms, rows, BatchNorm, masks, dtypes and the given model."""

import copy

import numpy as np
import pytest
import torch
from dense_oracle import refit, seen, swapped
from refit_nets import BY_NAME, drawn
from small_networks import convert_with
from tiny_training import assert_same_state, state_of
from torch import nn

from hf_lgelu import convert_to_relu
from hf_lgelu.networks.batches import read_batches
from hf_lgelu.networks.outputs import OutputReader
from hf_lgelu.refit import carry
from hf_lgelu.refit.folds import deal_folds
from hf_lgelu.refit.samples import read_samples


def test_order_and_duplicates_of_the_rows_change_nothing():
    net = BY_NAME["mlp"]
    model, inputs = net.model(), net.inputs()
    expected, report = convert_with(model, inputs, batch_size=16)
    for seed in range(2):
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
        given = torch.cat([inputs[order], inputs[order[: 30 * (seed + 1)]]])
        converted, again = convert_with(model, given.split(7), batch_size=16)
        assert_same_state(converted.state_dict(), expected.state_dict())
        assert again.layers == report.layers
        assert again.held_out == report.held_out
        assert again.distinct_samples == report.distinct_samples == len(inputs)


def test_rows_from_elsewhere_show_in_a_second_set():
    net = BY_NAME["mlp"]
    model, inputs = net.model(), net.inputs(units=400)
    elsewhere = 0.05 * net.inputs(seed=8, units=400) + torch.tensor([6.0, -6, 6, -6, 6, -6]).double()
    warning = "on the second set the converted network is no nearer"
    same = convert_to_relu(model, inputs, evaluation_data=net.inputs(seed=9, units=200)).report
    assert same.evaluation.refitted.kl < same.evaluation.direct.kl
    assert not any(warning in text for text in same.warnings)
    wrong = convert_to_relu(model, elsewhere, evaluation_data=inputs).report
    assert wrong.held_out.refitted.kl < wrong.held_out.direct.kl  # the same rows cannot tell
    assert wrong.evaluation.refitted.kl > wrong.evaluation.direct.kl
    assert any(warning in text for text in wrong.warnings)


def test_units_of_the_second_set_that_were_given_to_fit_on_are_counted():
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 4)).eval()
    rows, others = torch.randn(200, 6), torch.randn(50, 6)
    for second, repeated in ((others, 0), (torch.cat([others, rows[:30]]), 30), (rows, 200)):
        report = convert_to_relu(model, rows, evaluation_data=second).report
        told = [text for text in report.warnings if "given to fit on as well" in text]
        assert (report.repeated, len(told)) == (repeated, bool(repeated))
        assert not told or told[0].startswith(f"{repeated:,} of {len(second):,} samples of the second set")


def test_values_without_a_name_that_move_together_are_no_silent_success():
    """Softmax does not see what is added to all columns: the error is said, and with a name it is what counts."""

    class Values(nn.Module):
        def __init__(self, named):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.act, self.down, self.named = nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3), named
            with torch.no_grad():
                self.down.weight.copy_(self.down.weight[:1].expand(3, 8) * 3)
                self.down.weight[1:].add_(torch.randn(2, 8) * 1e-3)

        def forward(self, x):
            found = self.down(self.act(self.up(x)))
            return {"values": found} if self.named else found

    bare, named = (convert_to_relu(Values(named).eval(), torch.randn(400, 8)).report for named in (False, True))
    assert bare.held_out.refitted.relative_error > 0.01
    assert any("was taken for class scores" in text for text in bare.warnings)
    assert named.held_out.refitted.kl is None
    assert not any("class scores" in text for text in named.warnings)


def test_metrics_and_distances_are_those_of_the_three_networks():
    net = BY_NAME["mlp"]
    model, inputs = net.model(), net.inputs()
    second = net.inputs(seed=9, units=50)
    labels = model(second).argmax(-1)
    labels[::3] = (labels[::3] + 1) % 4
    converted, report = convert_to_relu(model, inputs, evaluation_data={"input": second, "labels": labels})
    found = report.evaluation
    original = model(second).detach()
    assert found.rows == found.samples == 50
    assert found.original_metrics["accuracy"] == pytest.approx((original.argmax(-1) == labels).double().mean().item())
    for network, change in ((swapped(model), found.direct), (converted, found.refitted)):
        output = network(second).detach()
        p, q = (value.softmax(-1).numpy() for value in (original, output))
        assert change.kl == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-9)
        assert change.agreement == (original.argmax(-1) == output.argmax(-1)).double().mean().item()
        assert change.largest_change == pytest.approx((original - output).abs().max().item(), rel=1e-12)
        error = (original - output).square().sum() / (original - original.mean(0)).square().sum()
        assert change.relative_error == pytest.approx(error.item(), rel=1e-9)
        accuracy = (output.argmax(-1) == labels).double().mean().item()
        assert change.metrics["accuracy"] == pytest.approx(accuracy)


def test_fewer_rows_than_width():
    model = drawn(nn.Sequential(nn.Linear(6, 150), nn.GELU(), nn.Linear(150, 4)))
    inputs = torch.randn(30, 6, dtype=torch.float64)
    converted, report = convert_to_relu(model, inputs)
    assert any("most of all 2: 30 rows, 150 features" in text for text in report.warnings)
    assert report.layers[0].note == "starved: 30 rows for 150 features"
    assert any(text.endswith("give 600 inputs like these 30") for text in report.warnings)  # no option brings more
    assert any("too few to hold some out" in text for text in report.warnings)
    assert (report.layers[0].rows, report.layers[0].width, report.held_out) == (30, 150, None)
    fresh = torch.randn(500, 6, dtype=torch.float64)
    error, direct = ((net(fresh) - model(fresh)).square().mean() for net in (converted, swapped(model)))
    assert error < 0.2 * direct


def test_dead_units_keep_their_weights():
    net = BY_NAME["mlp"]
    model = net.model()
    with torch.no_grad():
        model[0].bias[2:5] -= 100.0
    converted, report = convert_to_relu(model, net.inputs())
    assert report.layers[0].choice == "refit"
    change = (converted[2].weight - model[2].weight).abs().max(0).values
    assert change[2:5].tolist() == [0, 0, 0]
    assert change[[0, 1, 5, 6, 7, 8]].min() > 1e-6


@pytest.mark.parametrize("name", ["residual", "downsampling"])
def test_batch_norm_is_recentred_and_the_function_stays(name):
    """Its statistics are taken from the new outputs over the fitted rows: in train mode these rows give the same."""
    net = BY_NAME[name]
    # Of fewer than 16 units none is held out, and every position is fitted on.
    model, inputs = net.model(), net.inputs(units=15)
    converted, report = convert_to_relu(model, inputs)
    assert all(layer.choice == "refit" for layer in report.layers)
    # The oracle leaves the statistics as they are.
    folds = deal_folds(read_samples(read_batches(inputs), model=model), OutputReader(model))
    expected, _ = refit(model, net.steps, folds)
    fresh = net.inputs(seed=4)
    torch.testing.assert_close(converted(fresh), expected(fresh), rtol=0, atol=1e-9)
    for norm in ("bn1", "bn2", *(["skip.1"] if name == "downsampling" else [])):
        values = seen(converted, [norm], inputs)[norm][0].movedim(1, -1).flatten(0, -2)
        module = converted.get_submodule(norm)
        torch.testing.assert_close(module.running_mean, values.mean(0), rtol=0, atol=1e-9)
        torch.testing.assert_close(module.running_var, values.var(0), rtol=1e-9, atol=1e-9)
        assert (module.running_var - model.get_submodule(norm).running_var).abs().max() > 1e-3


def test_a_bfloat16_model_stays_bfloat16_and_gets_the_weights_of_its_wide_twin():
    net = BY_NAME["geglu"]
    wide = net.model().bfloat16().double()  # numbers that bfloat16 has
    inputs = net.inputs(units=400).bfloat16()
    converted, report = convert_to_relu(copy.deepcopy(wide).bfloat16(), inputs)
    expected, wide_report = convert_to_relu(wide, inputs.double())
    assert {parameter.dtype for parameter in converted.parameters()} == {torch.bfloat16}
    for layer in range(2):
        found, exact = (model.get_submodule(f"{layer}.down").weight for model in (converted, expected))
        change = exact - wide.get_submodule(f"{layer}.down").weight
        assert (found.double() - exact).norm() < 0.15 * change.norm()
    assert report.held_out.refitted.relative_error < 0.5 * report.held_out.direct.relative_error
    assert wide_report.held_out.rows == report.held_out.rows


class Masked(nn.Module):
    """Tokens with features; the mask is only used where means are taken."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.act = nn.Embedding(50, 5), nn.Linear(5, 9), nn.GELU()
        self.down, self.head = nn.Linear(9, 5), nn.Linear(5, 3)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        x = x + self.down(self.act(self.up(x)))
        weight = attention_mask[..., None].to(x.dtype)
        return self.head((x * weight).sum(1) / weight.sum(1))


def sentences(pad):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 40, (48, 7), generator=generator)
    lengths = torch.randint(2, 8, (48, 1), generator=generator)
    mask = (torch.arange(7) < lengths).long()
    return {"input_ids": torch.where(mask.bool(), ids, pad), "attention_mask": mask}


def test_padding_never_enters():
    model = drawn(Masked())
    converted, report = convert_with(model, sentences(pad=45), batch_size=8)
    other, _ = convert_with(model, sentences(pad=49), batch_size=8)
    assert_same_state(converted.state_dict(), other.state_dict())
    assert report.rows == int(sentences(0)["attention_mask"].sum())
    plan = deal_folds(read_samples(read_batches(sentences(45), batch_size=8)), batch_size=8)
    fitted = sum(int(chunk.load().inputs["attention_mask"].sum()) for fold in plan.folds for chunk in fold)
    assert report.layers[0].rows == fitted


class Heard(nn.Module):
    """Frames of four samples each, by convolutions, then by linear maps; means leave padding out."""

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.second = nn.Conv1d(1, 6, 2, 2), nn.GELU(), nn.Conv1d(6, 5, 2, 2)
        self.up, self.act, self.down, self.head = nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 5), nn.Linear(5, 3)

    def forward(self, input_values, attention_mask):
        x = self.second(self.gate(self.first(input_values[:, None]))).movedim(1, 2)
        x = x + self.down(self.act(self.up(x)))
        weight = attention_mask[:, 3::4, None].to(x.dtype)
        return self.head((x * weight).sum(1) / weight.sum(1))


@pytest.mark.parametrize(
    "samples", [pytest.param(40, marks=pytest.mark.slow), 400], ids=["all positions", "chosen positions"]
)
def test_the_padding_of_sound_never_enters(samples):
    model, generator = drawn(Heard()), torch.Generator().manual_seed(1)
    frames = torch.randint(2, samples // 4 + 1, (48, 1), generator=generator)
    sound = torch.randn(48, samples, generator=generator, dtype=torch.float64)
    mask = torch.arange(samples) < 4 * frames

    def converted(padding):
        data = {"input_values": torch.where(mask, sound, padding), "attention_mask": mask.long()}
        return convert_with(model, data, batch_size=8)

    (silent, report), (loud, _) = converted(0.0), converted(7.0)
    assert_same_state(silent.state_dict(), loud.state_dict())
    assert {layer.layers for layer in report.layers} == {("second",), ("down",)}
    assert not torch.equal(silent.down.weight, model.down.weight)


class Lengthened(Masked):
    """Tokens that follow two tokens of the network's own, as a text follows images and prompts."""

    def __init__(self):
        super().__init__()
        self.prompt, self.last = nn.Parameter(torch.randn(2, 5)), nn.Linear(5, 5)

    def forward(self, input_ids, attention_mask):
        x = torch.cat([self.prompt.expand(len(input_ids), 2, 5), self.embed(input_ids)], 1)
        x = x + self.down(self.act(self.up(x)))
        weight = nn.functional.pad(attention_mask, (2, 0), value=1)[..., None].to(x.dtype)
        return self.head(nn.functional.relu(self.last((x * weight).sum(1) / weight.sum(1))))


@pytest.mark.parametrize(("padded", "note"), [(True, "padding may count"), (False, None)])
def test_where_rows_are_not_those_of_the_mask_the_report_says_that_padding_may_count(padded, note):
    data = sentences(pad=45)
    if not padded:
        data["attention_mask"] = torch.ones_like(data["attention_mask"])
    (layer,) = convert_with(drawn(Lengthened()), data, batch_size=8).report.layers
    assert padded or layer.rows % 9 == 0
    assert (layer.note or "").startswith(note or "")
    assert (layer.note is None) == (note is None)


class TwoTowers(Masked):
    """An image of seven patches, and a text of seven tokens."""

    def __init__(self):
        super().__init__()
        self.image, self.gate, self.out = nn.Linear(4, 9), nn.SiLU(), nn.Linear(9, 3)

    def forward(self, input_ids, attention_mask, patches):
        return super().forward(input_ids, attention_mask) + self.out(self.gate(self.image(patches))).mean(1)


def test_the_mask_of_the_text_says_nothing_about_the_image():
    text = sentences(pad=45)
    patches = torch.randn(48, 7, 4, dtype=torch.float64)
    _, report = convert_with(drawn(TwoTowers()), {**text, "patches": patches}, batch_size=8)
    rows = {layer.layers: layer.rows for layer in report.layers}
    plan = deal_folds(read_samples(read_batches({**text, "patches": patches}, batch_size=8)), batch_size=8)
    chunks = [chunk for fold in plan.folds for chunk in fold]
    assert rows["down",] == sum(int(chunk.load().inputs["attention_mask"].sum()) for chunk in chunks)
    assert rows["out",] == 7 * sum(map(len, chunks)) > rows["down",]


@pytest.mark.parametrize(
    "name",
    ["conv1d", "transposed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("downsampling", "convnext"))],
)
def test_states_on_disk_give_the_same(name, monkeypatch):
    net = BY_NAME[name]
    model, inputs = net.model(), net.inputs()
    expected, _ = convert_with(model, inputs, batch_size=8)
    written = []
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda *args, **options: (written.append(args[1]), save(*args, **options)))
    monkeypatch.setattr(carry, "MEMORY_LIMIT", 0)
    converted, _ = convert_with(model, inputs, batch_size=8)
    assert_same_state(converted.state_dict(), expected.state_dict())
    assert len(set(written)) >= len(net.steps) - 1
    assert written
    assert not any(path.exists() or path.parent.exists() for path in written)


@pytest.mark.parametrize("fails", [False, True])
def test_the_given_model_is_untouched(fails, monkeypatch):
    net = BY_NAME["residual"]
    model = net.model()
    model.conv1.eval()
    model.bn2.train()
    model.requires_grad_(False)
    before, modules = state_of(model), dict(model.named_modules())
    training = {name: module.training for name, module in modules.items()}
    hooks = {name: len(module._forward_hooks) for name, module in modules.items()}
    if fails:
        monkeypatch.setattr("hf_lgelu.refit.layerwise.write_refit", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert_to_relu(model, net.inputs())
    else:
        converted, _ = convert_to_relu(model, net.inputs())
        assert converted is not model
        shared = {value.data_ptr() for value in model.state_dict().values()}
        assert not shared & {value.data_ptr() for value in converted.state_dict().values()}
        assert not any(module.training for module in converted.modules())
    assert_same_state(model.state_dict(), before)
    assert dict(model.named_modules()) == modules
    assert {name: module.training for name, module in modules.items()} == training
    assert {name: len(module._forward_hooks) for name, module in modules.items()} == hooks


def _interrupted(*args):
    raise KeyboardInterrupt
