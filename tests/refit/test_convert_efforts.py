"""The rungs above the refit: kinks and slopes, units always on, whole blocks, distillation, and the ladder itself."""

import copy
import itertools
import math
import operator
from functools import partial

import numpy as np
import pytest
import torch
from fresh_process import run_fresh
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from hf_lgelu import ConversionRefusedError, convert_to_relu, gate_costs
from hf_lgelu.models.sites import find_sites
from hf_lgelu.refit.always_on import low_rank, write_always_on
from hf_lgelu.refit.batches import Batch, read_batches
from hf_lgelu.refit.blocks import BlockRows, block_moments, reconstruct_block
from hf_lgelu.refit.centred import CentredAdam, CentredMap
from hf_lgelu.refit.distill import distill, output_loss
from hf_lgelu.refit.folds import deal_folds
from hf_lgelu.refit.kinks import Placement, PlacementSums, fit_placement, knots
from hf_lgelu.refit.ladder import EFFORTS, Metric, OutOfTimeError, check_effort, climb
from hf_lgelu.refit.layers import find_layers
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.placement import find_gate_units, write_placement
from hf_lgelu.refit.preparation import Copies, write_copies
from hf_lgelu.refit.program import Program
from hf_lgelu.refit.target_gates import TARGETS
from hf_lgelu.refit.widen import find_blocks, make_room

VOCABULARY = 40


def tokens(count=60, length=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(VOCABULARY, (count, length), generator=generator)}


