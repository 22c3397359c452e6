"""What two models give on the same inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_lgelu.models.example_run import ExampleInputs, run_example


@dataclass(frozen=True)
class OutputChange:
    """How far the first output of one model is from another's, over `rows` predictions (all but the last axis).

    `largest_output` is the largest absolute value of the first model's. A prediction is the argmax over the last axis.
    """

    max_change: float
    largest_output: float
    unchanged_predictions: float
    rows: int

    def __str__(self) -> str:
        return (
            f"largest change {self.max_change:.3g} of outputs up to {self.largest_output:.3g}, "
            f"{self.unchanged_predictions:.2%} of {self.rows} predictions unchanged"
        )


def outputs_of(model: nn.Module, inputs: ExampleInputs) -> list[Tensor]:
    """The floating-point tensors of a model's output, in order, with gradients and training mode off."""
    return [tensor for tensor in _tensors(run_example(model, inputs)) if tensor.is_floating_point()]


def compare_models(model: nn.Module, other: nn.Module, inputs: ExampleInputs) -> OutputChange:
    """How `other`'s first output differs from `model`'s.

    Raises RuntimeError if a model gives no tensor, or the two have different shapes.
    """
    before, after = outputs_of(model, inputs), outputs_of(other, inputs)
    if not before or not after or before[0].shape != after[0].shape:
        raise RuntimeError(
            f"the outputs cannot be compared: {[tuple(t.shape) for t in before]} and {[tuple(t.shape) for t in after]}"
        )
    first, second = before[0].double(), after[0].double()
    agreement = (first.argmax(-1) == second.argmax(-1)).double()
    return OutputChange(
        max_change=(first - second).abs().max().item(),
        largest_output=first.abs().max().item(),
        unchanged_predictions=agreement.mean().item(),
        rows=agreement.numel(),
    )


def require_equal_outputs(expected: Sequence[Tensor], loaded: Sequence[Tensor]) -> None:
    """Raise RuntimeError unless a saved and loaded model gives what the model in memory gave, bit for bit."""
    if [t.shape for t in expected] != [t.shape for t in loaded] or not expected:
        raise RuntimeError("the saved model, loaded again, gives outputs of other shapes; nothing was kept")
    for before, after in zip(expected, loaded, strict=True):
        if not torch.allclose(before, after, rtol=0, atol=0, equal_nan=True):  # infinities are equal here, too
            raise RuntimeError(
                "the saved model, loaded again, gives other outputs (largest difference "
                f"{(before - after).abs().max().item():.3g}); nothing was kept"
            )


def _tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        return [tensor for value in output.values() for tensor in _tensors(value)]
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in _tensors(value)]
    return []
