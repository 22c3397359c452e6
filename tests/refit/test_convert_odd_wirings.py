"""Networks with unusual wiring: what is refitted is held against dense least squares, or against what the nets give."""

import pytest
import torch
from dense_oracle import Step, ones, refit, swapped
from refit_nets import drawn
from small_networks import convert_with
from torch import Tensor, nn

from hf_lgelu import ConversionRefusedError, convert_to_relu
from hf_lgelu.networks.batches import Batch
from hf_lgelu.refit.folds import deal_folds
from hf_lgelu.refit.samples import read_samples


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class NormedTokens(nn.Module):
    """BatchNorm over tokens: its bias is none of the map's, though its scale is one number for all channels."""

    def __init__(self, tokens):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 6)
        self.norm, self.relu, self.head = nn.BatchNorm1d(tokens), nn.ReLU(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, tokens, 4)."""
        return self.head(self.relu(self.norm(self.down(self.act(self.up(x))))))


@pytest.mark.parametrize("tokens", [5, 6])
def test_a_batch_norm_over_another_axis_is_left_alone(tokens):
    model = drawn(NormedTokens(tokens))
    with torch.no_grad():
        model.norm.weight.fill_(1.3)
        model.norm.running_var.fill_(0.7)
    inputs = rows(96, tokens, 4)
    converted, _ = convert_to_relu(model, inputs)
    step = Step(("down",), "down", bias=("down.bias", ones))
    expected, _ = refit(model, [step], deal_folds(read_samples([Batch(inputs)])))
    torch.testing.assert_close(converted.down.weight, expected.down.weight, rtol=0, atol=1e-9)
    torch.testing.assert_close(converted.down.bias, expected.down.bias, rtol=0, atol=1e-9)
    for name, value in model.norm.state_dict().items():
        assert torch.equal(converted.norm.state_dict()[name], value), name


class Wired(nn.Module):
    """What is done with an inner map's output in front of a ReLU and the head."""

    def __init__(self, behind, **modules):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)
        self.target, self.relu, self.head = nn.Identity(), nn.ReLU(), nn.Linear(6, 3)
        for name, module in modules.items():
            setattr(self, name, module)
        self.register_buffer("factor", torch.linspace(-2, 3.5, 6))
        self._behind = behind

    def forward(self, x):
        return self.head(self.relu(self._behind(self, x)))

    def inner(self, x):
        return self.down(self.act(self.up(x)))


def wired(behind, **modules):
    torch.manual_seed(0)
    return drawn(Wired(behind, **modules))


SUMS = {
    # name: (what is computed, the target's module, ∂target/∂output)
    "subtracted": (lambda net, x: net.target(x - net.inner(x)), "target", -1.0),
    "subtracted from": (lambda net, x: net.target(net.inner(x) - x), "target", 1.0),
    "halved": (lambda net, x: net.target(x + net.inner(x) / 2), "target", 0.5),
    "scaled by channel": (lambda net, x: net.target(x + net.factor * net.inner(x)), "target", "factor"),
    "divided by channel": (lambda net, x: net.target(x + net.inner(x) / net.factor), "target", "inverse"),
    "a divisor": (lambda net, x: net.factor / (net.inner(x) + 90), "down", 1.0),
    "a part of a sum": (lambda net, x: torch.add(x, net.inner(x), alpha=0.5), "down", 1.0),
    "added to rows": (lambda net, x: (x[None] + net.inner(x)[:, None]).sum(0), "down", 1.0),
}