def loud(model, factor=3.0):
    """Weights so large that the gates' form matters."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, factor / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def llama(**more):
    return loud(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=16, intermediate_size=40, num_hidden_layers=2,
                num_attention_heads=2, max_position_embeddings=16, **more,
            )
        ),
        1.0,
    )  # fmt: skip


def gpt2():
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return loud(
        GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16, **ids)), 1.0
    )


def bert():
    return loud(
        BertForSequenceClassification(
            BertConfig(
                vocab_size=VOCABULARY, hidden_size=16, intermediate_size=40, num_hidden_layers=2,
                num_attention_heads=2, max_position_embeddings=16, num_labels=3,
            )
        ),
        1.0,
    )  # fmt: skip


def traced(model, inputs):
    sites = find_sites(model)
    program = Program(model, sites, inputs)
    layers = find_layers(program, model, sites).layers
    return sites, program, layers, find_blocks(program, layers, find_gate_units(program))


@pytest.mark.parametrize("basis", ["relu", "constant", "line"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_placement_is_the_best_of_least_squares_at_every_kink(basis, weighted):
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(400, 3, generator=generator, dtype=torch.float64) * torch.tensor([0.5, 1.0, 2.0]) + 0.3
    weight = torch.rand(400, 3, generator=generator, dtype=torch.float64) if weighted else None
    sums = PlacementSums.zeros(3)
    for rows in range(0, 400, 150):
        part = slice(rows, rows + 150)
        sums.add(z[part], F.silu(z[part]), None if weight is None else weight[part])
    found = fit_placement(sums, basis)
    for channel in range(3):
        x, y = z[:, channel].numpy(), F.silu(z[:, channel]).numpy()
        w = np.ones(400) if weight is None else weight[:, channel].numpy()
        best = np.inf
        for kink in knots().tolist():
            columns = np.stack([np.maximum(x - kink, 0), np.ones(400), x], 1)[
                :, : {"relu": 1, "constant": 2}.get(basis, 3)
            ]
            if not (x >= kink).any() or (x >= kink).all():
                continue
            solution = np.linalg.lstsq(np.sqrt(w)[:, None] * columns, np.sqrt(w) * y, rcond=None)[0]
            best = min(best, (w * (y - columns @ solution) ** 2).sum())
        parts = found.slope, found.kink, found.constant, found.line
        slope, kink, constant, line = (float(part[channel]) for part in parts)
        reached = (w * (y - slope * np.maximum(x - kink, 0) - constant - line * x) ** 2).sum()
        # The floor under the diagonal costs little; nothing can be below the best.
        assert best * (1 - 1e-9) <= reached <= best * 1.05
        assert float(found.unexplained[channel]) == pytest.approx(reached / (w * y**2).sum(), rel=0.05)


def test_a_channel_without_spread_keeps_its_gate():
    sums = PlacementSums.zeros(1)
    sums.add(torch.full((50, 1), 0.05), torch.full((50, 1), 0.02))
    found = fit_placement(sums, "line")
    assert (float(found.slope), float(found.kink)) == (1.0, 0.0)


def test_low_rank_is_the_best_in_the_metric_of_the_inputs():
    torch.manual_seed(3)
    matrix = torch.randn(5, 7, dtype=torch.float64)
    rows = torch.randn(300, 7, dtype=torch.float64) @ torch.randn(7, 7, dtype=torch.float64)
    left, right = low_rank(matrix, rows.T @ rows / 300, 2)
    error = ((matrix - left @ right) @ rows.T).square().sum() / 300
    values, vectors = torch.linalg.eigh(rows.T @ rows / 300)
    root = vectors @ values.sqrt().diag() @ vectors.T
    tail = torch.linalg.svdvals(matrix @ root)[2:].square().sum()
    torch.testing.assert_close(error, tail, rtol=1e-4, atol=0)
    torch.testing.assert_close((rows @ right.T).square().mean(0), torch.ones(2, dtype=torch.float64), rtol=1e-4, atol=0)


@pytest.mark.parametrize("build", [llama, gpt2, bert])
def test_room_changes_no_output(build):
    model, inputs = build(), tokens(4)
    sites, program, layers, _ = traced(model, inputs)
    room = make_room(model, program, layers, len(sites), 1.25)
    assert room.extra == 10 if build is not gpt2 else room.extra == 16
    width = 64 if build is gpt2 else 40
    assert make_room(model, program, layers, len(sites), 99.0).extra == 16 + 5 * width
    assert any("→" in str(change) for change in room.config_changes)
    with torch.no_grad():
        torch.testing.assert_close(room.model(**inputs).logits, model(**inputs).logits, rtol=0, atol=1e-5)


def test_a_family_without_a_key_for_the_biases_does_without_or_is_refused():
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    model, inputs = loud(MistralForCausalLM(config), 1.0), tokens()
    sites, program, layers, _ = traced(model, inputs)
    assert make_room(model, program, layers, len(sites), 1.0).model is model
    with pytest.raises(ConversionRefusedError, match="no key of MistralConfig"):
        convert_to_relu(model, inputs, effort="place", width_budget=1.25)


def test_wider_blocks_beside_a_kept_gate_are_refused_by_its_name():
    with pytest.raises(ConversionRefusedError, match=r"no key of GPT2Config") as refusal:
        convert_to_relu(gpt2(), tokens(), keep=["transformer.h.1.mlp.act"], effort="place", width_budget=1.25)
    said = "transformer.h.1.mlp.act is kept, so its block stays as wide as it was. Keep no gate, or use width_budget=1"
    assert said in str(refusal.value)


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("copied", [[], [3, 0, 3, 7]])
def test_units_always_on_copies_and_placed_gates_compute_the_formula(build, copied):
    """With as many units as inputs, a block is W_down(Σ aₖ·ReLU(z - cₖ) + b + d·z)·u to rounding, written by hand."""
    model, inputs = build().double(), tokens(4)
    sites, program, layers, blocks = traced(model, inputs)
    extra = 16 + len(copied)
    room = make_room(model, program, layers, len(sites), 1 + extra / blocks[0].width)
    sites, program, layers, blocks = traced(room.model, inputs)
    assert (room.extra, len(blocks)) == (extra, 2)
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
    placement = Placement(
        torch.cat([slope, fill + 1]), *(torch.cat([part, fill]) for part in (kink, constant, line)), torch.tensor(0.0)
    )
    seen = Moments.zeros(1, 16, 1)
    seen.add(rows[:, None], rows[:, None, :1], rows[:, None, :1])
    original = copy.deepcopy(room.model)
    write_always_on(room.model, block, placement, seen, width, 16, 0.3 if copied else 1.0)
    write_copies(room.model, block, copies, width + 16)
    write_placement(room.model, block.unit, placement)
    w_gate, w_up, w_down = (_matrix(original, operation)[:, :] for operation in _three(block))
    z = rows @ w_gate[:width].T + original.get_parameter(block.unit.before.bias)[:width]
    value = slope * (z - kink).relu() + constant + line * (z - original.get_parameter(block.unit.before.bias)[:width])
    for source, of_copy, at in zip(*copies, strict=True):
        value[:, source] += of_copy * (z[:, source] - at).relu()
    if block.unit.other is not None:
        value = value * (rows @ w_up[:width].T)
    expected = value @ w_down[:, :width].T
    new_gate, new_up, new_down = (_matrix(room.model, operation) for operation in _three(block))
    features = (rows @ new_gate.T + room.model.get_parameter(block.unit.before.bias)).relu()
    if block.unit.other is not None:
        features = features * (rows @ new_up.T)
    actual = features @ new_down.T
    actual = actual + (0 if block.down.operation.bias is None else _bias_change(room.model, original, block))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("build", [llama, bert])
def test_a_larger_budget_is_a_dial_that_comes_as_near_as_one_likes(build):
    """Twice and four times the units, on other inputs than those that were fitted on."""
    model, inputs = build(), tokens(100)
    others = tokens(100, seed=9)
    gaps = []
    for budget in (2.0, 4.0):
        converted, report = convert_to_relu(model, inputs, effort="place", width_budget=budget)
        assert report.width_share == budget
        with torch.no_grad():
            expected, found = (network(**others).logits.log_softmax(-1) for network in (model, converted))
        gaps.append(float(F.kl_div(found, expected, log_target=True, reduction="sum")) / found[..., 0].numel())
    assert gaps[0] < 0.4 * report.steps[0].gap  # of the refit, in the shape there was
    assert gaps[1] < 0.4 * gaps[0]


def _three(block):
    return block.unit.before, block.unit.other or block.unit.before, block.down.operation


def _matrix(model, operation):
    weight = model.get_parameter(operation.weight).detach()
    return weight if operation.output_axis == 0 else weight.T


def _bias_change(model, original, block):
    name = block.down.operation.bias
    return (model.get_parameter(name) - original.get_parameter(name)).detach()


def test_the_ridge_behind_a_placed_gate_is_that_of_its_new_features(monkeypatch):
    """The normal equations, dense, with the features of the network that came out."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 40), nn.GELU(), nn.Linear(40, 4)).double()
    model[0].weight.data *= 3
    inputs = torch.randn(400, 3, dtype=torch.float64)
    monkeypatch.setattr("hf_lgelu.refit.convert.is_nearer", lambda *gaps: True)  # the second rung is looked at here
    converted, report = convert_to_relu(model, inputs, effort="place")
    assert [step.effort for step in report.steps] == ["refit", "place"]
    assert report.steps[1].is_kept, report.steps
    folds = deal_folds(read_batches(inputs))
    rows = torch.cat([batch.load().inputs for fold in folds.folds for batch in fold])
    features, target = converted[1](converted[0](rows)).detach(), model(rows).detach()
    centred = features - features.mean(0)
    gram = centred.T @ centred
    gram += report.layers[0].strength * gram.diagonal().mean() * torch.eye(40, dtype=torch.float64)
    residual = target - features @ model[2].weight.T - model[2].bias
    change = torch.linalg.solve(gram, centred.T @ (residual - residual.mean(0))).T
    torch.testing.assert_close(converted[2].weight.detach(), (model[2].weight + change).detach(), rtol=0, atol=1e-8)
    # And the gates' maps are rows of the original times a slope.
    share = converted[0].weight / model[0].weight
    torch.testing.assert_close(share, share[:, :1].expand_as(share), rtol=1e-9, atol=0)
    assert (converted[0].weight - model[0].weight).abs().max() > 1e-3


