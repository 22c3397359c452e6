"""Kinks and slopes, units always on, copies: what is written into wider blocks, and that they compute the formula."""

import copy
from functools import cache

import pytest
import torch
from loud_nets import bert, gpt2, llama, loud, tokens, traced
from torch import nn
from torch.nn import functional as F

from hf_lgelu import ConversionRefusedError, convert_to_relu
from hf_lgelu.formats import percent
from hf_lgelu.refit.always_on import write_always_on
from hf_lgelu.refit.kinks import Copies, Kinks
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.place import write_copies, write_placement
from hf_lgelu.refit.widen import widen_original


def test_a_block_with_more_inputs_than_rows_is_widened():
    """As the squeeze of an EfficientNet, of which a picture is one row."""
    model = nn.Sequential(nn.Linear(1152, 16), nn.SiLU(), nn.Linear(16, 4)).eval()
    found = convert_to_relu(model, torch.randn(80, 1152) * torch.randn(1152).exp(), width=2).report.held_out
    assert found.refitted.kl < 0.2 * found.direct.kl


@cache
def one_layer(build):
    """(network of one layer in float64, its inputs, what `traced` says of it), which the tests leave as it is."""
    model, inputs = build(layers=1).double(), tokens(4)
    return model, inputs, traced(model, inputs)


@pytest.mark.parametrize("build", [llama, gpt2, bert])
def test_room_changes_no_output(build):
    model, inputs, (_, program, layers, _) = one_layer(build)
    room = widen_original(model, program, layers, 1.25)
    assert room.extra == {0: 10 if build is not gpt2 else 16}
    width = 64 if build is gpt2 else 40
    assert widen_original(model, program, layers, 99.0).extra == {0: 16 + 5 * width}
    assert any("→" in str(change) for change in room.config_changes)
    with torch.no_grad():
        torch.testing.assert_close(room.model(**inputs).logits, model(**inputs).logits, rtol=0, atol=1e-12)


def test_a_width_that_is_another_key_too_is_found_where_the_config_checks_its_sizes():
    sizes = {"hidden_size": 24, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 4}
    model, inputs = llama(layers=1, **sizes), tokens(4)
    _, program, layers, _ = traced(model, inputs)
    room = widen_original(model, program, layers, 1.25)  # no hidden size of 30 is shared by 4 heads
    assert room.extra == {0: 6}
    assert sorted(map(str, room.config_changes)) == ["intermediate_size: 24 → 30", "mlp_bias: False → True"]


def test_wider_blocks_beside_a_kept_gate_are_refused_by_its_name():
    with pytest.raises(ConversionRefusedError, match="GPT2Config") as refusal:
        convert_to_relu(gpt2(), tokens(), keep=["transformer.h.1.mlp.act"], effort="place", width=1.25)
    said = "transformer.h.1.mlp.act is kept, so its block stays as wide as it was. Keep no gate, or use `width` 1"
    assert said in str(refusal.value)


