"""What two models give on the same inputs."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_lgelu.formats import percent
from hf_lgelu.models.example_run import Inputs, run_example

# What rounding may change in an output, relative to the largest.
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}

_OFF_ONE = 0.01  # shares that were rounded to bfloat16 add up to one as nearly
_TOO_MANY_BY_CHANCE = 32  # scores that all lie between 0 and 1


@dataclass(frozen=True)
class OutputChange:
    """How far the first output of one model (not the loss) is from another's.

    `rows` is the number of predictions (all axes but that of the classes, the last, of maps (N, C, H, W) axis 1) and
    `unchanged_predictions` the share of them that stay, None where a row has a single score, for no class is the
    largest of one; `largest_output` the largest finite absolute value of the first model's. An infinity that both have
    at one place is no change.
    """

    max_change: float
    largest_output: float
    unchanged_predictions: float | None
    rows: int

    def __str__(self) -> str:
        text = f"largest change {self.max_change:.3g} of outputs up to {self.largest_output:.3g}"
        if self.unchanged_predictions is None:
            return f"{text}, on {self.rows} rows of one score"
        return f"{text}, {percent(self.unchanged_predictions)} of {self.rows} predictions unchanged"


def outputs_of(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The floating-point tensors of a model's output, in order, with gradients and training mode off.

    Without the loss, which stands first where the inputs hold labels: a scalar beside tensors of predictions, or what
    the output names "loss".
    """
    return floating_outputs(run_example(model, inputs))


def floating_outputs(output: Any) -> list[Tensor]:
    """What `outputs_of` gives, of an output that is there."""
    if isinstance(output, dict):
        output = {name: value for name, value in output.items() if name != "loss"}
    found = [tensor for tensor in _tensors(output) if tensor.is_floating_point()]
    return [tensor for tensor in found if tensor.ndim > 0] or found


def all_numbers(output: Any) -> list[Tensor]:
    """What `floating_outputs` gives, and behind these the complex tensors, as pairs of numbers."""
    found = [tensor.resolve_conj() for tensor in _tensors(output) if tensor.is_complex()]
    return [*floating_outputs(output), *map(torch.view_as_real, found)]


def discrete_outputs(output: Any) -> list[Tensor]:
    """The tensors of an output that hold no floating-point numbers: codes, masks, indices."""
    return [tensor for tensor in _tensors(output) if not (tensor.is_floating_point() or tensor.is_complex())]


def allowed_rounding(output: Tensor) -> float:
    """How far rounding may move a number of this output, by its dtype and the largest finite one."""
    return _ROUNDING.get(output.dtype, _ROUNDING[torch.float32]) * largest_finite(output)


def largest_finite(tensor: Tensor) -> float:
    """The largest absolute value among those that are finite; 0 where there is none."""
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def difference(output: Tensor, other: Tensor) -> Tensor:
    """`output - other`; of the infinity that models give for classes that cannot be, 0 where both have the same."""
    return torch.where(output == other, 0.0, output - other)


def kl_terms(reference: Tensor, output: Tensor) -> Tensor:
    """p·log(p/q) of every class, (..., classes), from logits; a class that cannot be (p = 0) adds nothing."""
    expected, given = F.log_softmax(reference, dim=-1), F.log_softmax(output, dim=-1)
    terms = F.kl_div(given, expected, reduction="none", log_target=True)
    return terms.masked_fill(expected == -math.inf, 0.0)


def compare_models(model: nn.Module, other: nn.Module, inputs: Inputs) -> OutputChange:
    """How `other`'s first output differs from `model`'s; the loss is none (`outputs_of`).

    Raises RuntimeError if a model gives no floating-point tensor, or the two have different shapes, and ValueError if
    the outputs are empty or the first model's hold NaN.
    """
    before, after = outputs_of(model, inputs), outputs_of(other, inputs)
    if not before or not after or before[0].shape != after[0].shape:
        raise RuntimeError(
            "the models' first floating-point outputs must have one shape to be compared; the shapes of all are "
            f"{[tuple(t.shape) for t in before]} and {[tuple(t.shape) for t in after]}"
        )
    first, second = (classes_last(outputs[0].cpu().double()) for outputs in (before, after))
    if not first.numel():
        raise ValueError(
            f"the outputs on the example inputs are empty, of shape {tuple(first.shape)}; give at least one row"
        )
    if first.isnan().any():
        raise ValueError("the model gives NaN on the example inputs; give finite inputs, or look at its weights")
    unchanged = None
    if has_classes(first):
        unchanged = ((first.argmax(-1) == second.argmax(-1)) & ~second.isnan().any(-1)).double().mean().item()
    return OutputChange(
        max_change=difference(first, second).abs().max().item(),
        largest_output=largest_finite(first),
        unchanged_predictions=unchanged,
        rows=count_rows(first),
    )