def test_a_block_is_moved_only_where_unseen_rows_are_nearer():
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 5), nn.LayerNorm(5))
    inputs = torch.randn(900, 5)
    _, _, _, blocks = traced(model, inputs[:4])
    wanted = copy.deepcopy(model[:3])
    wanted[1] = nn.ReLU()
    with torch.no_grad():
        for parameter in wanted.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        targets = wanted(inputs)
    before = copy.deepcopy(model.state_dict())
    noise = BlockRows(inputs[:8], 10 * torch.randn(8, 5))
    refused = reconstruct_block(model, blocks[0], nn.ReLU(), noise, BlockRows(inputs[800:], targets[800:]))
    assert not refused.is_kept
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    unseen = BlockRows(inputs[800:], targets[800:])
    done = reconstruct_block(model, blocks[0], nn.ReLU(), BlockRows(inputs[:800], targets[:800]), unseen)
    assert done.after < 0.5 * done.before
    with torch.no_grad():
        actual = F.linear(F.linear(inputs[800:], model[0].weight, model[0].bias).relu(), model[2].weight, model[2].bias)
    assert done.after == pytest.approx((actual - targets[800:]).double().square().sum().item(), rel=1e-4)
    sums = block_moments(model, blocks[0], nn.ReLU(), [unseen])[0]
    assert sums.count == 100
    assert float(sums.residual_square) == pytest.approx(done.after, rel=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
def test_adam_on_a_centred_map_is_adam_on_the_other_parameters(transposed):
    """A plain loop of torch's Adam over W and b' = b + W·x̄, the loss written in those."""
    torch.manual_seed(10)
    rows, targets = torch.randn(50, 4, dtype=torch.float64) + 8, torch.randn(50, 3, dtype=torch.float64)
    mean = rows.mean(0)
    weight, bias = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    free = [weight.clone().requires_grad_(True), (bias + weight @ mean).requires_grad_(True)]
    plain = torch.optim.Adam([{"params": [value], "lr": 0.05} for value in free], betas=(0.9, 0.95))
    stored = [(weight.T if transposed else weight).clone().requires_grad_(True), bias.clone().requires_grad_(True)]
    centred = CentredAdam([{"params": [value], "lr": 0.1} for value in stored], [CentredMap(*stored, mean, transposed)])
    for _ in range(20):
        plain.zero_grad()
        (F.linear(rows - mean, *free) - targets).square().mean().backward()
        plain.step()
        centred.zero_grad()
        (F.linear(rows, stored[0].T if transposed else stored[0], stored[1]) - targets).square().mean().backward()
        centred.step(0.5)
    torch.testing.assert_close(stored[0].T if transposed else stored[0], free[0], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(stored[1], free[1] - free[0] @ mean, rtol=1e-7, atol=1e-9)


def test_each_rung_is_kept_only_where_it_is_nearer():
    distances = {"refit": 0.5, "place": 0.7, "blocks": 0.3, "distill": 0.2}
    given = []

    def attempt(effort, best):
        given.append((effort, best))
        return distances[effort]

    climbed = partial(climb, distance=lambda found: found, nearer=operator.lt)
    reached = climbed(list(distances), attempt)
    assert reached.best == 0.2
    assert given == [("refit", None), ("place", 0.5), ("blocks", 0.5), ("distill", 0.3)]
    assert [step.is_kept for step in reached.steps] == [True, False, True, True]
    assert [step.effort for step in climbed(list(distances), attempt, tolerance=0.4).steps] == [
        "refit", "place", "blocks",
    ]  # fmt: skip
    assert len(climbed(list(distances), attempt, max_seconds=1e-9).steps) == 1
    # What is nearer by its mean alone is not kept, nor is a tolerance reached by it.
    doubted = climb(list(distances), attempt, lambda found: found, nearer=lambda *found: False, tolerance=0.4)
    assert ([step.is_kept for step in doubted.steps], doubted.best) == ([True, False, False, False], 0.5)


FORMULAS = {
    "relu": lambda z: z.clamp(min=0),
    "relu6": lambda z: z.clamp(0, 6),
    "leaky_relu": lambda z: torch.where(z > 0, z, 0.01 * z),
    "hardswish": lambda z: z * (z + 3).clamp(0, 6) / 6,
    "relu2": lambda z: z.clamp(min=0).square(),
}


@pytest.mark.parametrize("target", list(TARGETS))
def test_any_target_is_solved_for_with_its_own_features_and_reloads(target, tmp_path):
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 4)).double()
    with torch.no_grad():
        model[0].weight.mul_(4)  # beyond 6, where ReLU6 ends
    inputs = torch.randn(400, 6, dtype=torch.float64)
    converted, report = convert_to_relu(model, inputs, target=target)
    assert report.target == TARGETS[target].title
    assert f"became {report.target}." in str(report)
    folds = deal_folds(read_batches(inputs))
    rows = torch.cat([batch.load().inputs for fold in folds.folds for batch in fold])
    with torch.no_grad():
        features, wanted = FORMULAS[target](model[0](rows)), model(rows)
        centred = features - features.mean(0)
        gram = centred.T @ centred
        gram += report.layers[0].strength * gram.diagonal().mean() * torch.eye(9, dtype=torch.float64)
        residual = wanted - features @ model[2].weight.T - model[2].bias
        change = torch.linalg.solve(gram, centred.T @ (residual - residual.mean(0))).T
        torch.testing.assert_close(converted[2].weight.detach(), model[2].weight + change, rtol=0, atol=1e-8)
    network = gpt2()
    new, report = convert_to_relu(network, tokens(), target=target, max_kl=None)
    new.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert again.config.activation_function == target
    with torch.no_grad():
        torch.testing.assert_close(again(**tokens(3)).logits, new(**tokens(3)).logits)


