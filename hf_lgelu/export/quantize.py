"""Static int8 of an ONNX file by onnxruntime, and its distance from float32.

Activations are unsigned (u8). Weights are signed (s8), with a scale for each output channel. Calibration sees the range
of both (MinMax). With unsigned activations a ReLU costs nothing, because the quantizer clips at 0. A smooth activation
is computed in float between a dequantization and a quantization.

With "layers", the output of a matrix product stays in float, because no integer operation reads it. One range for the
sums and normalizations of a transformer costs more than all else. So "layers" is the default for graphs that multiply
activations with activations. A convolution computes in integers only if its output is quantized too.

A range holds 256 values. An attention mask adds numbers like −3.4e38 to scores like 10. In one range with the mask, all
scores are the same. The same happens to ages in one range with incomes, if a network scales raw features itself. The
operations on these numbers, up to and with the next softmax, stay in float.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_lgelu.activation.hardness import require_known
from hf_lgelu.comparing.comparison import OutputComparison
from hf_lgelu.comparing.distance import Distance
from hf_lgelu.environment import require
from hf_lgelu.export.onnx_run import OnnxModel, as_arrays, read_onnx, silence_python, strip_metadata
from hf_lgelu.files import whole_file
from hf_lgelu.formats import RELATIVE_ERROR
from hf_lgelu.networks.batches import nothing_given, read_batches
from hf_lgelu.networks.masks import counted_rows
from hf_lgelu.networks.outputs import Kind, are_embeddings, classes_last

QUANTIZED_OPERATIONS: dict[str, tuple[str, ...] | None] = {"all": None, "layers": ("Conv", "Gemm", "MatMul")}
"""The operations with integer inputs and outputs: all that onnxruntime has, or those with most of the arithmetic."""

MAX_RELATIVE_ERROR = 0.25
"""The largest relative error of an int8 file that is kept. Networks that still do their task stay below 0.04. At 1,
the outputs say no more of an input than their mean does."""

_SCALE_A_CHANNEL = 13  # the version of ONNX's operations from which on weights have a scale for each channel
LARGE = 1e4  # larger than any trained scale; masks are −1e4 (for float16), −1e9 or the lowest float32

_ENDS = frozenset({"Softmax", "LogSoftmax"})
# Sums of products have a range of their own. A comparison gives no numbers.
_NOT_LARGE_BEHIND = frozenset(
    {
        *("MatMul", "Gemm", "Conv", "ConvTranspose", "LayerNormalization", "BatchNormalization", "Shape"),
        *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not", "And", "Or", "IsNaN", "IsInf"),
        *("Sin", "Cos", "Tanh", "Sigmoid", "Erf", "ArgMax", "Pow", "Reciprocal"),
    }
)


@dataclass(frozen=True)
class Int8Report:
    """The file that `quantize_onnx` wrote, and its distance from the float file on the calibration rows.

    `operations` is the key of QUANTIZED_OPERATIONS that was given, or chosen for the graph. `change` is the distance of
    the output that is farthest. Padding does not count. `large_number_operations` is the number of nodes that
    stay in float because they compute on numbers of at least 1e4, such as attention masks. `weight_bits` is 8, or 7 for
    processors whose products saturate.
    """

    path: Path
    operations: str
    file_bytes: int
    float_file_bytes: int
    calibration_rows: int
    change: Distance
    large_number_operations: int
    weight_bits: int

    def __str__(self) -> str:
        left = self.large_number_operations
        large = f"  {left} operations on numbers of {LARGE:,.0f} and more, such as attention masks, stay in float"
        seven = ", weights of 7 bits" if self.weight_bits == 7 else ""
        lines = [
            f"{self.path}: int8, {self.file_bytes:,} bytes (float32: {self.float_file_bytes:,}), calibrated on "
            f"{self.calibration_rows:,} rows, operations {self.operations!r}{seven}",
            f"  on these rows, against float32: {RELATIVE_ERROR} {self.change.relative_error:.3g}, {self.change}",
            *([large] if left else []),
        ]
        return "\n".join(lines)


def quantize_onnx(
    path: str | os.PathLike,
    output_path: str | os.PathLike,
    data: Any,
    *,
    data_collator: Callable[[Any], Any] | None = None,
    operations: str | None = None,
    reduce_range: bool | None = None,
    max_relative_error: float = MAX_RELATIVE_ERROR,
    overwrite: bool = False,
) -> Int8Report:
    """Write an int8 version of a float32 ONNX file: quantize/dequantize nodes (QDQ), u8 activations, s8 weights.

    Attention masks and the softmax after them stay in float. So do operations that join parts into an output (a
    detector's boxes and scores), and other numbers of at least 1e4, such as raw features, up to the next layer. The
    int8 file is compared with the float file on the calibration rows before it is put in place.

    Args:
        path: the float file, e.g. of `export_onnx`.
        output_path: the file to write.
        data: training rows that give the ranges, as `convert_to_relu` takes them; several inputs by name. Inputs that
            the graph does not have are left out. Give padded rows if rows will be padded in use.
        data_collator: makes a batch of a list of items, as in `ConversionConfig`: of a SentenceTransformer
            `model.preprocess`, with a list of texts as data.
        operations: a key of QUANTIZED_OPERATIONS: "all", or "layers" for only Conv, Gemm and MatMul. With "layers",
            Gemm and MatMul take integers and give float. By default "layers" if the graph multiplies activations with
            activations, as attention does, else "all".
        reduce_range: give weights 7 bits, not 8. By default if `products_saturate` on this processor. A file with 8
            bits is wrong on these processors. Make files for them on one of them, or with True.
        max_relative_error: the largest relative error of a file that is kept.
        overwrite: replace an existing file.

    Raises:
        ImportError: onnx or onnxruntime is missing; the message names the extra [onnx].
        ValueError: there are no rows, or a batch lacks an input or holds NaN or infinity. Or `path` holds no ONNX
            graph, or a graph in int8.
        RuntimeError: the int8 file has a larger relative error than `max_relative_error`, or onnxruntime cannot
            quantize the graph. No file is kept.
        FileExistsError: `output_path` exists, and `overwrite` is False.

    Example:
        >>> import tempfile, torch
        >>> from hf_lgelu import export_onnx, quantize_onnx
        >>> model, rows = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()), torch.randn(64, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = export_onnx(model, f"{folder}/float.onnx", rows)
        ...     report = quantize_onnx(f"{folder}/float.onnx", f"{folder}/int8.onnx", rows)
        >>> report.operations, report.change.relative_error < 0.05
        ('all', True)
    """
    if operations is not None:
        require_known("operations", operations, QUANTIZED_OPERATIONS)
    if Path(output_path).resolve() == Path(path).resolve():
        raise ValueError(f"{path} is the float file itself, which would be lost; give another output_path")
    require("onnx", "onnx")
    quantization = require("onnxruntime.quantization", "onnx")
    float_graph, float_model = read_onnx(path), OnnxModel(path)
    if any(node.op_type == "QuantizeLinear" for node in float_graph.graph.node):
        raise ValueError(f"{path} is quantized already; give the float32 file")
    operations = operations or ("layers" if _multiplies_activations(float_graph.graph) else "all")
    batches = _read_arrays(data, float_model.input_names, data_collator)
    with whole_file(output_path, overwrite=overwrite) as file:
        reduce_range = products_saturate() if reduce_range is None else reduce_range
        large = _quantize(quantization, path, float_graph, file, batches, operations, reduce_range)
        change = _compare(float_model, OnnxModel(file), batches)
        error = change.relative_error
        if not error <= max_relative_error:
            fewer = "" if operations == "layers" else "operations='layers', which leaves more in float, or "
            raise RuntimeError(
                f"the int8 file computes something else: relative error {error:.3g} on the calibration rows, and "
                f"{max_relative_error:g} is allowed ({change}). It is not kept. Give {fewer}more rows from where the "
                "network is used; or allow a larger max_relative_error"
            )
        size = file.stat().st_size
    return Int8Report(
        path=Path(output_path),
        operations=operations,
        file_bytes=size,
        float_file_bytes=Path(path).stat().st_size,
        calibration_rows=sum(len(next(iter(batch.values()))) for batch in batches),
        change=change,
        large_number_operations=large,
        weight_bits=7 if reduce_range else 8,
    )


def _read_arrays(
    data: Any, names: tuple[str, ...], data_collator: Callable[[Any], Any] | None
) -> list[dict[str, np.ndarray]]:
    """Every batch as finite arrays by the `names` of the graph's inputs."""
    found = []
    for batch in read_batches(data, data_collator=data_collator):
        given = batch.inputs
        if not isinstance(given, dict):
            given = dict(zip(names, (given,) if isinstance(given, Tensor) else given, strict=False))
        if missing := [name for name in names if given.get(name) is None]:
            raise ValueError(f"a batch must hold {', '.join(names)}; it lacks {', '.join(missing)}")
        arrays = as_arrays({name: given[name] for name in names})
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"calibration rows must be finite; {name} holds NaN or infinity")
        found.append(arrays)
    if not found:
        raise nothing_given("data")
    return found


