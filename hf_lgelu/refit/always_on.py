"""Units that are always on, for the linear part of a block; and constants before gates whose map has no bias.

With a single ReLU per channel, φ(z) ≈ a·ReLU(z - c) + b + d·z. The terms b and d are linear in the block's input x: in
a gated unit W_down·diag(b)·W_up·x, in a plain unit W_down·diag(d)·W_gate·x. Units that are always on compute this
linear part. In a gated block, a unit that is always on has gate weight 0 and gate bias 1. In a plain block its bias is
so large that its ReLU never cuts. The up and down weights of these units are the best low-rank factors in the metric of
the block's inputs.

Kinks and units that are always on need a constant before the gate. Many families have no bias there, and no key of
their config adds one (Mistral, Qwen, Gemma). But the inputs x of the map come from a normalization. In a trained
network they have a direction v with v·x ≈ 1 for every x, and W + b·vᵀ then acts as W with the bias b. In SmolLM2's 30
layers, v·x of held-out tokens is 1 within 0.02 to 0.08 (root mean square). The maps after the gates are refitted
afterwards, and correct the rest.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from hf_lgelu.graph.layers import FedGate
from hf_lgelu.networks.batches import Batch
from hf_lgelu.networks.run import forward_pre_hooks, run_example
from hf_lgelu.refit.folds import FoldBatch, Folds, evenly, load_own
from hf_lgelu.refit.kinks import Kinks
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.weights import add_constant
from hf_lgelu.refit.widen import Block

ALWAYS_ON = 8.0
"""Standard deviations of its input by which a plain unit's bias keeps it on."""

LARGEST_ERROR = 0.05
"""The largest mean square of v·x - 1 on held-out inputs at which v replaces a bias."""

_LEAST_VARIANCE = 1e-6  # of the mean variance, added to the metric for directions in which the inputs do not vary
_STRENGTH = 1e-3  # of the ridge for v, of the mean eigenvalue of the inputs' second moments
_ROWS_PER_INPUT = 8


@torch.no_grad()
def gather_inputs(model: nn.Module, fed_gates: Sequence[FedGate], batches: Sequence[FoldBatch]) -> dict[int, Moments]:
    """{site: sums over the inputs of the map before the gate, in the original, over the batches}."""
    weights = {fed.site: fed.before.weight_in(model) for fed in fed_gates}
    sums = {site: Moments.zeros(1, weight.shape[1], 1, weight.device) for site, weight in weights.items()}
    batch: Batch

    def see(fed: FedGate, module: nn.Module, inputs: tuple) -> None:
        rows = batch.without_padding(inputs[0].detach(), fed.before.weight_name, fed.before.channel_axis)[:, None]
        nothing = rows.new_zeros(len(rows), 1, 1)
        sums[fed.site].add(rows, nothing, nothing)

    with ExitStack() as hooks:
        for fed in fed_gates:
            hooks.enter_context(forward_pre_hooks([fed.before.module_in(model)], partial(see, fed)))
        for batch in load_own(batches) if fed_gates else ():
            run_example(model, batch.inputs)
    return {site: total.reduce_over_processes() for site, total in sums.items()}