@pytest.mark.parametrize("name", SUMS)
def test_where_an_output_ends_up(name):
    behind, target, scale = SUMS[name]
    model, inputs = wired(behind), rows(48, 6)
    factors = {"factor": model.factor, "inverse": 1 / model.factor}
    of = (lambda _: factors[scale]) if isinstance(scale, str) else (lambda _: scale)
    converted, report = convert_to_relu(model, inputs)
    expected, _ = refit(
        model, [Step(("down",), target, (of,), ("down.bias", of))], deal_folds(read_samples([Batch(inputs)]))
    )
    assert report.layers[0].choice == "refit"
    for part in ("weight", "bias"):
        ours, theirs = (net.down.get_parameter(part) for net in (converted, expected))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_a_map_whose_sum_holds_another_is_fitted_behind_it():
    """`early` runs first, but its target holds what comes of `late`."""

    def behind(net, x):
        early = net.early(net.act(net.up(x)))
        return net.target(early + net.late(net.act2(net.down(x.relu().repeat(1, 2)[:, :9]))).relu())

    model = wired(behind, early=nn.Linear(9, 6), late=nn.Linear(6, 6), act2=nn.SiLU())
    inputs = rows(96, 6)
    converted, report = convert_to_relu(model, inputs)
    assert [layer.layers for layer in report.layers] == [("late",), ("early",)]
    steps = [Step((name,), at, bias=(f"{name}.bias", ones)) for name, at in (("late", "late"), ("early", "target"))]
    expected, _ = refit(model, steps, deal_folds(read_samples([Batch(inputs)])))
    for name in ("early", "late"):
        ours, theirs = (net.get_submodule(name).weight for net in (converted, expected))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


class TwoMaps(nn.Module):
    """Two maps of one image into one sum."""

    def __init__(self, first, second, swap):
        super().__init__()
        self.up, self.act, self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), first, second
        self.relu, self.head, self._swap = nn.ReLU(), nn.Conv2d(4, 3, 1), swap

    def forward(self, x):
        x = self.act(self.up(x))
        second = self.second(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if self._swap else self.second(x)
        return self.head(self.relu(self.first(x) + second))


@pytest.mark.parametrize(
    "build",
    [
        lambda: TwoMaps(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 4, 5, padding=2, groups=2), False),
        lambda: TwoMaps(nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 4), True),
    ],
    ids=["groups", "layouts"],
)
def test_maps_that_cannot_be_solved_for_together_come_one_behind_the_other(build):
    model = drawn(build())
    converted, report = convert_to_relu(model, rows(60, 2, 5, 5))
    assert [layer.layers for layer in report.layers] == [("second",), ("first",)]  # as they are computed
    fresh = rows(30, 2, 5, 5, seed=9)
    with torch.no_grad():
        error, direct = ((net(fresh) - model(fresh)).square().mean() for net in (converted, swapped(model)))
    assert error < 0.6 * direct


class InPlace(nn.Module):
    """What the gate gives is written over, and so is a part of a sum; or neither is."""

    def __init__(self, in_place):
        super().__init__()
        self.up, self.act, self.down, self.head = nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 6), nn.Linear(6, 3)
        self._in_place = in_place

    def forward(self, x):
        x = x * 2.0
        value = self.act(self.up(x))
        value = self.down(value.mul_(3) if self._in_place else value * 3)
        return self.head(x.add_(value) if self._in_place else x + value)


def test_what_is_written_over_in_place_is_none_of_what_was_computed_before(monkeypatch):
    monkeypatch.setattr("hf_lgelu.refit.convert.is_nearer", lambda *gaps: True)
    converted = []
    for in_place in (False, True):
        torch.manual_seed(0)
        converted.append(convert_with(drawn(InPlace(in_place)), rows(400, 6), effort="place", max_kl=None).model)
    for name, value in converted[0].state_dict().items():
        assert torch.equal(converted[1].state_dict()[name], value), name


@pytest.mark.parametrize("width", [pytest.param(9, marks=pytest.mark.slow), 12])
@pytest.mark.parametrize("options", [{}, {"keep": ["3"]}], ids=str)
def test_one_gate_at_two_places_is_placed_as_two(options, width):
    def build(act, other):
        torch.manual_seed(0)
        return drawn(nn.Sequential(nn.Linear(6, 9), act, nn.Linear(9, width), other, nn.Linear(width, 4)))

    gelu = nn.GELU()
    shared, inputs = build(gelu, gelu), rows(400, 6)
    one, two = (
        convert_with(model, inputs, max_kl=None, effort="place", **options)[0]
        for model in (shared, build(nn.GELU(), nn.GELU()))
    )
    for name, value in two.state_dict().items():
        assert torch.equal(one.state_dict()[name], value), name
    assert shared[1] is shared[3] is gelu
    assert not gelu._forward_hooks