def _compare(model: OnnxModel, other: OnnxModel, batches: list[dict[str, np.ndarray]]) -> Distance:
    """The distance of the floating-point output of `other` that is farthest from that of `model`."""
    found: dict[str, OutputComparison] = {}
    for batch in batches:
        inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
        for name, array, other_array in zip(model.output_names, model(batch), other(batch), strict=True):
            if array.dtype.kind == "f" and array.size:
                first, second = (classes_last(torch.from_numpy(values)) for values in (array, other_array))
                kind: Kind = "embeddings" if are_embeddings(model, name, first) else "values"
                counted = counted_rows(inputs, first, name)
                found.setdefault(name, OutputComparison()).add(first, second, counted, kind=kind)
    distances = [comparison.record(name) for name, comparison in found.items() if comparison.rows]
    if not distances:
        raise ValueError("the graph gives no floating-point output on the calibration rows")
    return max(distances, key=lambda distance: distance.value)


@functools.cache
def products_saturate() -> bool:
    """Whether sums of u8 · s8 products are wrong in onnxruntime on this processor, tried on one matrix.

    x86 processors with AVX2 and without VNNI add two products in 16 bits. These hold up to 32,767; a sum may be 64,770.
    """
    onnx, runtime = require("onnx", "onnx"), require("onnxruntime", "onnx")
    helper, kinds = onnx.helper, onnx.TensorProto
    weights = onnx.numpy_helper.from_array(np.full((64, 4), 127, np.int8), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])], "product",
        [helper.make_tensor_value_info("x", kinds.UINT8, [2, 64])],
        [helper.make_tensor_value_info("y", kinds.INT32, [2, 4])], [weights],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (product,) = session.run(None, {"x": np.full((2, 64), 255, np.uint8)})
    return bool((product != 255 * 127 * 64).any())


