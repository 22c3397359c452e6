"""Adam on the whole converted network: its parameters, its loss, its steps."""

import copy
import math

import pytest
import torch
from refit_nets import Encoder
from small_networks import convert_with
from torch import nn
from torch.nn import functional as F

from hf_lgelu.networks.batches import Batch, read_batches
from hf_lgelu.networks.outputs import OutputReader
from hf_lgelu.refit.distill import CentredAdam, CentredMap, _Descent, _Seen, centred_maps, distill, moved_names
from hf_lgelu.refit.folds import deal_folds
from hf_lgelu.refit.output_loss import output_loss
from hf_lgelu.refit.samples import read_samples


@pytest.mark.parametrize("transposed", [False, True])
def test_adam_on_a_centred_map_is_adam_on_the_other_parameters(transposed):
    """A plain loop of torch's Adam over W and b' = b + W·x̄, the loss written in terms of both."""
    torch.manual_seed(10)
    rows, targets = torch.randn(50, 4, dtype=torch.float64) + 8, torch.randn(50, 3, dtype=torch.float64)
    mean = rows.mean(0)
    weight, bias = torch.randn(3, 4, dtype=torch.float64), 1e-5 * torch.randn(3, dtype=torch.float64)
    free = [weight.clone().requires_grad_(True), (bias + weight @ mean).requires_grad_(True)]
    # Of b' it is the rate of b.
    rates = [0.1 * max(value.abs().mean().item(), 0.001) for value in (weight, bias)]
    plain = torch.optim.Adam([{"params": [value]} for value in free], betas=(0.9, 0.95))
    stored = [(weight.T if transposed else weight).clone().requires_grad_(True), bias.clone().requires_grad_(True)]
    centred = CentredAdam(stored, 0.1, [CentredMap(*stored, mean, transposed)])
    for number in range(20):
        for group, rate in zip(plain.param_groups, rates, strict=True):
            group["lr"] = rate * min(number + 1, 10) / 10 * math.cos(math.pi * number / 40) ** 2
        plain.zero_grad()
        (F.linear(rows - mean, *free) - targets).square().mean().backward()
        plain.step()
        (F.linear(rows, stored[0].T if transposed else stored[0], stored[1]) - targets).square().mean().backward()
        centred.step(number, number / 20)
    torch.testing.assert_close(stored[0].T if transposed else stored[0], free[0], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(stored[1], free[1] - free[0] @ mean, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("shape", "left"), [((3, 128), 0.95), ((128, 3), 0.95), ((3, 128, 5, 5), 0.5)])
def test_the_step_of_a_map_falls_with_the_root_of_its_inputs(shape, left):
    """The first step of Adam is the rate: of 128 inputs, or channels, half of that of 32, and of the bias whole.

    Of a convolution's weight it is ten times that.
    """
    weight, bias = torch.ones(shape, requires_grad=True), torch.ones(3, requires_grad=True)
    maps = [CentredMap(weight, bias, torch.zeros(128), shape[0] == 128)] if len(shape) == 2 else []
    adam = CentredAdam([weight, bias], 0.1, maps)
    weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
    adam.step(9, 0.0)
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, left))
    torch.testing.assert_close(bias.detach(), torch.full_like(bias, 0.9))


def test_all_parameters_move_but_those_of_embeddings():
    """Also norms and biases far from the gates; a map that shares the embeddings' weight stays."""
    torch.manual_seed(7)
    original = Encoder()
    converted = copy.deepcopy(original)
    converted.up.weight.data *= 1.1
    moved = moved_names(converted)
    assert moved == ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"]
    before = copy.deepcopy(converted.state_dict())
    ids = {"input_ids": torch.randint(20, (40, 9)), "attention_mask": torch.ones(40, 9, dtype=torch.long)}
    folds = deal_folds(read_samples(read_batches(ids)), batch_size=8)
    first, last = distill(OutputReader(original), converted, folds, names=moved, steps=8)
    assert last < first
    changed = [name for name, value in converted.named_parameters() if not torch.equal(value, before[name])]
    assert changed == moved