def test_what_is_no_target_or_cannot_be_placed():
    model, rows = nn.Sequential(nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 4)), torch.randn(200, 6)
    with pytest.raises(ValueError, match="target must be one of relu, relu6"):
        convert_to_relu(model, rows, target="tanh")
    with pytest.raises(ValueError, match="for ReLU only"):
        convert_to_relu(model, rows, target="hardswish", width_budget=1.5)
    _, report = convert_to_relu(model, rows, target="hardswish", effort="blocks")
    assert [step.effort for step in report.steps] == ["refit", "blocks"]


def test_gates_are_ranked_and_kept():
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 8), nn.GELU(), nn.Linear(8, 4)).double()
    rows = torch.randn(400, 6, dtype=torch.float64)
    costs = gate_costs(model, rows[:50])
    for name, cost in costs.items():
        swapped = copy.deepcopy(model)
        swapped[int(name)] = nn.ReLU()
        with torch.no_grad():
            wanted, given = (network(rows[:50]).log_softmax(-1) for network in (model, swapped))
        assert cost == pytest.approx((wanted.exp() * (wanted - given)).sum(-1).mean().item(), rel=1e-6)
    assert list(costs) == sorted(costs, key=costs.get, reverse=True)
    for effort in ("refit", "blocks"):
        converted, report = convert_to_relu(model, rows, keep=["1"], effort=effort)
        assert [type(module).__name__ for module in converted] == ["Linear", "SiLU", "Linear", "ReLU", "Linear"]
        assert list(report.gates) == ["3"]
        assert torch.equal(converted[0].weight, model[0].weight)
    with pytest.raises(ValueError, match="no gate is named 7"):
        convert_to_relu(model, rows, keep=["7"])
    for count in (["1", "3"], 2, -1):
        with pytest.raises(ValueError, match="of 2 gates 0 to 1 can stay"):
            convert_to_relu(model, rows, keep=count)
    network = gpt2()
    first = "transformer.h.0.mlp.act"
    converted, report = convert_to_relu(network, tokens(), keep=[first], rewrite_config=False, max_kl=None)
    assert type(converted.get_submodule(first)) is type(network.get_submodule(first))
    assert "names the gates from before" in report.warnings[-1]  # a reload would build another network
    for names in (
        {"keep": "13"},
        {"keep": True},
        {"outputs": "logits"},
    ):  # "1" and "3" are gates, but nobody has named these
        with pytest.raises(TypeError, match="sequence of names"):
            convert_to_relu(model, rows, **names)


