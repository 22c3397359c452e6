"""What a conversion says of outputs, labels and parts of a model that are not what they look like."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from loud_nets import bert, gpt2
from report_by_hand import HELD_OUT, REPORT, SECOND
from small_networks import convert_with
from torch import nn

from hf_lgelu import ConversionRefusedError, convert_to_relu
from hf_lgelu.networks.outputs import OutputReader
from hf_lgelu.refit.config import ConversionConfig
from hf_lgelu.refit.verdict import config_warnings, require_good


def loud(*layers, seed=2, by=1.5):
    net = nn.Sequential(*layers)
    torch.manual_seed(seed)
    with torch.no_grad():
        for module in net:
            if isinstance(module, nn.Linear | nn.Conv1d):
                module.weight.normal_(std=by / module.weight[0].numel() ** 0.5)
                module.bias.normal_(std=0.3)
    return net.eval()


def scores():
    return loud(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 5))


@pytest.mark.parametrize(("last", "is_kl"), [(nn.Identity(), True), (nn.Softmax(-1), True), (nn.Sigmoid(), False)])
def test_classes_have_a_kl_by_their_scores_or_by_their_probabilities(last, is_kl):
    report = convert_to_relu(nn.Sequential(scores(), last), torch.randn(400, 8)).report
    assert (report.held_out.refitted.kl is not None) == is_kl
    assert report.held_out.refitted.value > 0
    assert ("KL" in report.held_out.refitted.in_words) == is_kl


def test_strict_names_the_set_that_is_farthest():
    strict = ConversionConfig(strict=True, max_kl=0.002)
    require_good(replace(REPORT, evaluation=None), nn.Identity(), strict)  # held out: 0.00125
    with pytest.raises(ConversionRefusedError, match=r"the second set the network is KL 0.0025 nat .* max_kl = 0.002"):
        require_good(REPORT, nn.Identity(), strict)
    far, near = replace(HELD_OUT, refitted=SECOND.refitted), replace(SECOND, refitted=HELD_OUT.refitted)
    with pytest.raises(ConversionRefusedError, match=r"held out of the data the network is KL 0.0025 nat"):
        require_good(replace(REPORT, held_out=far, evaluation=near), nn.Identity(), strict)
    with pytest.raises(ConversionRefusedError, match="`strict` wants a measured distance"):
        require_good(replace(REPORT, held_out=None, evaluation=None), nn.Identity(), strict)


def test_a_distance_that_is_rounding_is_not_refused():
    """As of a network whose scores lie hundreds apart."""
    for kl, is_refused in ((1.7e-122, False), (1.7e-12, True)):
        found = replace(
            HELD_OUT, refitted=replace(HELD_OUT.refitted, kl=kl), direct=replace(HELD_OUT.direct, kl=kl / 9)
        )
        with pytest.raises(ConversionRefusedError, match="no nearer") if is_refused else nullcontext():
            require_good(replace(REPORT, held_out=found, evaluation=None), nn.Identity(), ConversionConfig())


class Maps(nn.Module):
    """A bare (N, C, T), as torch's losses want it."""

    def __init__(self):
        super().__init__()
        self.net = loud(nn.Conv1d(4, 12, 3, padding=1), nn.GELU(), nn.Conv1d(12, 5, 3, padding=1))

    def forward(self, x):
        return self.net(x)


def test_the_classes_of_a_map_along_a_length_are_on_axis_one():
    net, x = Maps(), torch.randn(160, 4, 16, generator=torch.Generator().manual_seed(0))
    truth = net(x).argmax(1)
    report = convert_to_relu(net, [(x, truth)]).report
    assert report.held_out.rows == report.held_out.samples * 16
    assert report.held_out.original_metrics == {"accuracy": 1.0}
    assert report.held_out.refitted.metrics["accuracy"] == pytest.approx(report.held_out.refitted.agreement)
    assert report.warnings == ()
    rows = OutputReader(net)(x).tensors[""]
    assert torch.equal(rows, net(x).movedim(1, -1))
    # Classes of a linear layer stay where they are, in a network with 1-D convolutions too.
    last = nn.Sequential(nn.Conv1d(4, 6, 1), nn.GELU(), nn.Flatten(2), nn.Linear(16, 7)).eval()
    assert torch.equal(OutputReader(last)(x).tensors[""], last(x))