def loud_and_swapped(seed):
    """(a small GELU network with large weights, the same with ReLU, folds of 300 inputs in batches of at most 16)."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 24), nn.GELU(), nn.Linear(24, 3))
    model[0].weight.data *= 3
    converted = copy.deepcopy(model)
    converted[1] = nn.ReLU()
    return model, converted, deal_folds(read_samples(read_batches(torch.randn(300, 4))), batch_size=16)


@torch.no_grad()
def held_out_kl(model, converted, folds):
    """The mean over the inputs held out, in float64."""
    held_out = torch.cat([batch.load().inputs for batch in folds.held_out])
    p, q = (network(held_out).double().softmax(-1) for network in (model, converted))
    return float((p * (p / q).log()).sum(-1).mean())


@pytest.mark.parametrize(
    ("steps", "losses", "expected"),
    [(None, [1, 0.8], 48), (None, [1, 1, 0.8], 48), (None, [1, 0.95, 0.95, 0.8], 16), (16, [1, 0.8], 16)],
)
def test_a_descent_that_goes_well_takes_three_times_the_steps_once(monkeypatch, steps, losses, expected):
    model, converted, folds = loud_and_swapped(8)
    taken, step, looks = [], CentredAdam.step, iter(losses)

    def counted(*given, **options):
        taken.append(1 // (len(taken) < 100))  # an error where it does not end
        step(*given, **options)

    monkeypatch.setattr(CentredAdam, "step", counted)
    monkeypatch.setattr(_Descent, "_seen", lambda self: _Seen(next(looks, 0.8), [*self._parameters]))
    monkeypatch.setattr("hf_lgelu.refit.distill._STEPS", 16)
    distill(OutputReader(model), converted, folds, names=["2.weight"], steps=steps)
    assert len(taken) == expected


def test_a_step_takes_as_many_units_as_their_scores_have_room(monkeypatch):
    """Room for twenty scores of three a unit: six units, so that batches go in pieces; every turn has all of them."""
    model, converted, folds = loud_and_swapped(9)
    expected = held_out_kl(model, converted, folds)
    steps, looked = [], []

    def counted(reference, network, batch, *more, **options):
        (steps if torch.is_grad_enabled() else looked).append(batch.inputs)
        return output_loss(reference, network, batch, *more, **options)

    monkeypatch.setattr("hf_lgelu.refit.distill.output_loss", counted)
    monkeypatch.setattr("hf_lgelu.comparing.comparison._VALUES_AT_ONCE", 20)
    turn = sum(-(-len(batch) // 6) for batch in folds.fitted)
    before, _ = distill(OutputReader(model), converted, folds, names=["0.weight"], steps=turn)
    assert max(map(len, steps + looked)) <= 6 < max(map(len, folds.fitted))
    assert before == pytest.approx(expected, rel=1e-4)
    given = torch.cat([batch.load().inputs for batch in folds.fitted])
    assert torch.equal(torch.cat(steps[-turn:]).unique(dim=0), given.unique(dim=0))


def test_steps_in_bfloat16_end_nearer_by_the_models_own_precision(monkeypatch):
    """What the steps lead to is looked at in float32: the loss that is told is the float64 one of the result."""
    model, converted, folds = loud_and_swapped(8)
    seen = set()
    converted[2].register_forward_hook(lambda *given: seen.add((torch.is_grad_enabled(), given[2].dtype)))
    names = [name for name, _ in converted.named_parameters()]
    before, after = distill(OutputReader(model), converted, folds, names=names, steps=60, bf16=True)
    assert {(True, torch.bfloat16), (False, torch.float32)} == seen
    assert {parameter.dtype for parameter in converted.parameters()} == {torch.float32}
    assert after < 0.9 * before
    assert after == pytest.approx(held_out_kl(model, converted, folds), rel=1e-3)


def test_steps_in_float16_are_not_named_as_what_comes_next():
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 4)).eval()
    data = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    _, report = convert_with(model, data, effort="place", strict=False)
    assert report.next_step == "distill"
    _, report = convert_with(model.half(), data.half(), effort="place", strict=False)
    assert report.next_step is None


def test_steps_on_bfloat16_weights_are_not_rounded_away(monkeypatch):
    """At a rate below what bfloat16 tells, as large networks take it: as near as float32 comes, but for rounding."""
    monkeypatch.setattr("hf_lgelu.refit.distill._RATES", (0.0003,))
    model, converted, folds = loud_and_swapped(8)
    for network in (model, converted):  # numbers that bfloat16 has
        network.bfloat16().float()
    names = [name for name, _ in converted.named_parameters()]
    narrow = copy.deepcopy(converted).bfloat16()
    rows = torch.cat([batch.load().inputs for batch in folds.fitted]).bfloat16()
    same = deal_folds(read_samples(read_batches(rows)), batch_size=16)
    before, after = distill(OutputReader(model), converted, folds, names=names, steps=200)
    narrow_before, narrow_after = distill(
        OutputReader(copy.deepcopy(model).bfloat16()), narrow, same, names=names, steps=200
    )
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}
    assert all(parameter.grad is None for parameter in narrow.parameters())
    assert narrow_after / narrow_before < 1.3 * after / before < 0.8


def test_the_inputs_of_a_map_that_reads_one_row_are_its_mean():
    row = torch.arange(4.0)
    (found,) = centred_maps(nn.Sequential(nn.Linear(4, 2)), ["0.weight", "0.bias"], Batch(row, is_sample=True))
    torch.testing.assert_close(found.mean, row, check_dtype=False)