def count_rows(output: Tensor) -> int:
    """How many rows of scores it has; of one axis, each number is a row."""
    return output.numel() // (output.shape[-1] if output.ndim > 1 else 1)


def are_probabilities(output: Tensor) -> bool:
    """Whether the numbers are what softmax or a sigmoid gives, of which another softmax would make nearly equal shares.

    All lie between 0 and 1, and the rows add up to one, or there are 32 numbers or more: as scores, some would not.
    """
    if not has_classes(output) or not output.numel():
        return False
    first = output.flatten(0, -2)[0]  # of scores one row is enough to tell, however many there are
    if not all(bool(((part >= 0) & (part <= 1)).all()) for part in (first, output)):
        return False
    add_up = (output.sum(-1, dtype=torch.float32) - 1).abs() < _OFF_ONE
    return bool(add_up.all()) or output.numel() >= _TOO_MANY_BY_CHANCE


def classes_last(output: Tensor, class_axis: int | None = None) -> Tensor:
    """An output with one column a class: the classes last, one number a unit as one column.

    They are on `class_axis`; where that is not known, of maps (N, C, H, W) on axis 1, else on the last.
    """
    if output.ndim == 1:
        return output[:, None]
    usual = 1 if output.ndim > 3 else -1
    return output.movedim(usual if class_axis is None else class_axis, -1)


def has_classes(output: Tensor) -> bool:
    """Whether it has several scores a row, the largest of which may be a class predicted."""
    return output.ndim > 1 and output.shape[-1] > 1


def require_same_model(model: nn.Module, loaded: nn.Module, inputs: Inputs) -> None:
    """Raise RuntimeError unless a saved and loaded model has the same tensors and gives the same outputs.

    Tensors bit for bit; outputs up to rounding, since a kernel may sum in another order where memory is aligned
    otherwise.
    """
    tensors, others = model.state_dict(), loaded.state_dict()
    differing = [name for name in tensors.keys() & others.keys() if not _same(tensors[name], others[name])]
    differing += sorted(tensors.keys() ^ others.keys())
    retyped = [
        name for name in differing if name in tensors and name in others and _is_retyped(tensors[name], others[name])
    ]
    if retyped:
        name = min(retyped)
        raise RuntimeError(
            f"the saved model, loaded again, has {len(retyped)} tensors of another dtype ({name}: "
            f"{tensors[name].dtype} here, {others[name].dtype} there), since transformers loads a model in one dtype, "
            "but for tensors that its class keeps in float32. Give the model as from_pretrained(..., dtype=...) would, "
            "or in float32"
        )
    if differing:
        raise RuntimeError(f"the saved model, loaded again, has another {', '.join(sorted(differing)[:4])}")
    before, after = outputs_of(model, inputs), outputs_of(loaded, inputs)
    if not before or [tensor.shape for tensor in before] != [tensor.shape for tensor in after]:
        raise RuntimeError("the saved model, loaded again, gives no outputs, or some of other shapes")
    for first, second in zip(before, after, strict=True):
        allowed = allowed_rounding(first)
        if not torch.allclose(first, second, rtol=0, atol=allowed, equal_nan=True):  # infinities are equal here, too
            raise RuntimeError(
                "the saved model, loaded again, gives other outputs: largest difference "
                f"{largest_finite(first - second):.3g}, where rounding explains {allowed:.3g}"
            )


def _same(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and torch.equal(tensor.cpu(), other.cpu())


def _is_retyped(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype != other.dtype and tensor.shape == other.shape


def _tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        return [tensor for value in output.values() for tensor in _tensors(value)]
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in _tensors(value)]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        values = [getattr(output, part.name, None) for part in dataclasses.fields(output)]
        return [tensor for value in values for tensor in _tensors(value)]
    return []