def test_what_is_no_effort():
    with pytest.raises(ValueError, match="must be one of refit, place, blocks, distill, got 'fast'"):
        check_effort("fast")
    model = nn.Sequential(nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 4))
    for width_budget in (0.5, float("inf"), float("nan"), "1.2", True, None):
        with pytest.raises(ValueError, match="width_budget"):
            convert_to_relu(model, torch.randn(100, 6), width_budget=width_budget)
    with pytest.raises(ValueError, match="held out"):
        convert_to_relu(model, torch.randn(40, 6), effort="place")


def test_a_tolerance_is_reached_or_refused_with_what_was_tried():
    torch.manual_seed(7)
    model, rows = nn.Sequential(nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 4)), torch.randn(400, 6)
    _, report = convert_to_relu(model, rows, tolerance=1e3)
    assert [step.effort for step in report.steps] == ["refit"]
    assert "Tried one after the other" not in str(report)
    with pytest.raises(ConversionRefusedError, match=r"refit .* place .* blocks") as caught:
        convert_to_relu(model, rows, tolerance=1e-12, effort="blocks")
    report, best = caught.value.report, caught.value.model
    with torch.no_grad():
        wanted, given = (network(rows).log_softmax(-1) for network in (model, best))
    assert (wanted.exp() * (wanted - given)).sum(-1).mean().item() < 0.1
    assert [type(module).__name__ for module in best] == ["Linear", "ReLU", "Linear"]
    assert [step.effort for step in report.steps] == ["refit", "place", "blocks"]
    assert f"refit {report.steps[0].distance:.3g}, place {report.steps[1].distance:.3g}" in str(report)