def _quantize(
    quantization: Any, path: str | os.PathLike, model: Any, file: Path, batches: list[dict[str, np.ndarray]],
    operations: str, reduce_range: bool,
) -> int:  # fmt: skip
    """Write the int8 file of `model`, which `path` holds.

    Returns the number of operations that stay in float because of large numbers.
    """
    prepared, raw = file.with_name("prepared.onnx"), file.with_name("quantized.onnx")
    onnx, source, chosen = require("onnx", "onnx"), path, QUANTIZED_OPERATIONS[operations]
    left = iter(batches)

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(left, None)

    try:
        opset = max(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
        if opset < _SCALE_A_CHANNEL:
            onnx.save(onnx.version_converter.convert_version(model, _SCALE_A_CHANNEL), os.fspath(raw))
            source = raw
        with silence_python():  # of advice that the quantizer logs on the root logger
            # Symbolic shapes need one more package and stop at operations of transformers; ONNX's shapes suffice.
            require("onnxruntime.quantization.shape_inference", "onnx").quant_pre_process(
                os.fspath(source), os.fspath(prepared), skip_symbolic_shape=True
            )
            large = _large_number_operations(prepared, batches)
            graph = read_onnx(prepared).graph
            outputs = {value.name for value in graph.output}  # an output that is joined keeps a scale for each part
            joined = [node.name for node in graph.node if node.op_type == "Concat" and node.output[0] in outputs]
            quantization.quantize_static(
                os.fspath(prepared),
                os.fspath(raw),
                Reader(),
                quant_format=quantization.QuantFormat.QDQ,
                op_types_to_quantize=None if chosen is None else list(chosen),
                nodes_to_exclude=[*large, *joined],
                per_channel=True,
                reduce_range=reduce_range,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                calibrate_method=quantization.CalibrationMethod.MinMax,
                extra_options={} if chosen is None else {"OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]},
            )
    except Exception as error:  # the quantizer has no error class of its own
        raise RuntimeError(f"onnxruntime cannot quantize {path}: {type(error).__name__}: {error}") from error
    proto = read_onnx(raw)
    strip_metadata(proto)
    proto.doc_string = model.doc_string
    proto.metadata_props.extend(model.metadata_props)  # runtimes read the names of classes there
    onnx.save(proto, os.fspath(file))
    return len(large)


def _multiplies_activations(graph: Any) -> bool:
    """Whether the graph multiplies two matrices that both depend on its inputs' values, as attention does."""
    depends = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        found = [name in depends for name in node.input]
        if node.op_type == "Attention" or (node.op_type in ("MatMul", "Gemm", "Einsum") and sum(found[:2]) == 2):
            return True
        if any(found) and node.op_type not in ("Shape", "Size"):
            depends |= set(node.output)
    return False


def _large_number_operations(path: Path, batches: list[dict[str, np.ndarray]]) -> list[str]:
    """The names of the nodes that compute on large numbers, up to a softmax. Unnamed nodes get a name.

    Constants of the graph and values of inputs are large from `LARGE` on.
    """
    onnx = require("onnx", "onnx")
    model = read_onnx(path)
    graph, large = model.graph, {name for batch in batches for name, rows in batch.items() if _is_large(rows)}
    large |= {tensor.name for tensor in graph.initializer if _is_large(onnx.numpy_helper.to_array(tensor))}
    found = []
    for number, node in enumerate(graph.node):  # the nodes of a graph are in topological order
        node.name = node.name or f"{node.op_type}_{number}_unnamed"
        constants = [onnx.numpy_helper.to_array(a.t) for a in node.attribute if a.name == "value" and a.HasField("t")]
        if any(_is_large(constant) for constant in constants):
            large |= set(node.output)
        numbers = node.input[1:] if node.op_type == "Where" else node.input  # not the condition
        if large.isdisjoint(numbers) or node.op_type in _NOT_LARGE_BEHIND:
            continue
        found.append(node.name)
        if node.op_type not in _ENDS:
            large |= set(node.output)
    onnx.save(model, os.fspath(path))
    return found


def _is_large(values: np.ndarray) -> bool:
    return values.dtype.kind == "f" and bool((np.abs(values) >= LARGE).any())
