"""Whether a network with fewer units gives what it should: what the whole one does with these units at 0."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_lgelu.analysis.pruning.prunable import HiddenLayer, outputs_without
from hf_lgelu.analysis.pruning.zeros import checked_batches
from hf_lgelu.models.comparison import all_numbers, allowed_rounding, difference, discrete_outputs
from hf_lgelu.models.example_run import NOT_TAKEN, Inputs, in_dtype, run_example
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
    compared = _Compared.of(model, pruned, batch)
    batch = compared.inputs(batch)
    expected = outputs_without(compared.whole, layers, removed, batch)
    # Sums over fewer units are rounded otherwise in every layer; half types are coarse as they are.
    for change, allowed in compared.changes(expected, _output_of_pruned(compared.pruned, removed, batch), times=10):
        if not change <= allowed:
            raise RuntimeError(
                f"without units of {', '.join(removed)} the model gives other outputs than with these units at "
                f"0, {_by_how_much(change, allowed)}. {OTHERWISE}"
            )


def change_by_dead_units(model: nn.Module, pruned: nn.Module, removed: Units, data: Inputs | Iterable[Inputs]) -> float:
    """The largest change of an output on all of `data`; RuntimeError where it is more than rounding."""
    compared = _Compared.of(model, pruned, next(checked_batches(data)))
    largest_change = 0.0
    for batch in checked_batches(data):
        batch = compared.inputs(batch)
        found = _output_of_pruned(compared.pruned, removed, batch)
        for change, allowed in compared.changes(run_example(compared.whole, batch), found):
            if not change <= allowed:
                raise RuntimeError(
                    f"removing units that never fired changed an output {_by_how_much(change, allowed)}. {OTHERWISE}"
                )
            largest_change = max(largest_change, change)
    return largest_change


@dataclass(frozen=True)
class _Compared:
    """Two models, or copies in which rounding hides and moves nothing, where these run.

    Of half types in float32, since those hide what has changed; in float64 where a model gives codes, which rounding
    may tip over: `dtype`, None of the models themselves.
    """

    whole: nn.Module
    pruned: nn.Module
    dtype: torch.dtype | None

    @classmethod
    def of(cls, whole: nn.Module, pruned: nn.Module, batch: Inputs) -> "_Compared":
        """The two, or copies; `batch` tells what they give."""
        has_codes = bool(discrete_outputs(run_example(whole, batch)))
        if not has_codes and not any(_is_half(tensor) for tensor in whole.parameters()):
            return cls(whole, pruned, None)
        dtype = torch.float64 if has_codes else torch.float32
        copies = [independent_copy(model).to(dtype) for model in (whole, pruned)]
        try:
            for copy in copies:
                run_example(copy, in_dtype(batch, dtype))
        except NOT_TAKEN:  # their forward says the dtype
            return cls(whole, pruned, None)
        return cls(copies[0], copies[1], dtype)

    def inputs(self, batch: Inputs) -> Inputs:
        """The batch as these models take it."""
        return batch if self.dtype is None else in_dtype(batch, self.dtype)

    def changes(self, before: Any, after: Any, times: float = 1.0) -> Iterator[tuple[float, float]]:
        """(the largest change of a number, what rounding may change there) of each output and order of size.

        Every output counts, since the first one alone is the loss where a batch has labels; and a score that is masked
        by a huge number would hide each change beside it. The change is infinite where shapes differ, or codes. Of
        types wider than half, rounding may change `times` as much.
        """
        codes = zip(discrete_outputs(before), discrete_outputs(after), strict=True)
        if not all(torch.equal(first, second) for first, second in codes):
            yield math.inf, 0.0
        for first, second in zip(all_numbers(before), all_numbers(after), strict=True):
            if first.shape != second.shape:
                yield math.inf, 0.0
                continue
            ordinary = _ordinary(first)
            for some in (ordinary, ~ordinary):
                one, other = first[some], second[some]
                if one.numel():
                    allowed = self._rounding(one) * (times if one.dtype.itemsize > 2 else 1.0)
                    yield difference(one.double(), other.double()).abs().max().item(), allowed

    def _rounding(self, output: Tensor) -> float:
        # Of copies in float64, parts may still be computed in float32.
        output = output if self.dtype is None else output.float()
        # What is added up inside is about 1, also where the outputs are small.
        return max(allowed_rounding(output), allowed_rounding(torch.ones_like(output)))


def _is_half(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize == 2


def _by_how_much(change: float, allowed: float) -> str:
    if math.isinf(change):
        return "in its shape, or in codes, masks or indices"
    return f"by {change:.3g}, where rounding explains {allowed:.3g}"


def _output_of_pruned(model: nn.Module, removed: Units, batch: Inputs) -> Any:
    try:
        return run_example(model, batch)
    except (RuntimeError, IndexError, ValueError) as error:
        units = ", ".join(removed)
        raise RuntimeError(f"without units of {units} the model no longer runs: {error}. {OTHERWISE}") from error


def _ordinary(output: Tensor) -> Tensor:
    """Which numbers are no more than ten thousand times as large as the middle one of those that are not 0."""
    sizes = output.abs().double()
    some = sizes[(sizes > 0) & sizes.isfinite()]
    return sizes <= _HUGE * some.median() if some.numel() else torch.ones_like(sizes, dtype=torch.bool)