@pytest.mark.parametrize(("build", "copied"), [(llama, []), (llama, [3, 0, 3, 7]), (gpt2, [3, 0, 3, 7])])
def test_units_always_on_copies_and_placed_gates_compute_the_formula(build, copied):
    """With as many units as inputs, a block is W_down(Σ aₖ·ReLU(z - cₖ) + b + d·z)·u to rounding, written by hand."""
    model, inputs, (_, program, layers, blocks) = one_layer(build)
    extra = 16 + len(copied)
    room = widen_original(model, program, layers, 1 + extra / blocks[0].width)
    _, program, layers, blocks = traced(room.model, inputs)
    assert (room.extra, len(blocks)) == ({0: extra}, 1)
    block, width = blocks[0], blocks[0].width - extra
    torch.manual_seed(4)
    rows = torch.randn(500, 16, dtype=torch.float64)
    slope, kink, constant, line = torch.rand(4, width, dtype=torch.float64) + torch.tensor([[0.5], [0], [0], [0]])
    if build is llama:
        line = torch.zeros_like(line)
    else:
        constant = torch.zeros_like(constant)  # the intercept's
    copies = Copies(torch.tensor(copied, dtype=torch.long), *torch.randn(2, len(copied), dtype=torch.float64))
    fill = torch.zeros(extra, dtype=torch.float64)
    parts = (torch.cat([part, fill + (part is slope)]) for part in (slope, kink, constant, line))
    slopes, kinks, *beside = parts
    placement = Kinks(slopes[:, None], kinks[:, None], *beside, torch.tensor(0.0))
    seen = Moments.zeros(1, 16, 1)
    seen.add(rows[:, None], rows[:, None, :1], rows[:, None, :1])
    original = copy.deepcopy(room.model)
    write_always_on(room.model, block, placement, seen, width, 16, 0.3 if copied else 1.0)
    write_copies(room.model, block, copies, width + 16)
    write_placement(room.model, block.fed, placement)
    w_gate, w_up, w_down = (_matrix(original, operation)[:, :] for operation in _three(block))
    z = rows @ w_gate[:width].T + original.get_parameter(block.fed.before.bias.name)[:width]
    value = (
        slope * (z - kink).relu() + constant + line * (z - original.get_parameter(block.fed.before.bias.name)[:width])
    )
    for source, of_copy, at in zip(*copies, strict=True):
        value[:, source] += of_copy * (z[:, source] - at).relu()
    if block.fed.other is not None:
        value = value * (rows @ w_up[:width].T)
    expected = value @ w_down[:, :width].T
    new_gate, new_up, new_down = (_matrix(room.model, operation) for operation in _three(block))
    features = (rows @ new_gate.T + room.model.get_parameter(block.fed.before.bias.name)).relu()
    if block.fed.other is not None:
        features = features * (rows @ new_up.T)
    actual = features @ new_down.T
    actual = actual + (0 if block.down.operation.bias is None else _bias_change(room.model, original, block))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * float(expected.detach().abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("build", [llama, bert])
def test_a_larger_budget_is_a_dial_that_comes_as_near_as_one_likes(build):
    """Twice and four times the units, on inputs that were not fitted on."""
    model, inputs = build(layers=1), tokens(100)
    others = tokens(100, seed=9)
    gaps = []
    for budget in (2.0, 4.0):
        converted, report = convert_to_relu(model, inputs, effort="place", width=budget)
        assert report.width_share == budget
        assert f"the same, of the original's number: {percent(budget * report.live_units)}\n" in str(report)
        with torch.no_grad():
            expected, found = (network(**others).logits.log_softmax(-1) for network in (model, converted))
        gaps.append(float(F.kl_div(found, expected, log_target=True, reduction="sum")) / found[..., 0].numel())
    assert gaps[0] < 0.4 * report.steps[0].distance  # of the refit, in the shape there was
    assert gaps[1] < 0.4 * gaps[0]


def _three(block):
    return block.fed.before, block.fed.other or block.fed.before, block.down.operation


def _matrix(model, operation):
    weight = model.get_parameter(operation.weight_name).detach()
    return weight if operation.output_axis == 0 else weight.T


def _bias_change(model, original, block):
    name = block.down.operation.bias.name
    return (model.get_parameter(name) - original.get_parameter(name)).detach()


class Watched(nn.Module):
    """A head that does not count reads the first gate, too."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.watch = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3), nn.Linear(12, 5)

    def forward(self, x):
        hidden = nn.functional.gelu(self.a(x))
        return {"logits": self.c(nn.functional.gelu(self.b(hidden))), "hidden_states": self.watch(hidden)}


def test_units_that_an_unread_head_reads_are_not_added():
    inputs = {"x": torch.randn(200, 6, generator=torch.Generator().manual_seed(0))}
    with pytest.raises(ConversionRefusedError, match="does not count"):
        convert_to_relu(Watched(), inputs, width=1.5)


@pytest.mark.parametrize(("kernel", "has_norm"), [(1, False), (1, True), (3, False), (3, True)])
def test_convolutions_get_units_that_compute_the_formula(kernel, has_norm):
    first, second = nn.Conv2d(3, 6, kernel, padding="same", bias=not has_norm), nn.Conv2d(6, 4, kernel, padding="same")
    norm = nn.BatchNorm2d(6) if has_norm else nn.Identity()
    model, x = loud(nn.Sequential(first, norm, nn.GELU(), second)).double(), torch.randn(2, 3, 5, 5).double()
    for statistic in norm.buffers() if has_norm else ():
        statistic.copy_(torch.rand(statistic.shape) + 0.5)
    _, program, layers, _ = traced(model, x)
    room = widen_original(model, program, layers, 1.5).model
    torch.testing.assert_close(room(x), model(x), rtol=0, atol=1e-12)
    _, _, _, (block,) = traced(room, x)
    room[2], z = nn.ReLU(), model[:2](x)
    value = z.relu()
    if block.has_linear_part:
        rows, line = x.movedim(1, -1).reshape(-1, 1, 3), torch.rand(6).double()
        seen = Moments.zeros(1, 3, 1)
        seen.add(rows, rows[..., :1], rows[..., :1])
        nothing = torch.zeros(6, 1).double()
        placement = Kinks(nothing + 1, nothing, nothing[:, 0], line, nothing[0])
        write_always_on(room, block, placement, seen, 6, 3, 1.0)
        value += (line * (z - first.bias[:, None, None]).movedim(1, -1)).movedim(-1, 1)
    else:
        copies = Copies(torch.tensor([2, 2, 0]), *torch.tensor([[0.7, -0.4, 0.2], [0.5, -1.0, 0.3]]).double())
        write_copies(room, block, copies, 6)
        for source, slope, kink in zip(*copies, strict=True):
            value[:, source] += slope * (z[:, source] - kink).relu()
    torch.testing.assert_close(room(x), second(value), rtol=0, atol=2e-4 if block.has_linear_part else 1e-10)
    assert block.has_linear_part == (kernel == 1 and not has_norm)


def test_blocks_of_convolutions_are_widened_and_the_rest_is_named():
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.SiLU(), nn.Conv2d(12, 8, 1), nn.GELU(),
        nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(),
    )  # fmt: skip
    wider, report = convert_to_relu(loud(model, 0.5), torch.randn(150, 3, 6, 6), width=3.0)
    assert wider[3].weight.shape == (8, 36, 1, 1)
    assert {layer.layers: layer.note for layer in report.layers} == {("3",): None, ("5",): "as many units as before"}
    refit, place = report.steps
    assert place.distance < 0.5 * refit.distance