def test_wider_blocks_bring_a_gated_network_nearer_and_plain_transformers_loads_it(tmp_path):
    inputs, saved = tokens(120), []
    for build in (llama, gpt2, bert):
        model = build()
        before = copy.deepcopy(model.state_dict())
        effort = "distill" if build is llama else "place"
        converted, report = convert_to_relu(model, inputs, effort=effort, width_budget=1.25, max_kl=None)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert report.width_share == 1.25
        kept = [step.distance for step in report.steps if step.is_kept]
        assert kept == sorted(kept, reverse=True)
        assert len(kept) > 1
        assert kept[-1] < 0.9 * kept[0]
        assert report.held_out.refitted.kl == pytest.approx(kept[-1])
        is_distilled = report.steps[-1].effort == "distill" and report.steps[-1].is_kept
        assert any("judged on 16 inputs held out" in warning for warning in report.warnings) == is_distilled
        folder = tmp_path / build.__name__
        converted.save_pretrained(folder)
        with torch.no_grad():
            torch.save(converted(input_ids=inputs["input_ids"][:3]).logits, folder / "logits.pt")
        saved.append(str(folder))
    program = (
        "import sys, torch, transformers\n"
        "for folder in sys.argv[1:]:\n"
        "    kind = getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])\n"
        "    model = kind.from_pretrained(folder).eval()\n"
        "    ids = torch.load(folder + '/../ids.pt')\n"
        "    with torch.no_grad():\n"
        "        torch.testing.assert_close(model(input_ids=ids).logits, torch.load(folder + '/logits.pt'))\n"
        "assert 'hf_lgelu' not in sys.modules\n"
    )
    torch.save(inputs["input_ids"][:3], tmp_path / "ids.pt")
    (tmp_path / "elsewhere.py").write_text(program)
    result = run_fresh(tmp_path / "elsewhere.py", *saved)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("value", ["x", True, 0, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["tolerance", "max_seconds", "max_kl"])
def test_a_bound_that_is_none_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a number above 0, or None, got"):
        convert_to_relu(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)), torch.zeros(20, 2), **{name: value})


