"""The whole networks beside each other: original, direct swap and refit, on inputs that nothing was fitted on."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn import functional as F

from hf_lgelu.models.comparison import floating_outputs
from hf_lgelu.models.example_run import run_example
from hf_lgelu.models.surgery import TemporaryRelu
from hf_lgelu.refit.calibration import Batch
from hf_lgelu.refit.metrics import MetricSums, metric_sums
from hf_lgelu.refit.plan import Chunk
from hf_lgelu.refit.report import Evaluation, NetChange

_SLICE = 2**21  # numbers that are looked at together, in float64


@dataclass
class _ChangeSums:
    """How far one network is from the original, added up over rows."""

    kl: float = 0.0
    unchanged: int = 0
    max_change: float = 0.0
    squared_error: float = 0.0

    def add(self, reference: Tensor, output: Tensor) -> None:
        """`reference` and `output` (rows, classes), float64."""
        expected, given = F.log_softmax(reference, dim=-1), F.log_softmax(output, dim=-1)
        self.kl += F.kl_div(given, expected, reduction="sum", log_target=True).item()
        self.unchanged += int((reference.argmax(-1) == output.argmax(-1)).sum())
        change = (output - reference).abs()
        # Not Python's max, which keeps what it has before a NaN.
        self.max_change = torch.maximum(change.max().cpu(), torch.tensor(self.max_change)).item()
        self.squared_error += change.square().sum().item()

    def __add__(self, other: "_ChangeSums") -> "_ChangeSums":
        largest = torch.maximum(torch.tensor(self.max_change), torch.tensor(other.max_change)).item()
        return _ChangeSums(
            self.kl + other.kl,
            self.unchanged + other.unchanged,
            largest,
            self.squared_error + other.squared_error,
        )


@dataclass
class _Totals:
    """Of one process, or of all."""

    units: int
    rows: int
    total: Tensor
    square: float
    changes: tuple[_ChangeSums, _ChangeSums]
    metrics: tuple[MetricSums, MetricSums, MetricSums]

    def __add__(self, other: "_Totals") -> "_Totals":
        return _Totals(
            self.units + other.units,
            self.rows + other.rows,
            self.total + other.total,
            self.square + other.square,
            tuple(mine + theirs for mine, theirs in zip(self.changes, other.changes, strict=True)),
            tuple(mine + theirs for mine, theirs in zip(self.metrics, other.metrics, strict=True)),
        )

    def evaluation(self, has_logits: bool) -> Evaluation:
        original, *metrics = (sums.values() for sums in self.metrics)
        spread = self.square - (self.total.square().sum() / self.rows).item()
        return Evaluation(
            self.rows,
            self.units,
            original,
            *(
                NetChange(
                    change.kl / self.rows if has_logits else None,
                    change.unchanged / self.rows,
                    change.max_change,
                    change.squared_error / spread if spread > 0 else float(change.squared_error > 0),
                    values,
                )
                for change, values in zip(self.changes, metrics, strict=True)
            ),
        )


def evaluate_conversion(
    original: nn.Module, student: nn.Module, substitution: TemporaryRelu, batches: Iterable[Batch | Chunk]
) -> Evaluation | None:
    """Run the three networks on every batch; None if no process has one.

    Args:
        original: the given model.
        student: the refitted one.
        substitution: puts ReLU at the original's gates: the direct swap.
        batches: of this process; every process must call.
    """
    totals, has_logits = None, False
    for batch in batches:
        batch = batch.load() if isinstance(batch, Chunk) else batch
        reference, has_logits = main_output(original, batch.inputs)
        with substitution.applied():
            direct, _ = main_output(original, batch.inputs)
        outputs = reference, direct, main_output(student, batch.inputs)[0]
        counted = _counted(batch, reference)
        new = _sums(outputs, counted, batch, type(original).__name__)
        totals = new if totals is None else totals + new
    if PartialState().num_processes > 1:
        parts = [part for part in gather_object([(totals, has_logits)]) if part[0] is not None]
        has_logits = any(logits for _, logits in parts)
        totals = reduce(operator.add, (sums for sums, _ in parts)) if parts else None
    return None if totals is None else totals.evaluation(has_logits)


def main_output(model: nn.Module, inputs: Any) -> tuple[Tensor, bool]:
    """(the logits, or the first tensor of an output that has none; whether they are logits of classes).

    Classes are the last axis: of maps (N, C, H, W) they are moved there, one number a unit (N,) becomes (N, 1).
    Raises ValueError where there is no such tensor, or one number for all units.
    """
    output, has_logits = _as_given(model, inputs)
    if output is None or output.ndim == 0:
        raise ValueError(
            f"{type(model).__name__} gives {'no tensor' if output is None else 'one number for all inputs'}: networks "
            "are compared by an output whose leading axis counts the inputs. Convert the part that gives one"
        )
    if output.ndim == 1:
        return output[:, None], False
    return output.movedim(1, -1) if output.ndim > 3 else output, has_logits and output.shape[-1] > 1


def _as_given(model: nn.Module, inputs: Any) -> tuple[Tensor | None, bool]:
    output = run_example(model, inputs)
    if isinstance(output, Mapping) and "logits" in output:
        config = getattr(model, "config", None)
        regression = getattr(config, "problem_type", None) == "regression" or getattr(config, "num_labels", 2) == 1
        return output["logits"], not regression
    if isinstance(output, Tensor):
        return output, True
    return next(iter(floating_outputs(output)), None), False


def _counted(batch: Batch, output: Tensor) -> Tensor | None:
    """Which predictions are no padding: a mask of the shape of the output's leading axes."""
    for name in ("decoder_attention_mask", "attention_mask"):
        mask = batch.tensors.get(name)
        if mask is not None and mask.shape == output.shape[:-1]:
            return mask.bool().to(output.device)
    return None


def _sums(outputs: tuple[Tensor, Tensor, Tensor], counted: Tensor | None, batch: Batch, model_class: str) -> _Totals:
    metrics = tuple(metric_sums(output, batch.labels, counted, model_class) for output in outputs)
    rows = [_as_rows(output, counted) for output in outputs]
    changes = (_ChangeSums(), _ChangeSums())
    classes = rows[0].shape[-1]
    total, square = torch.zeros(classes, dtype=torch.float64), 0.0
    for reference, *others in zip(*(part.split(max(1, _SLICE // classes)) for part in rows), strict=True):
        reference = _double(reference)
        total += reference.sum(0).cpu()
        square += reference.square().sum().item()
        for change, other in zip(changes, others, strict=True):
            change.add(reference, _double(other))
    return _Totals(len(batch), len(rows[0]), total, square, changes, metrics)


def _as_rows(output: Tensor, counted: Tensor | None) -> Tensor:
    return output.reshape(-1, output.shape[-1]) if counted is None else output[counted]


def _double(rows: Tensor) -> Tensor:
    return (rows.cpu() if rows.device.type == "mps" else rows).double()