class Uses(nn.Module):
    """A map that one forward uses twice: the second time on what the first has given, or on another input."""

    def __init__(self, in_turn):
        super().__init__()
        self.up, self.mid, self.down, self.act = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 9), nn.GELU()
        self.in_turn = in_turn

    def forward(self, x):
        first = self.act(self.up(x))
        given = self.down(first)
        return [given, self.down(self.act(given if self.in_turn else self.mid(first)))]


@pytest.mark.parametrize("in_turn", [True, False])
def test_a_map_used_twice_is_one_least_squares_problem(in_turn):
    model, x = drawn(Uses(in_turn)), rows(48, 6)
    converted, report = convert_to_relu(model, x)
    assert report.layers[-1].layers == ("down",)
    assert report.layers[-1].rows == 2 * 48
    with torch.no_grad():
        wanted = torch.cat(model(x))
        # In turn, what the original computes before each gate; else what the converted network has before it.
        last = model.down(model.act(model.up(x))) if in_turn else converted.mid(converted.up(x).relu())
        features = torch.cat([model.up(x).relu(), last.relu()])
        around, missing = features - features.mean(0), wanted - model.down(features)
        penalty = 1e-3 * around.square().sum() / 9 * torch.eye(9, dtype=x.dtype)
        change = torch.linalg.solve(around.T @ around + penalty, around.T @ missing)
    torch.testing.assert_close(converted.down.weight, model.down.weight + change.T, rtol=0, atol=1e-9)
    bias = model.down.bias + missing.mean(0) - features.mean(0) @ change
    torch.testing.assert_close(converted.down.bias, bias, rtol=0, atol=1e-9)


class SkippedNorm(nn.Module):
    """A block whose BatchNorm cuts off the first half of its channels, on a skip path that drifts."""

    def __init__(self, shortcut: bool):
        super().__init__()
        self.stem, self.gate = nn.Linear(6, 8), nn.GELU()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.shortcut = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)) if shortcut else nn.Identity()
        self.sum, self.head = nn.Identity(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(self.stem(x))
        return self.head(self.sum(self.norm(self.down(self.act(self.up(x)))) + self.shortcut(x)))


@pytest.mark.parametrize("shortcut", [False, True], ids=["skip", "shortcut with a norm"])
def test_the_mean_of_channels_that_a_batch_norm_cuts_off_is_made_good(shortcut):
    model = SkippedNorm(shortcut).double()
    with torch.no_grad():
        model.up.bias += 2  # gates that are open: the change of the weights moves the mean
        model.norm.weight[:4] = 0
        for _ in range(50):
            model.train()(rows(256, 6, seed=1))
    converted, report = convert_to_relu(model.eval(), rows(1024, 6))
    assert report.layers[-1].choice == "refit"
    changed = (converted.down.weight - model.down.weight).abs().amax(1)
    assert changed[:4].tolist() == [0] * 4
    assert changed[4:].min() > 1e-6
    inputs, sums = rows(4096, 6, seed=2), {}
    for name, network in ("original", model), ("converted", converted):
        hook = network.sum.register_forward_hook(lambda _, given, output, name=name: sums.update({name: output}))
        with torch.no_grad():
            network(inputs)
        hook.remove()
    changed = sums["converted"] - sums["original"]
    torch.testing.assert_close(changed.mean(0), torch.zeros(8, dtype=torch.float64), rtol=0, atol=0.01)
    assert sums["original"][:, :4].std(0).min() > 0.1  # there is something on the way that could have moved


def test_a_small_layer_scale_makes_no_large_weights():
    """Half precision holds them: what drifts on the skip path would take weights 10⁵ times as large there."""
    model = drawn(ScaledBlock())
    with torch.no_grad():
        model.scale[:4] = 1e-5
    converted, report = convert_to_relu(model, rows(1024, 6))
    assert report.layers[-1].choice == "refit"
    moved = (converted.down.weight - model.down.weight).abs().amax(1)
    assert moved[:4].tolist() == [0] * 4
    assert moved[4:].min() > 1e-4
    assert converted(rows(8, 6)).isfinite().all()


class ScaledBlock(nn.Module):
    """A block with a LayerScale, on a skip path that drifts."""

    def __init__(self):
        super().__init__()
        self.stem, self.gate = nn.Linear(6, 8), nn.GELU()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)
        self.scale, self.head = nn.Parameter(torch.ones(8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(self.stem(x))
        return self.head(x + self.scale * self.down(self.act(self.up(x))))


class OtherInput(nn.Module):
    """The gate is multiplied by a map of another input: no block of three maps of one."""

    def __init__(self, width):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 9), nn.Linear(width, 9), nn.Linear(9, 3)
        self.act = nn.SiLU()

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(c))