def test_a_metric_of_the_caller_says_how_much_may_be_lost():
    torch.manual_seed(7)
    model, rows = nn.Sequential(nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 4)), torch.randn(400, 6)
    seen = []

    def score(network):  # lower error is higher
        assert not any(module.training for module in network.modules())
        with torch.no_grad():
            seen.append(10 - (network(rows) - model(rows)).square().mean().item() * 100)
        return seen[-1]

    model.train()
    converted, report = convert_to_relu(model, rows, metric=score, tolerance=0.9, effort="place")
    assert all(module.training for module in model.modules())
    assert not any(module.training for module in converted.modules())
    assert seen[0] == 10.0
    assert [step.lost for step in report.steps] == [pytest.approx((10 - value) / 10) for value in seen[1:]]
    assert report.steps[-1].gap <= 0.9
    assert all(step.gap > 0.9 for step in report.steps[:-1])
    assert "% of the score lost" in str(report) or len(report.steps) == 1
    with pytest.raises(ConversionRefusedError, match="lose at most 1e-09 of the original's score") as caught:
        convert_to_relu(model, rows, metric=score, tolerance=1e-9, effort="place")
    assert isinstance(caught.value.model, nn.Module)
    metrics = {0.5: TypeError, (lambda network: "good"): TypeError, (lambda network: float("nan")): ValueError}
    for metric, error in metrics.items():
        with pytest.raises(error, match="metric"):
            convert_to_relu(model, rows, metric=metric, tolerance=0.1)
    for broken in (float("nan"), float("inf")):  # of a network that gives NaN, say
        assert Metric(lambda network, broken=broken: 1.0 if network is model else broken, model).lost(rows) == math.inf
    # A score that is nearer is kept though the KL is not, and of equal scores the KL decides.
    shares = {"refit": (0.2, 0.5), "place": (0.1, 0.7), "blocks": (0.1, 0.6), "distill": (0.1, 0.65)}
    found = climb(
        list(shares), lambda effort, best: shares[effort], lambda f: f[1], lost=lambda f: f[0],
        nearer=lambda f, best: f[1] < best[1],
    )  # fmt: skip
    assert [step.is_kept for step in found.steps] == [True, True, True, False]


def test_a_rung_ends_when_the_time_is_up():
    def attempt(effort, best):
        if effort == "place":
            raise OutOfTimeError
        return 0.5

    found = climb(["refit", "place", "blocks"], attempt, lambda found: found, nearer=operator.lt, max_seconds=100)
    assert [(step.effort, step.distance, step.is_kept) for step in found.steps] == [
        ("refit", 0.5, True), ("place", None, False),
    ]  # fmt: skip
    clock = iter([0.0, 0.0, 5.0, 5.0, 5.0, 5.0, 6.0])  # the refit took 5 of 8 seconds: what is as long does not fit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_lgelu.refit.ladder.time.perf_counter", lambda: next(clock))
        reached = climb(list(EFFORTS), lambda effort, best: 0.5, lambda found: found, nearer=operator.lt, max_seconds=8)
    assert [step.effort for step in reached.steps] == ["refit", "distill"]


