"""A bias for maps that have none, out of their own inputs.

Kinks and units that are always on need a constant before the gate. Many families have no bias there, and no key of
their config that would give them one (Mistral, Qwen, Gemma). But the inputs of such a map come from a normalization,
and in a trained network they have a direction v with v·x ≈ 1 for every input x: W + b·vᵀ is W with the bias b. In
SmolLM2's 30 layers v·x of held-out tokens is 1 within 0.02 to 0.08 (root mean square). What it misses the maps behind
the gates make good, which are refitted to what is there.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_lgelu.refit.always_on import gather_inputs
from hf_lgelu.refit.folds import Folds
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.placement import GateUnit

LARGEST_ERROR = 0.05
"""Mean square of v·x - 1 on inputs that v was not fitted on, up to which it stands for a bias."""

_STRENGTH = 1e-3  # of the mean eigenvalue of the inputs' second moments
_ROWS_PER_INPUT = 8


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