def flattened():
    """The layer after the gate takes its units of all tokens at once."""
    return nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Flatten(), nn.Linear(45, 3))


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (lambda: OtherInput(4), {"x": rows(200, 4), "c": rows(200, 4, seed=1)}),
        (lambda: OtherInput(7), {"x": rows(200, 4), "c": rows(200, 7, seed=1)}),
        (flattened, rows(300, 5, 4)),
    ],
    ids=["product", "product of another width", "flattened"],
)
def test_what_is_no_block_is_refitted_and_not_widened(build, inputs):
    model = drawn(build())
    found = convert_to_relu(model, inputs, effort="place")
    assert found.report.held_out.refitted.kl < found.report.held_out.direct.kl
    with pytest.raises(ConversionRefusedError, match="Use `width` 1"):
        convert_to_relu(model, inputs, width=1.5)


class SharedHalf(nn.Module):
    """Two gated units whose other halves are one map, or two of the same weights."""

    def __init__(self, is_one_module):
        super().__init__()
        self.gates, self.downs = (nn.ModuleList(nn.Linear(*sizes) for _ in range(2)) for sizes in ((4, 9), (9, 4)))
        self.ups, self.acts = nn.ModuleList([nn.Linear(4, 9)]), nn.ModuleList([nn.SiLU(), nn.SiLU()])
        self.ups.append(self.ups[0] if is_one_module else nn.Linear(4, 9))
        self.ups[1].weight = self.ups[0].weight
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for gate, act, up, down in zip(self.gates, self.acts, self.ups, self.downs, strict=True):
            x = x + down(act(gate(x)) * up(x))
        return self.head(x)


@pytest.mark.parametrize("is_one_module", [True, False])
def test_half_of_a_gated_unit_that_another_one_uses_too_stays_as_it_is(is_one_module, monkeypatch):
    monkeypatch.setattr("hf_lgelu.refit.convert.is_nearer", lambda *gaps: True)  # every rung is looked at here
    torch.manual_seed(0)
    model, inputs = drawn(SharedHalf(is_one_module)), rows(600, 4)
    with torch.no_grad():
        for gate in model.gates:
            gate.weight.mul_(3)
    converted, report = convert_with(model, inputs, effort="place", max_kl=None)
    assert torch.equal(converted.ups[0].weight, model.ups[0].weight)
    assert not torch.equal(converted.gates[1].weight, model.gates[1].weight)
    assert report.held_out.refitted.kl < report.held_out.direct.kl
    with pytest.raises(ConversionRefusedError, match="no gate stands between"):
        convert_to_relu(model, inputs, width=2)


class Conditioned(nn.Module):
    """Its gates' ways meet what is computed of a condition: one number for all positions, or a row of their own."""

    def __init__(self, per_position):
        super().__init__()
        self.per_position = per_position
        self.first, self.act, self.second = nn.Conv1d(3, 8, 3, padding=1), nn.GELU(), nn.Conv1d(8, 8, 3, padding=1)
        self.condition, self.act2, self.last = nn.Linear(4, 8), nn.GELU(), nn.Conv1d(8, 2, 1)

    def forward(self, x, t):
        added = self.condition(t)
        added = added.transpose(1, 2) if self.per_position else added[:, :, None]
        return {"values": self.last(self.act2(self.second(self.act(self.first(x)) + added)))}


