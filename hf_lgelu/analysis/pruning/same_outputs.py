"""Whether a network with fewer units gives what it should: what the whole one does with these units at 0."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_lgelu.analysis.pruning.prunable import HiddenLayer, outputs_without
from hf_lgelu.analysis.pruning.zeros import checked_batches
from hf_lgelu.models.comparison import allowed_rounding, difference, discrete_outputs, floating_outputs
from hf_lgelu.models.example_run import NOT_TAKEN, Inputs, run_example
from hf_lgelu.models.own_forward import independent_copy

Units = Mapping[str, Sequence[int]]
"""{layer: indices of the units removed}."""

_HUGE = 1e4  # times the middle one: an output that says "masked"

OTHERWISE = (
    "What stands between an activation and the next layer may put its units into another order, have their number "
    "written into the forward or a buffer, or not keep 0 at 0 (a normalization, a bias): such a layer cannot be cut"
)
"""How errors go on that say what a pruning changed."""


def require_units_at_zero(
    model: nn.Module, pruned: nn.Module, removed: Units, layers: Sequence[HiddenLayer], batch: Inputs
) -> None:
    """Raise RuntimeError unless the pruned model gives what the given one does with these units at 0."""
    (model, other), widen = _precise([model, pruned], batch)
    expected = outputs_without(model, layers, removed, widen(batch))
    for change, rounding in _changes(expected, _output_of_pruned(other, removed, widen(batch))):
        allowed = 10 * rounding  # sums over fewer units are rounded otherwise in every layer
        if not change <= allowed:
            raise RuntimeError(
                f"without units of {', '.join(removed)} the model gives other outputs than with these units at "
                f"0, {_by_how_much(change, allowed)}. {OTHERWISE}"
            )


def change_by_dead_units(model: nn.Module, pruned: nn.Module, removed: Units, data: Inputs | Iterable[Inputs]) -> float:
    """The largest change of an output on all of `data`; RuntimeError where it is more than rounding."""
    (model, other), widen = _precise([model, pruned], next(checked_batches(data)))
    largest_change = 0.0
    for batch in checked_batches(data):
        batch = widen(batch)
        for change, allowed in _changes(run_example(model, batch), _output_of_pruned(other, removed, batch)):
            if not change <= allowed:
                raise RuntimeError(
                    f"removing units that never fired changed an output, {_by_how_much(change, allowed)}. {OTHERWISE}"
                )
            largest_change = max(largest_change, change)
    return largest_change


def _precise(models: Sequence[nn.Module], batch: Inputs) -> tuple[Sequence[nn.Module], Callable[[Inputs], Inputs]]:
    """(the models, what makes inputs for them): of half types copies in float32, where these run; half types hide what
    has changed."""
    if not any(_is_half(tensor) for model in models for tensor in model.parameters()):
        return models, lambda inputs: inputs
    copies = [independent_copy(model).float() for model in models]
    try:
        for copy in copies:
            run_example(copy, _widened(batch))
    except NOT_TAKEN:  # their forward says the dtype
        return models, lambda inputs: inputs
    return copies, _widened


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize == 2


def _widened(inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return {name: _widened(value) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return [_widened(value) for value in inputs]
    return inputs.float() if _is_half(inputs) else inputs


def _by_how_much(change: float, allowed: float) -> str:
    if math.isinf(change):
        return "a shape of it, or the codes, masks or indices in it"
    return f"by up to {change:.3g}, where rounding explains {allowed:.3g}"


def _output_of_pruned(model: nn.Module, removed: Units, batch: Inputs) -> Any:
    try:
        return run_example(model, batch)
    except (RuntimeError, IndexError, ValueError) as error:
        units = ", ".join(removed)
        raise RuntimeError(f"without units of {units} the model no longer runs: {error}. {OTHERWISE}") from error


def _changes(before: Any, after: Any) -> Iterator[tuple[float, float]]:
    """(the largest change of a number, what rounding may change there) of each output and order of size.

    Every output counts, since the first one alone is the loss where a batch has labels; and a score that is masked by
    a huge number would hide each change beside it. The change is infinite where shapes differ, or codes.
    """
    codes = zip(discrete_outputs(before), discrete_outputs(after), strict=True)
    if not all(torch.equal(first, second) for first, second in codes):
        yield math.inf, 0.0
    for first, second in zip(floating_outputs(before), floating_outputs(after), strict=True):
        if first.shape != second.shape:
            yield math.inf, allowed_rounding(first)
            continue
        ordinary = _ordinary(first)
        for some in (ordinary, ~ordinary):
            one, other = first[some], second[some]
            if one.numel():
                # What is added up inside is about 1, also where the outputs are small.
                allowed = max(allowed_rounding(one), allowed_rounding(torch.ones_like(one)))
                yield difference(one.double(), other.double()).abs().max().item(), allowed


def _ordinary(output: Tensor) -> Tensor:
    """Which numbers are no more than ten thousand times as large as the middle one of those that are not 0."""
    sizes = output.abs().double()
    some = sizes[(sizes > 0) & sizes.isfinite()]
    return sizes <= _HUGE * some.median() if some.numel() else torch.ones_like(sizes, dtype=torch.bool)