@pytest.mark.parametrize("name", ["", "logits"])
@torch.no_grad()
def test_the_classes_of_a_map_are_where_its_layer_has_them(name):
    """A classifier of pixels with its channels last: one prediction a pixel, and none a row of pixels."""

    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(3, 24), nn.GELU(), nn.Linear(24, 7))

        def forward(self, x):
            x = self.net(x) * 4
            return {name: x} if name else x

    net, x, fresh = Pixels().eval(), torch.randn(200, 6, 5, 3), torch.randn(60, 6, 5, 3)
    converted, report = convert_to_relu(net, x, evaluation_data=[(fresh, (net.net(fresh)).argmax(-1))])
    p, q = ((model.net(fresh) * 4).double().log_softmax(-1) for model in (net, converted))
    found = report.evaluation
    assert found.rows == 60 * 30
    assert found.original_metrics == {"accuracy": 1.0}
    assert found.refitted.kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-5)
    assert found.refitted.agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())


def test_labels_that_are_not_one_for_each_row_are_told():
    net, x = scores(), torch.randn(400, 8)
    report = convert_to_relu(net, [(x, torch.zeros(400, 3, dtype=torch.long))]).report
    assert report.held_out.original_metrics == {}
    assert any(
        "of shape (400, 3), are not one for each row of the scores, of shape (2, 5)" in w for w in report.warnings
    )
    second = [(torch.randn(100, 8), torch.zeros(100, 1, dtype=torch.long))]
    report = convert_to_relu(net, x, evaluation_data=second).report
    assert report.evaluation.original_metrics == {}
    (warning,) = report.warnings
    assert warning.startswith(
        "the labels of evaluation_data, of shape (100, 1), are not one for each row of the scores"
    )
    for labels in (torch.zeros(400, dtype=torch.long), torch.zeros(400, 3)):  # those of a regression are no classes
        assert not any("labels" in warning for warning in convert_to_relu(net, [(x, labels)]).report.warnings)


def test_a_new_head_is_told_and_a_program_that_ignores_the_config(tmp_path):
    trained = bert(1)
    encoder = trained.bert
    for saved, told in ((trained, 0), (encoder, 1)):
        saved.save_pretrained(tmp_path)
        warnings = [*config_warnings(type(trained).from_pretrained(tmp_path), ("hidden_act",))]
        runtime, *others = warnings
        assert runtime.startswith("in llama.cpp")
        assert [text.startswith("the checkpoint is of a BertModel") for text in others] == [True] * told
    for model in (encoder, gpt2(1)):
        assert [text.split(",")[0] for text in config_warnings(model, ("key",))] == ["in llama.cpp"]


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.beside = scores(), scores()

    def forward(self, x):
        return {"logits": self.first(x), "other": self.beside(x)}


def test_gates_in_a_head_that_does_not_count_are_named():
    net, x = TwoHeads().eval(), torch.randn(400, 8)
    report = convert_with(net, x, outputs=["logits"]).report
    (warning,) = (warning for warning in report.warnings if "did not count" in warning)
    assert warning.startswith("outputs that depend on `beside.1`, `beside.3` did not count (`other`)")
    assert "linear maps: 2 refitted\n" in str(report)
    assert "outputs that did not count: `other`\n" in str(report)
    assert not any("did not count" in said for said in convert_to_relu(net, x).report.warnings)