@pytest.mark.parametrize("per_position", [False, True])
def test_what_is_added_makes_good_what_is_wrong_at_each_position_only_where_it_has_one_for_each(per_position):
    model = drawn(Conditioned(per_position))
    given = {"x": rows(200, 3, 10), "t": rows(200, 10, 4, seed=1) if per_position else rows(200, 4, seed=1)}
    converted, report = convert_to_relu(model, given)
    refitted = {name for name in ("condition", "second", "last")
                if not torch.equal(converted.get_submodule(name).weight, model.get_submodule(name).weight)}  # fmt: skip
    assert "last" in refitted
    assert ("second" in refitted) is not per_position
    named = {name for layer in report.layers for name in layer.layers}
    assert named == {"last", "condition" if per_position else "second"}


class Masked(nn.Module):
    """Scores of classes that cannot be are −∞, by a sum."""

    def __init__(self, least):
        super().__init__()
        self.up, self.act, self.head = nn.Linear(4, 12), nn.GELU(), nn.Linear(12, 3)
        self.least = least

    def forward(self, x):
        cannot_be = torch.nn.functional.pad(x[:, :2] > 1, (0, 1))  # the last always can
        return {"logits": self.head(self.act(self.up(x))) + torch.where(cannot_be, self.least, 0.0)}


@pytest.mark.parametrize("least", [-torch.inf, torch.finfo(torch.float32).min])
def test_what_an_added_mask_hides_ends_no_conversion(least):
    model = drawn(Masked(least)).float()
    _, report = convert_to_relu(model, rows(400, 4).float())
    assert 0 < report.held_out.refitted.kl < report.held_out.direct.kl


class Routed(nn.Module):
    """Tokens go to one of two experts, each of which gets as many as choose it."""

    def __init__(self):
        super().__init__()
        self.route, self.experts = (
            nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)),
            nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2)),
        )

    def forward(self, x):
        out, chosen = torch.zeros_like(x), self.route(x).argmax(-1)
        for number, expert in enumerate(self.experts):
            (places,) = torch.where(chosen == number)
            out = out.index_add(0, places, expert(x[places]))
        return {"values": out}


def test_experts_that_are_given_the_tokens_that_choose_them_are_left_in_words():
    try:
        report = convert_with(drawn(Routed()), rows(200, 4), max_kl=None).report
    except ConversionRefusedError as error:  # no nearer than the swap, with such experts left as they are
        report = error.report
    assert any("values after a gate decide what" in warning for warning in report.warnings)


class RareBranch(nn.Module):
    """A branch that few rows take, as some experts have few tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down = nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)
        self.rare_up, self.rare_act, self.rare_down = nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        hidden = x + self.down(self.act(self.up(x)))
        rare = (x[:, 0] > 3).nonzero()[:, 0]
        return self.head(hidden.index_add(0, rare, self.rare_down(self.rare_act(self.rare_up(hidden[rare])))))


@pytest.mark.parametrize("count", [1, 2])
def test_a_branch_without_a_row_in_some_folds_is_refitted_on_the_others(count):
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0)).clamp(max=2.9)
    x[7 * torch.arange(count), 0] = 3.5
    report = convert_to_relu(RareBranch(), x).report
    rows = {layer.layers: layer.rows for layer in report.layers}
    assert rows == {("down",): 348, ("rare_down",): count}
    assert report.held_out.refitted.kl < 0.2 * report.held_out.direct.kl


class Guarded(nn.Module):
    """Python reads values after a gate, as the code of BART does in float16."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down = nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)
        self.next_up, self.next_act, self.next_down = nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.down(self.act(self.up(x)))
        if hidden.abs().max() > 1e6:
            hidden = hidden.clamp(-1e6, 1e6)
        return self.head(hidden + 0.1 * self.next_down(self.next_act(self.next_up(hidden))))


def test_a_map_after_a_branch_that_values_after_a_gate_decide_is_left_in_words():
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
    report = convert_to_relu(Guarded(), x).report
    (left,), (refitted,) = ([layer for layer in report.layers if layer.is_unfit is unfit] for unfit in (True, False))
    assert (left.layers, refitted.layers) == (("next_down.weight",), ("down",))
    assert "the student may decide otherwise" in left.note
