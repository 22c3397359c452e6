"""Static int8 of an ONNX file by onnxruntime, and what becomes of its activations.

Activations are unsigned (u8), weights signed (s8) with a scale for each output channel, both by the range that
calibration sees (MinMax). With unsigned activations a ReLU costs nothing: it is where the quantizer clips. A smooth
activation is computed in float between a dequantization and a quantization.
"""

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hf_lgelu.export.onnx.onnx_run import (
    INTEGER_LAYERS,
    OnnxModel,
    as_arrays,
    count_activations,
    count_operations,
    strip_metadata,
)
from hf_lgelu.export.onnx.silence import silence_python
from hf_lgelu.extras import require
from hf_lgelu.models.whole_file import whole_file

QUANTIZED_OPERATIONS: dict[str, tuple[str, ...] | None] = {"all": None, "layers": ("Conv", "Gemm", "MatMul")}
"""Which operations get integer inputs and outputs: all that onnxruntime can, or those with most of the arithmetic."""


@dataclass(frozen=True)
class GraphCounts:
    """Nodes of the graph that onnxruntime makes of a file and runs on this CPU.

    `operations` is {operation: nodes}. `float_activations` are computed in float, fused into another node or not;
    `integer_layers` multiply integers; `quantize` and `dequantize` are the steps between the two worlds.
    """

    operations: dict[str, int]
    float_activations: int
    integer_layers: int
    quantize: int
    dequantize: int


@dataclass(frozen=True)
class Int8Report:
    """What `quantize_onnx` wrote.

    `activations` are those of the float file; of these `float_activations` still are computed in float, and
    `vanished_activations` are part of an integer operation. `counts` is the graph that really runs.
    """

    path: Path
    file_bytes: int
    float_file_bytes: int
    calibration_rows: int
    activations: int
    float_activations: int
    vanished_activations: int
    counts: GraphCounts

    def __str__(self) -> str:
        counts = self.counts
        lines = [
            f"{self.path}: int8, {self.file_bytes:,} bytes (float32: {self.float_file_bytes:,}), calibrated on "
            f"{self.calibration_rows:,} rows",
            f"  {counts.integer_layers} layers in integers, {counts.quantize} steps from float to integers and "
            f"{counts.dequantize} back",
            f"  of {self.activations} activations, {self.vanished_activations} are part of an integer operation and "
            f"{self.float_activations} are computed in float",
        ]
        return "\n".join(lines)


def quantize_onnx(
    path: str | os.PathLike,
    output_path: str | os.PathLike,
    calibration_batches: Iterable[Mapping[str, np.ndarray | Tensor]],
    *,
    operations: str = "all",
    overwrite: bool = False,
) -> Int8Report:
    """Write an int8 version of a float32 ONNX file: quantize/dequantize nodes (QDQ), u8 activations, s8 weights.

    Args:
        path: of the float file, e.g. of `export_onnx`.
        output_path: the file to be.
        calibration_batches: inputs by name, of training rows; inputs that the graph does not have are left out.
        operations: a key of QUANTIZED_OPERATIONS: "all", or "layers" for Conv, Gemm and MatMul alone.
        overwrite: replace a file that is there.

    Raises:
        ImportError: onnx or onnxruntime is missing; the message names the extra [onnx].
        ValueError: unknown `operations`, `output_path` is `path`, no calibration batch, or one that lacks an input or
            holds NaN or infinity.
        TypeError: a calibration batch is no mapping.
        FileNotFoundError: there is no file at `path`.
        FileExistsError: there is a file at `output_path`, and `overwrite` is False.
    """
    if operations not in QUANTIZED_OPERATIONS:
        raise ValueError(f"operations must be one of {', '.join(QUANTIZED_OPERATIONS)}, got {operations!r}")
    if Path(output_path).resolve() == Path(path).resolve():
        raise ValueError(f"{path} is the float file itself; give another output_path, so that it is not lost")
    require("onnx", "onnx")
    quantization = require("onnxruntime.quantization", "onnx")
    batches = _check_batches(calibration_batches, OnnxModel(path).input_names)
    with whole_file(output_path, overwrite=overwrite) as file:
        prepared, raw = file.with_name("prepared.onnx"), file.with_name("quantized.onnx")
        with silence_python():  # the quantizer gives advice on the root logger
            # Its symbolic shapes need one more package and stop at operations of transformers; ONNX's own suffice.
            require("onnxruntime.quantization.shape_inference", "onnx").quant_pre_process(
                os.fspath(path), os.fspath(prepared), skip_symbolic_shape=True
            )
            quantization.quantize_static(
                os.fspath(prepared),
                os.fspath(raw),
                _reader(quantization, batches),
                quant_format=quantization.QuantFormat.QDQ,
                op_types_to_quantize=_op_types(operations),
                per_channel=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                calibrate_method=quantization.CalibrationMethod.MinMax,
            )
        _save_stripped(raw, file)
        counts = count_optimized(file)
        size = file.stat().st_size
    before = count_activations(path)
    rows = sum(len(next(iter(batch.values()))) for batch in batches)
    return Int8Report(
        Path(output_path), size, Path(path).stat().st_size, rows, before, counts.float_activations,
        before - counts.float_activations, counts,
    )  # fmt: skip


def count_optimized(path: str | os.PathLike) -> GraphCounts:
    """Count the nodes of the graph that onnxruntime, with all its optimizations, makes of a file on this CPU."""
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "optimized.onnx"
        OnnxModel(path, optimized_path=graph)
        counted = count_operations(graph)
        return GraphCounts(
            operations=dict(sorted(counted.items())),
            float_activations=count_activations(graph),
            integer_layers=sum(count for operation, count in counted.items() if operation in INTEGER_LAYERS),
            quantize=counted["QuantizeLinear"],
            dequantize=counted["DequantizeLinear"],
        )


def _check_batches(
    calibration_batches: Iterable[Mapping[str, np.ndarray | Tensor]], names: tuple[str, ...]
) -> list[dict[str, np.ndarray]]:
    batches = []
    for batch in calibration_batches:
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"a calibration batch must be a mapping from {', '.join(names)} to rows, got {type(batch).__name__}"
            )
        missing = [name for name in names if name not in batch]
        if missing:
            raise ValueError(f"a calibration batch must hold {', '.join(names)}; it lacks {', '.join(missing)}")
        arrays = as_arrays({name: batch[name] for name in names})
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"calibration rows must be finite; {name} holds NaN or infinity")
        batches.append(arrays)
    if not batches:
        raise ValueError("calibration_batches must hold at least one batch")
    return batches


def _op_types(operations: str) -> list[str] | None:
    chosen = QUANTIZED_OPERATIONS[operations]
    return None if chosen is None else list(chosen)


def _reader(quantization: Any, batches: list[dict[str, np.ndarray]]) -> Any:
    left = iter(batches)

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(left, None)

    return Reader()


def _save_stripped(source: Path, target: Path) -> None:
    onnx = require("onnx", "onnx")
    proto = onnx.load(os.fspath(source))
    strip_metadata(proto)
    onnx.save(proto, os.fspath(target))