class ActorCritic(nn.Module):
    """Two heads on what the last gate gives, of which one has a name that no task reads; no output needs `spare`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU())
        self.policy, self.value, self.spare = nn.Linear(24, 4), nn.Linear(24, 1), nn.Linear(24, 2)

    def forward(self, x):
        hidden = self.body(x)
        self.spare(hidden)
        return {"logits": self.policy(hidden) * 3, "value": self.value(hidden), "hidden": hidden}


@torch.no_grad()
def test_all_heads_count_unless_the_caller_names_some():
    """What the last gate gives counts, too, and is as far as the swap's of a network whose other outputs are nearer."""
    net, x, fresh = ActorCritic().eval(), torch.randn(600, 8), torch.randn(2000, 8)
    errors = []
    for outputs in (None, ["logits"]):
        converted, report = convert_with(net, x, outputs=outputs)
        is_named = outputs is not None
        assert report.outputs == (("logits",) if is_named else ("logits", "value", "hidden"))
        assert report.left_out == (("value", "hidden") if is_named else ())
        assert torch.equal(converted.value.weight, net.value.weight) == is_named
        wanted, given = net(fresh)["value"], converted(fresh)["value"]
        errors.append(((given - wanted).square().sum() / (wanted - wanted.mean()).square().sum()).item())
    assert errors[1] > 4 * errors[0]


class States(ActorCritic):
    """States on the way to the output that counts, as a sentence encoder gives them."""

    def forward(self, x):
        hidden = self.body(x)
        return {"logits": self.policy(hidden), "hidden": hidden}


def test_states_on_the_way_to_what_counts_are_not_named():
    report = convert_to_relu(States().eval(), torch.randn(400, 8)).report
    assert not any("did not count" in warning for warning in report.warnings)


class Merging(nn.Linear):
    """As adapters that are merged into the weights for evaluation."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.delta, self.merged = nn.Parameter(torch.ones_like(self.weight)), False

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.weight.data += self.delta.data * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x):
        return super().forward(x) if self.merged else super().forward(x) + x @ self.delta.T


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return x


def test_the_given_model_stays_as_it_is_where_modes_and_calls_change_it():
    net = nn.Sequential(Merging(8, 16), Counting(), nn.GELU(), Merging(16, 3)).train()
    net[3].eval()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    convert_to_relu(net, torch.randn(400, 8))
    assert [(net[i].training, net[i].merged) for i in (0, 3)] == [(True, False), (False, True)]
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-6, msg=name)


def test_weights_that_share_memory_count_as_tied():
    net = loud(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 3))
    net[4].weight.data = net[2].weight.data.t()
    report = convert_with(net, torch.randn(400, 8), max_kl=None).report
    assert any("2.weight is tied: several modules hold it or its memory" in warning for warning in report.warnings)


def test_no_wider_block_where_none_can_be():
    grouped = nn.Conv1d(12, 6, 3, padding=1, groups=2)
    model, x = loud(nn.Conv1d(4, 12, 3), nn.GELU(), grouped).eval(), torch.randn(200, 4, 6)
    assert not convert_with(model, x, max_kl=None).report.can_be_wider
    assert convert_with(scores(), torch.randn(400, 8), max_kl=None).report.can_be_wider
    with pytest.raises(ConversionRefusedError, match=r"Use `width` 1"):
        convert_with(model, x, width=2.0)


def test_of_a_chain_of_layers_each_block_is_widened():
    """Each further map reads a gate and feeds another."""
    report = convert_with(scores().eval(), torch.randn(1600, 8), width=2.0, max_kl=None).report
    assert report.width_share == 2.0
    assert not any("as many units as before" in (layer.note or "") for layer in report.layers)


@pytest.mark.parametrize(("progress", "is_terminal"), [(None, True), (None, False), (True, False), (False, True)])
def test_progress_is_a_line_a_layer_where_stderr_is_a_terminal(progress, is_terminal, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    report = convert_to_relu(scores(), torch.randn(400, 8), progress=progress).report
    said = capsys.readouterr().err.splitlines()
    if progress is False or (progress is None and not is_terminal):
        assert not said
        return
    assert said[0] == "refit: 2 layers"
    for number, (line, layer) in enumerate(zip(said[1:], report.layers, strict=True), start=1):
        error = f"{layer.error_before:.3g} → {layer.error_after:.3g}"
        assert re.fullmatch(rf"{number}/2 {layer.layers[0]}  error {error}  \d+ s left", line)
    assert said[-1].endswith(" 0 s left")
