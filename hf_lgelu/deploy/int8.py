"""Static int8 of an ONNX file by onnxruntime: quantize and dequantize nodes around what can run on integers.

Weights are signed, with a scale per output channel; activations are unsigned, with a scale and a zero point from the
smallest and largest value on calibration data. With unsigned activations a ReLU is the lower end of the range that its
input is rounded to, and onnxruntime drops it; a GELU stays a float operation between a dequantize and a quantize.
Needs the extra "onnx".
"""

import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_lgelu.deploy.extras import require
from hf_lgelu.deploy.onnx_session import executed_operations

MATRIX_OPERATIONS = ("Conv", "Gemm", "MatMul")
"""What to quantize where only the products matter: everything between them stays in float32."""

_ACTIVATIONS = ("Relu", "Gelu", "BiasGelu", "FastGelu", "QuickGelu", "Erf", "Tanh", "Sigmoid")


@dataclass(frozen=True)
class Int8Export:
    """What `quantize_onnx` wrote, and what onnxruntime makes of it on this CPU.

    `executed` counts the operations that run, by name. `integer_products` of them multiply integers,
    `float_activations` are activation functions computed in float32, and `conversions` go from float to integer or
    back.
    """

    path: str
    bytes: int
    executed: dict[str, int]

    @property
    def integer_products(self) -> int:
        """Matrix products and convolutions on integers."""
        names = ("QGemm", "QLinearConv", "QLinearMatMul", "MatMulInteger", "ConvInteger", "MatMulIntegerToFloat")
        return sum(self.executed.get(name, 0) for name in names)

    @property
    def float_activations(self) -> int:
        """Activation functions that run in float32."""
        return count_activations(self.executed)

    @property
    def conversions(self) -> int:
        """Steps from float32 to integers or back."""
        return self.executed.get("QuantizeLinear", 0) + self.executed.get("DequantizeLinear", 0)

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.bytes:,} bytes; {self.integer_products} products on integers, "
            f"{self.float_activations} activations in float32, {self.conversions} conversions between the two"
        )


def count_activations(operations: Mapping[str, int]) -> int:
    """Activation functions among executed operations; Erf stands for a λ-GELU."""
    return sum(operations.get(name, 0) for name in _ACTIVATIONS)


def quantize_onnx(
    path: str | os.PathLike,
    output_path: str | os.PathLike,
    calibration_batches: Iterable[Mapping[str, Tensor]],
    *,
    operations: Sequence[str] | None = None,
) -> Int8Export:
    """Write the int8 form of a float32 ONNX file: complete, or not there.

    Args:
        path: a file of `export_onnx`.
        output_path: of the int8 file; one that is there is replaced.
        calibration_batches: inputs by name, from training data; some hundred rows. Entries that the file does not
            take are ignored.
        operations: ONNX operations to quantize, e.g. `MATRIX_OPERATIONS`; None for all that onnxruntime can.

    Raises:
        ImportError: the extra "onnx" is not installed.
        ValueError: no calibration batch, or one without an input of the file.
    """
    onnx = require("onnx", "onnx")
    quantization = require("onnxruntime.quantization", "onnx")
    shape_inference = require("onnxruntime.quantization.shape_inference", "onnx")
    reader = _reader(quantization, onnx.load(str(path), load_external_data=False), calibration_batches)
    output_path = Path(output_path)
    output_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_path.parent, prefix=".int8-") as folder, _quiet():
        prepared, quantized = Path(folder) / "prepared.onnx", Path(folder) / output_path.name
        shape_inference.quant_pre_process(str(path), str(prepared))
        quantization.quantize_static(
            str(prepared), str(quantized), reader,
            quant_format=quantization.QuantFormat.QDQ, per_channel=True,
            activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8,
            calibrate_method=quantization.CalibrationMethod.MinMax,
            op_types_to_quantize=None if operations is None else list(operations),
        )  # fmt: skip
        executed = executed_operations(quantized)
        os.replace(quantized, output_path)
    return Int8Export(str(output_path), output_path.stat().st_size, executed)


def _reader(quantization: Any, proto: Any, batches: Iterable[Mapping[str, Tensor]]) -> Any:
    names = [entry.name for entry in proto.graph.input]
    feeds = []
    for batch in batches:
        missing = [name for name in names if name not in batch]
        if missing:
            raise ValueError(f"a calibration batch has no {', '.join(missing)}; it has {', '.join(batch) or 'nothing'}")
        feeds.append({name: batch[name].detach().cpu().numpy() for name in names})
    if not feeds:
        raise ValueError("int8 needs at least one calibration batch: its ranges come from data")

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self._left: Iterator[dict[str, Any]] = iter(feeds)

        def get_next(self) -> dict[str, Any] | None:
            return next(self._left, None)

    return Reader()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without onnxruntime's advice to pre-process, which has been done, on the root logger."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.setLevel(level)