class TwoOutputs(nn.Module):
    """Numbers that are no class scores, of sizes far apart, and one that never varies."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(5)
        self.hidden, self.last = nn.Linear(4, 12), nn.Linear(12, 5)
        self.scale = scale

    def forward(self, x):
        found = self.last(F.gelu(self.hidden(x))) * self.scale
        return {
            "boxes": torch.cat([1000 * found[:, :1], found[:, 1:3], 0 * found[:, :1] + 2], 1),
            "scores": found[:, 3:],
        }


def test_every_column_of_outputs_that_are_no_class_scores_counts_alike():
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(6))
    original, other = TwoOutputs(1.0), TwoOutputs(1.1)
    loss = output_loss(original, other, Batch(x, None), None)
    # Of a column y the error is Σ(0.1·y)² over Σ(y - ȳ)²; the one that does not vary has none.
    total = 0.0
    for columns in (original(x)["boxes"][:, :3], original(x)["scores"]):
        shares = [float((0.1 * y).square().sum() / (y - y.mean()).square().sum()) for y in columns.detach().double().T]
        total += sum(shares) / len(shares)
    assert loss.item() == pytest.approx(total, rel=1e-4)


def test_steps_that_the_time_ends_are_looked_at(monkeypatch):
    """Time for ten steps of a descent of 200 whose first look is after 25."""
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(4, 24), nn.GELU(), nn.Linear(24, 3))
    model[0].weight.data *= 3
    converted = copy.deepcopy(model)
    converted[1] = nn.ReLU()
    folds = deal_folds(read_batches(torch.randn(300, 4)), batch_size=16)
    ticks = itertools.count()
    monkeypatch.setattr("hf_lgelu.refit.distill.time.perf_counter", lambda: next(ticks))
    names = [name for name, _ in converted.named_parameters()]
    before, after = distill(model, converted, folds, names=names, max_seconds=16 + 16 + 10.5)
    held_out = torch.cat([batch.load().inputs for batch in folds.held_out])
    with torch.no_grad():
        p, q = (network(held_out).double().softmax(-1) for network in (model, converted))
    assert after < 0.95 * before
    assert after == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)


def test_a_step_takes_as_many_units_as_their_scores_have_room(monkeypatch):
    """Room for twenty scores of three a unit: six units, so that batches go in pieces; every turn has all of them."""
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(4, 24), nn.GELU(), nn.Linear(24, 3))
    converted = copy.deepcopy(model)
    converted[1] = nn.ReLU()
    folds = deal_folds(read_batches(torch.randn(300, 4)), batch_size=16)
    held_out = torch.cat([batch.load().inputs for batch in folds.held_out])
    with torch.no_grad():
        p, q = (network(held_out).double().softmax(-1) for network in (model, converted))
    steps, looked = [], []

    def counted(original, network, batch, **options):
        (steps if torch.is_grad_enabled() else looked).append(batch.inputs)
        return output_loss(original, network, batch, **options)

    monkeypatch.setattr("hf_lgelu.refit.distill.output_loss", counted)
    monkeypatch.setattr("hf_lgelu.refit.distill._SCORES_A_STEP", 20)
    turn = sum(-(-len(batch) // 6) for batch in folds.together)
    before, _ = distill(model, converted, folds, names=["0.weight"], steps=turn)
    assert max(map(len, steps + looked)) <= 6 < max(map(len, folds.together))
    assert before == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
    given = torch.cat([batch.load().inputs for batch in folds.together])
    assert torch.equal(torch.cat(steps[-turn:]).unique(dim=0), given.unique(dim=0))


def test_steps_in_bfloat16_end_nearer_by_the_models_own_precision(monkeypatch):
    """What the steps lead to is looked at in float32: the loss that is told is the float64 one of the result."""
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(4, 24), nn.GELU(), nn.Linear(24, 3))
    model[0].weight.data *= 3
    converted = copy.deepcopy(model)
    converted[1] = nn.ReLU()
    folds = deal_folds(read_batches(torch.randn(300, 4)), batch_size=16)
    seen = set()
    converted[2].register_forward_hook(lambda *given: seen.add((torch.is_grad_enabled(), given[2].dtype)))
    names = [name for name, _ in converted.named_parameters()]
    before, after = distill(model, converted, folds, names=names, steps=60, bf16=True)
    assert {(True, torch.bfloat16), (False, torch.float32)} == seen
    assert {parameter.dtype for parameter in converted.parameters()} == {torch.float32}
    held_out = torch.cat([batch.load().inputs for batch in folds.held_out])
    with torch.no_grad():
        p, q = (network(held_out).double().softmax(-1) for network in (model, converted))
    assert after < 0.9 * before
    assert after == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)


def test_bfloat16_is_for_distillation():
    with pytest.raises(ValueError, match=r"bf16=True is for the steps of effort='distill', and .* is 'place'"):
        convert_to_relu(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)), torch.randn(100, 4),
                        effort="place", bf16=True)  # fmt: skip
