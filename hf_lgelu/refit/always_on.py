"""What a ReLU unit cannot do: be linear, and have a constant where its map has no bias.

With one ReLU per channel, φ(z) ≈ a·ReLU(z - c) + b + d·z. What b and d make is linear in the block's input x: in a
gated unit W_down·diag(b)·W_up·x, in a plain one W_down·diag(d)·W_gate·x. Units that are always on carry it, of the kind
that the block has anyway: in a gated unit gate weight 0 and gate bias 1, in a plain one a bias so large that the ReLU
never cuts. They have a part of the budget (preparation.py), so up and down are the factors of the best approximation
of that rank in the metric of the block's inputs.

Kinks and such units need a constant before the gate. Many families have no bias there, and no key of their config that
would give them one (Mistral, Qwen, Gemma). But the inputs of such a map come from a normalization, and in a trained
network they have a direction v with v·x ≈ 1 for every input x: W + b·vᵀ is W with the bias b. In SmolLM2's 30 layers
v·x of held-out tokens is 1 within 0.02 to 0.08 (root mean square). What it misses the maps behind the gates make good,
which are refitted to what is there.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_lgelu.models.batches import Batch
from hf_lgelu.models.dataflow.affine_operations import AffineOperation
from hf_lgelu.models.example_run import forward_pre_hooks, run_example
from hf_lgelu.refit.folds import FoldBatch, Folds
from hf_lgelu.refit.gate_units import GateUnit
from hf_lgelu.refit.kinks import Placement
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.weights import add_constant, oriented
from hf_lgelu.refit.widen import Block

ALWAYS_ON = 8.0
"""Standard deviations of its input by which a plain unit's bias keeps it on."""

LARGEST_ERROR = 0.05
"""Mean square of v·x - 1 on inputs that v was not fitted on, up to which it stands for a bias."""

_LEAST_VARIANCE = 1e-6  # of the mean one, added to the metric: directions that the inputs do not show
_STRENGTH = 1e-3  # of the ridge for v, of the mean eigenvalue of the inputs' second moments
_ROWS_PER_INPUT = 8


@torch.no_grad()
def gather_inputs(model: nn.Module, units: Sequence[GateUnit], batches: Iterable[FoldBatch]) -> dict[int, Moments]:
    """Sums over the inputs of every unit's maps in the original, over the batches of all processes, by site."""
    sums: dict[int, Moments] = {}
    for unit in units:
        weight = model.get_parameter(unit.before.weight_name)
        sums[unit.site] = Moments.zeros(1, weight.shape[unit.before.input_axis or 0], 1, weight.device)
    batch: Batch

    def see(unit: GateUnit, module: nn.Module, inputs: tuple) -> None:
        rows = batch.without_padding(inputs[0].detach(), unit.before.weight_name, -1)[:, None]
        nothing = rows.new_zeros(len(rows), 1, 1)
        sums[unit.site].add(rows, nothing, nothing)

    with ExitStack() as hooks:
        for unit in units:
            owner = model.get_submodule(unit.before.weight_name.rpartition(".")[0])
            hooks.enter_context(forward_pre_hooks([owner], partial(see, unit)))
        for batch in (part.load() for part in batches) if units else ():
            run_example(model, batch.inputs)
    return {site: total.reduce_over_processes() for site, total in sums.items()}