@torch.no_grad()
def low_rank(matrix: Tensor, second_moments: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U (o, r) and V (r, i) with the least Σ‖(matrix - UV)x‖² over inputs x whose mean xxᵀ is `second_moments`.

    Each row of V has unit mean square over the inputs. float64.
    """
    root = _root(second_moments)
    left, values, right = torch.linalg.svd(matrix @ root, full_matrices=False)
    rank = min(rank, len(values))
    return left[:, :rank] * values[:rank], torch.linalg.solve(root, right[:rank], left=False)


def _root(second_moments: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(second_moments)
    least = _LEAST_VARIANCE * second_moments.diagonal().mean().clamp(min=1e-12)
    # With fewer rows than inputs, rounding leaves values below 0.
    return vectors * (values.clamp(min=0) + least).sqrt()


@torch.no_grad()
def best_gains(model: nn.Module, block: Block, placement: Kinks, inputs: Moments, width: int) -> Tensor:
    """The part of the outputs' mean square that each further unit supplies, in falling order."""
    matrix, _, second_moments = _linear_part(model, block, placement, inputs, width)
    return torch.linalg.svdvals(matrix @ _root(second_moments)).square()


def _linear_part(
    model: nn.Module, block: Block, placement: Kinks, inputs: Moments, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The linear part of the first `width` units of a block, before slopes and kinks are written.

    It is (its matrix (outputs, inputs), the mean of the inputs x, the mean xxᵀ). In a plain block the mean xxᵀ is taken
    around the mean, because the intercept supplies a constant.
    """
    gated = block.fed.other is not None
    factor = placement.constant if gated else placement.line
    down = block.down.operation.weight_in(model)[:, :width].double().flatten(1)
    matrix = (down * factor[:width].to(down.device)) @ block.up.weight_in(model)[:width].double().flatten(1)
    mean, second = inputs.feature_sum[0] / inputs.count, inputs.gram[0] / inputs.count
    return matrix, mean, second if gated else second - torch.outer(mean, mean)


@torch.no_grad()
def write_always_on(
    student: nn.Module,
    block: Block,
    placement: Kinks,
    inputs: Moments,
    width: int,
    count: int,
    size: float,
    direction: Tensor | None = None,
) -> None:
    """Write a block's linear part into `count` units from `width` on, before slopes and kinks are written.

    `size` is the root mean square of the varying part of a unit that is always on. It does not change the block's
    function. A size near that of the other units keeps the range small that int8 spreads over all units.
    """
    fed, down, up = block.fed, block.down.operation, block.up
    matrix, mean, second_moments = _linear_part(student, block, placement, inputs, width)
    down_columns, up_rows = low_rank(matrix, second_moments, count)
    down_columns, up_rows = down_columns / size, up_rows * size
    new = slice(width, width + len(up_rows))
    rows, columns = up.weight_in(student), down.weight_in(student)
    rows[new] = up_rows.view_as(rows[new]).to(rows)
    columns[:, new] = down_columns.reshape(columns[:, new].shape).to(columns)
    up.write_weight(student, rows)
    down.write_weight(student, columns)
    is_gated = fed.other is not None
    offsets = torch.ones_like(up_rows[:, 0]) if is_gated else ALWAYS_ON * size - up_rows @ mean
    add_constant(student, fed.before, new, offsets, direction)
    if not is_gated and down.bias is not None:
        add_constant(student, down, slice(None), -(down_columns @ offsets), None)


@torch.no_grad()
def find_directions(model: nn.Module, fed_gates: Sequence[FedGate], folds: Folds) -> dict[int, Tensor]:
    """{site: direction v (inputs,), float64} of the gates that have a direction and lack a bias before them."""
    lacking = [fed for fed in fed_gates if fed.before.bias is None and fed.before.channel_axis == -1]
    if not lacking:
        return {}
    widest = max(fed.before.weight_in(model).shape[1] for fed in lacking)
    share = min(1.0, _ROWS_PER_INPUT * widest / folds.rows)
    some = [batch for fold in folds.folds for batch in evenly(fold, math.ceil(share * len(fold)), begin=0)]
    fitted = gather_inputs(model, lacking, some)
    judged = gather_inputs(model, lacking, folds.choosing)
    found = {fed.site: constant_direction(fitted[fed.site], judged[fed.site]) for fed in lacking}
    return {site: direction for site, direction in found.items() if direction is not None}


def constant_direction(fitted: Moments, judged: Moments) -> Tensor | None:
    """v (d,) with the least Σ(v·x - 1)² over the rows of `fitted`; None if v·x is not near 1 on the rows of `judged`.

    Only the sums over the features x of the first group are used.
    """
    if not fitted.count or not judged.count:
        return None
    second = fitted.gram[0] / fitted.count
    least = _STRENGTH * second.diagonal().mean().clamp(min=torch.finfo(second.dtype).tiny)
    penalty = least * torch.eye(len(second), dtype=second.dtype, device=second.device)
    direction = torch.linalg.solve(second + penalty, fitted.feature_sum[0] / fitted.count)
    mean, second = judged.feature_sum[0] / judged.count, judged.gram[0] / judged.count
    error = 1 - 2 * direction @ mean + direction @ second @ direction
    return direction if float(error) <= LARGEST_ERROR else None
