"""Does an ONNX file compute in onnxruntime what the network computes in torch?"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hf_lgelu.export.onnx.onnx_run import OnnxModel, as_arrays


@dataclass(frozen=True)
class Parity:
    """`max_abs_difference` of all outputs, and `largest_output`, the largest |output| of torch."""

    max_abs_difference: float
    largest_output: float


def compare_outputs(
    onnx_model: OnnxModel, inputs: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, where: str
) -> Parity:
    """Run `inputs` in onnxruntime and compare with `expected`, torch's outputs by name.

    Outputs at positions that an attention_mask of zeros marks as padding are left out.

    Args:
        onnx_model: the file.
        inputs: by name; those that the graph does not have, as their values change nothing, are left out.
        expected: in the order of the graph's outputs.
        tolerance: relative to an output's largest value, or to 1 if that is larger.
        where: what the inputs are, for the error.

    Raises:
        RuntimeError: an output has another shape, or differs by more than the tolerance.
    """
    found = onnx_model({name: value for name, value in inputs.items() if name in onnx_model.input_names})
    largest = difference = 0.0
    for (name, wanted), array in zip(as_arrays(expected).items(), found, strict=True):
        if array.shape != wanted.shape:
            raise RuntimeError(f"onnxruntime gives {name} of shape {array.shape} {where}, torch {wanted.shape}")
        array, wanted = (_without_padding(values, inputs).astype(np.float64) for values in (array, wanted))
        here = float(np.abs(array - wanted).max(initial=0.0))
        size = float(np.abs(wanted).max(initial=0.0))
        if not here <= tolerance * max(1.0, size):  # also where it is NaN
            raise RuntimeError(
                f"onnxruntime differs from torch by {here:.3g} in {name} {where}, where the largest is {size:.3g}; "
                f"allowed is {tolerance:g} of it, or of 1 if that is larger. The file is not kept"
            )
        difference, largest = max(difference, here), max(largest, size)
    return Parity(difference, largest)


def _without_padding(output: np.ndarray, inputs: Mapping[str, Tensor]) -> np.ndarray:
    # Where nothing is attended to, each runtime has its own arbitrary values.
    mask = inputs.get("attention_mask")
    if mask is None or mask.ndim != 2 or output.shape[:2] != tuple(mask.shape):
        return output
    return output[mask.numpy() != 0]
