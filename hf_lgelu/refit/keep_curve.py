"""How near a conversion comes when some gates stay smooth: one conversion for each number of gates that are kept."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_lgelu.models.operable import operable_module
from hf_lgelu.models.sites import SMOOTH_KINDS, find_sites
from hf_lgelu.refit.batches import Batch, read_batches
from hf_lgelu.refit.convert import convert_to_relu
from hf_lgelu.refit.dials import KEPT_COUNTS
from hf_lgelu.refit.report import Evaluation, evaluations
from hf_lgelu.refit.verdict import ConversionRefusedError


@dataclass(frozen=True)
class KeepPoint:
    """One conversion of a `keep_curve`.

    Args:
        kept: names of the gates that stayed.
        converted: gates that were exchanged.
        evaluation: on the second set, or else on the inputs held out: original, direct swap and converted network.

    >>> import torch
    >>> from torch import nn
    >>> from hf_lgelu import keep_curve
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))
    >>> (point,) = keep_curve(net, torch.randn(200, 4), counts=(0,))
    >>> point.converted, point.evaluation.refitted.kl < point.evaluation.direct.kl
    (1, True)
    """

    kept: tuple[str, ...]
    converted: int
    evaluation: Evaluation


def keep_curve(
    model: nn.Module,
    data: Any,
    *,
    counts: Sequence[int] = KEPT_COUNTS,
    evaluation_data: Any = None,
    batch_size: int | None = None,
    collate: Callable[[Any], Any] | None = None,
    max_units: int | None = None,
    **conversion: Any,
) -> tuple[KeepPoint, ...]:
    """`convert_to_relu` with `keep=n` for each of `counts`, most gates converted last; `model` stays as it is.

    The gates kept are the dearest when each alone is exchanged (`gate_costs`), so the cheapest are converted first.

    Args:
        model, data, evaluation_data, batch_size, collate, max_units: as for `convert_to_relu`; iterators are read once.
        counts: numbers of gates to keep; those that leave nothing to convert are left out.
        **conversion: what else `convert_to_relu` takes: `effort`, `target`, `outputs` and so on.

    Raises what `convert_to_relu` raises, ValueError where no count leaves a gate to convert, TypeError for `keep` and
    `checkpoint_dir`, and ConversionRefusedError where no inputs could be held out.

    >>> import torch
    >>> from torch import nn
    >>> from hf_lgelu import keep_curve
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 9), nn.GELU(), nn.Linear(9, 3))
    >>> [(len(point.kept), point.converted) for point in keep_curve(net, torch.randn(200, 4), counts=(0, 1))]
    [(1, 1), (0, 2)]
    """
    if taken := {"keep", "checkpoint_dir"} & conversion.keys():
        raise TypeError(
            f"a curve is of several conversions, and takes no {' and no '.join(sorted(taken))}; leave it out"
        )
    gates = len(find_sites(operable_module(model), conversion.get("kinds", SMOOTH_KINDS)))
    kept_counts = counts_to_keep(counts, gates)
    batches = read_batches(data, batch_size=batch_size, collate=collate, max_units=max_units)
    given, second = _pairs(batches), evaluation_data
    if second is not None:
        second = _pairs(read_batches(second, batch_size=batch_size, collate=collate))
    points = []
    for count in kept_counts:
        try:
            report = convert_to_relu(
                model, given, evaluation_data=second, batch_size=batch_size, keep=count, **conversion
            ).report
        except ConversionRefusedError as error:
            if error.report is None:
                raise
            report = error.report  # too far is what the curve is to show
        measured = evaluations(report)
        if not measured:
            raise ConversionRefusedError("a curve needs inputs that can be held out, 64 rows or more; give more")
        points.append(KeepPoint(tuple(report.kept), len(report.gates), measured[-1][1]))
    return tuple(points)


def counts_to_keep(counts: Sequence[int], gates: int) -> list[int]:
    """Those that leave something to convert, the largest first. Raises ValueError where there is none."""
    found = sorted({count for count in counts if count < max(1, gates)}, reverse=True)
    if not found:
        raise ValueError(f"counts: of {gates} gates 0 to {gates - 1} can stay as they are, got {list(counts)}")
    return found


def _pairs(batches: Iterable[Batch]) -> list[tuple[Any, ...]]:
    return [(batch.inputs,) if batch.labels is None else (batch.inputs, batch.labels) for batch in batches]