@torch.no_grad()
def low_rank(matrix: Tensor, second_moments: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U (o, r) and V (r, i) with the least Σ‖(matrix - UV)x‖² over inputs x whose mean xxᵀ is `second_moments`.

    Each row of V has unit mean square over the inputs. float64.
    """
    matrix, second_moments = matrix.double(), second_moments.double()
    root = _root(second_moments)
    left, values, right = torch.linalg.svd(matrix @ root, full_matrices=False)
    rank = min(rank, len(values))
    return left[:, :rank] * values[:rank], torch.linalg.solve_triangular(root, right[:rank], upper=False, left=False)


def _root(second_moments: Tensor) -> Tensor:
    identity = torch.eye(len(second_moments), dtype=torch.float64, device=second_moments.device)
    least = _LEAST_VARIANCE * second_moments.diagonal().mean().clamp(min=1e-12)
    return torch.linalg.cholesky(second_moments.double() + least * identity)


class LinearPart(NamedTuple):
    """What is linear in a block: a matrix (outputs, inputs), and mean and mean xxᵀ of the inputs x that count for it.

    Of a plain block these are around the mean: the constant is the intercept's.
    """

    matrix: Tensor
    mean: Tensor
    second_moments: Tensor

    def best_gains(self) -> Tensor:
        """What each further unit takes away of the mean square of the outputs, in falling order."""
        return torch.linalg.svdvals(self.matrix @ _root(self.second_moments)).square()


@torch.no_grad()
def linear_part(model: nn.Module, block: Block, placement: Placement, inputs: Moments, width: int) -> LinearPart:
    """Of the first `width` units of a block, before the slopes and kinks are written."""
    gated = block.unit.other is not None
    factor = placement.constant if gated else placement.line
    down = oriented(model, block.down.operation)[:, :width].double()
    matrix = (down * factor[:width].to(down.device)) @ oriented(model, _carrier(block))[:width].double()
    mean, second = inputs.feature_sum[0] / inputs.count, inputs.gram[0] / inputs.count
    return LinearPart(matrix, mean, second if gated else second - torch.outer(mean, mean))


@torch.no_grad()
def write_always_on(
    converted: nn.Module, block: Block, placement: Placement, inputs: Moments, width: int, count: int, size: float,
    direction: Tensor | None = None,
) -> None:  # fmt: skip
    """Give `count` units from `width` on what is linear in the block, before the slopes and kinks are written.

    `size` is the root mean square of what varies in such a unit. It says nothing about what is computed; about as much
    as the other units have, it keeps their share of the range that int8 gives all of them together.
    """
    unit, down, carrier = block.unit, block.down.operation, _carrier(block)
    linear = linear_part(converted, block, placement, inputs, width)
    down_columns, up_rows = low_rank(linear.matrix, linear.second_moments, count)
    down_columns, up_rows = down_columns / size, up_rows * size
    new = slice(width, width + len(up_rows))
    oriented(converted, carrier)[new] = up_rows.to(oriented(converted, carrier).dtype)
    oriented(converted, down)[:, new] = down_columns.to(oriented(converted, down).dtype)
    if unit.other is not None:
        add_constant(converted, unit.before, new, up_rows.new_ones(len(up_rows)), direction)
        return
    bias = converted.get_parameter(unit.before.bias)
    offsets = ALWAYS_ON * size - up_rows @ linear.mean
    bias[new] = offsets.to(bias.dtype)
    if down.bias is not None:
        converted.get_parameter(down.bias).sub_((down_columns @ offsets).to(bias.dtype))


def _carrier(block: Block) -> AffineOperation:
    """The map that a unit which is always on takes its linear function from."""
    return block.unit.before if block.unit.other is None else block.unit.other


@torch.no_grad()
def find_directions(model: nn.Module, units: Sequence[GateUnit], folds: Folds) -> dict[int, Tensor]:
    """v (inputs,), float64, of the units whose map before the gate has no bias and whose inputs have one, by site."""
    lacking = [unit for unit in units if unit.before.bias is None and unit.before.channel_axis == -1]
    if not lacking:
        return {}
    widest = max(model.get_parameter(unit.before.weight_name).shape[unit.before.input_axis or 0] for unit in lacking)
    share = min(1.0, _ROWS_PER_INPUT * widest / folds.rows)
    # Evenly spaced ones: the batches of a fold go by length.
    counts = [math.ceil(share * len(fold)) for fold in folds.folds]
    some = [fold[place * len(fold) // count] for fold, count in zip(folds.folds, counts, strict=True)
            for place in range(count)]  # fmt: skip
    fitted = gather_inputs(model, lacking, some)
    judged = gather_inputs(model, lacking, folds.held_out)
    found = {unit.site: constant_direction(fitted[unit.site], judged[unit.site]) for unit in lacking}
    return {site: direction for site, direction in found.items() if direction is not None}


def constant_direction(fitted: Moments, judged: Moments) -> Tensor | None:
    """v (d,) with the least Σ(v·x - 1)² over the rows of `fitted`; None where it is not 1 on those of `judged`.

    Of both the sums over the features x of one group count, and nothing else.
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
