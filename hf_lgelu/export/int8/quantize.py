"""Static int8 of an ONNX file by onnxruntime, and how far it is from float32.

Activations are unsigned (u8), weights signed (s8) with a scale for each output channel, both by the range that
calibration sees (MinMax). With unsigned activations a ReLU costs nothing: it is where the quantizer clips. A smooth
activation is computed in float between a dequantization and a quantization.

Of "layers" alone, what a matrix product gives stays in float: nothing behind it reads integers. One range for the sums
and normalizations of a transformer costs more than all else, so that "layers" is the default where activations are
multiplied with activations. A convolution computes in integers only where its output is one.

A range holds 256 values. An attention mask adds numbers of the size of −3.4e38 to scores of the size of 10: in one
range with it all scores are the same. So are ages in one range with incomes, where a network scales raw features
itself. What such numbers flow through, up to and with the softmax behind them, stays in float.
"""

import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_lgelu.activation.hardness import require_known
from hf_lgelu.comparing.output_comparison import OutputChange, OutputComparison
from hf_lgelu.environment import require
from hf_lgelu.export.onnx.onnx_run import (
    OnnxModel,
    as_arrays,
    read_onnx,
    runtime_errors,
    silence_python,
    strip_metadata,
    without_padding,
)
from hf_lgelu.files import whole_file
from hf_lgelu.networks.batches import nothing_given, read_batches
from hf_lgelu.networks.masks import counted_rows
from hf_lgelu.networks.outputs import are_embeddings, classes_last

QUANTIZED_OPERATIONS: dict[str, tuple[str, ...] | None] = {"all": None, "layers": ("Conv", "Gemm", "MatMul")}
"""Which operations get integer inputs and outputs: all that onnxruntime can, or those with most of the arithmetic."""

MAX_RELATIVE_ERROR = 0.25
"""How far an int8 file may be from its float twin (`Int8Report.relative_error`). Networks that still do their task stay
below 0.04; at 1 the outputs say no more of an input than their mean does."""

LARGE = 1e4  # no trained scale is as large; masks are −1e4 (for float16), −1e9 or the lowest float32

_ENDS = frozenset({"Softmax", "LogSoftmax"})
# Sums of products have a range of their own; and what is compared is no number any more.
_NOT_LARGE_BEHIND = frozenset(
    {
        *("MatMul", "Gemm", "Conv", "ConvTranspose", "LayerNormalization", "BatchNormalization", "Shape"),
        *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not", "And", "Or", "IsNaN", "IsInf"),
        *("Sin", "Cos", "Tanh", "Sigmoid", "Erf", "ArgMax", "Pow", "Reciprocal"),
    }
)


@dataclass(frozen=True)
class Int8Report:
    """What `quantize_onnx` wrote, and how far it is from the float file on the calibration rows.

    `operations` is the key of QUANTIZED_OPERATIONS that was given, or chosen by the graph. `change` compares the first
    outputs. `relative_error` is the share of squares that a conversion's report names too, the largest of all outputs;
    1 is that of a file that gives the mean for every row. Padding does not count. `large_number_operations` are the
    nodes that were left in float because numbers of at least 1e4 flow through them, as attention masks do.
    `weight_bits` is 8, or 7 for processors whose products saturate.
    """

    path: Path
    operations: str
    file_bytes: int
    float_file_bytes: int
    calibration_rows: int
    change: OutputChange
    relative_error: float
    large_number_operations: int
    weight_bits: int

    def __str__(self) -> str:
        left = self.large_number_operations
        large = f"  {left} operations on numbers of {LARGE:,.0f} and more, as in attention masks, stay in float"
        seven = ", weights of 7 bits" if self.weight_bits == 7 else ""
        lines = [
            f"{self.path}: int8, {self.file_bytes:,} bytes (float32: {self.float_file_bytes:,}), calibrated on "
            f"{self.calibration_rows:,} rows, operations {self.operations!r}{seven}",
            f"  on these rows, against float32: relative error (share of squares) {self.relative_error:.3g}, "
            f"{self.change}",
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

    Masks that are added to attention scores, and the softmax behind them, stay in float; so does what joins parts into
    an output (a detector's boxes and scores), and other numbers of at least 1e4, such as raw features, as far as the
    next layer. The int8 file is compared with the float one on the
    calibration rows before it is put in place.

    Args:
        path: of the float file, e.g. of `export_onnx`.
        output_path: the file to be.
        data: training rows from which ranges are taken, as `convert_to_relu` takes them; several inputs by name. What
            the graph does not have is left out. Give padded rows where rows will be padded.
        data_collator: makes a batch of a list of items, as in `ConversionConfig`: of a SentenceTransformer
            `model.preprocess`, with a list of texts as data.
        operations: a key of QUANTIZED_OPERATIONS: "all", or "layers" for Conv, Gemm and MatMul alone, of which the
            last two take integers and give float. By default "layers" where the graph multiplies activations with
            activations, as attention does, else "all".
        reduce_range: give weights 7 bits, not 8. By default where `products_saturate` on this processor. A file with 8
            bits is wrong on such processors; make files for them there, or with True.
        max_relative_error: the largest `Int8Report.relative_error` with which a file is kept.
        overwrite: replace a file that is there.

    Raises:
        ImportError: onnx or onnxruntime is missing; the message names the extra [onnx].
        ValueError: no rows, or a batch that lacks an input or holds NaN or infinity; `path` holds no ONNX graph, or one
            that is int8 already.
        RuntimeError: the int8 file is further from the float one than `max_relative_error`, or onnxruntime cannot
            quantize the graph; nothing is left behind.
        FileExistsError: there is a file at `output_path`, and `overwrite` is False.

    Example:
        >>> import tempfile, torch
        >>> from hf_lgelu import export_onnx, quantize_onnx
        >>> model, rows = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()), torch.randn(64, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = export_onnx(model, f"{folder}/float.onnx", rows)
        ...     report = quantize_onnx(f"{folder}/float.onnx", f"{folder}/int8.onnx", rows)
        >>> report.operations, report.relative_error < 0.05
        ('all', True)
    """
    if operations is not None:
        require_known("operations", operations, QUANTIZED_OPERATIONS)
    if Path(output_path).resolve() == Path(path).resolve():
        raise ValueError(f"{path} is the float file itself; give another output_path, so that it is not lost")
    require("onnx", "onnx")
    quantization = require("onnxruntime.quantization", "onnx")
    float_graph, float_model = read_onnx(path), OnnxModel(path)
    if any(node.op_type == "QuantizeLinear" for node in float_graph.graph.node):
        raise ValueError(f"{path} is quantized already; give the float32 file")
    operations = operations or ("layers" if _multiplies_activations(float_graph.graph) else "all")
    batches = _read_arrays(data, float_model.input_names, data_collator)
    with whole_file(output_path, overwrite=overwrite) as file:
        reduce_range = products_saturate() if reduce_range is None else reduce_range
        large = _quantize(quantization, path, file, batches, operations, reduce_range)
        change, error = _compare(float_model, OnnxModel(file), batches)
        if not error <= max_relative_error:
            fewer = "" if operations == "layers" else "operations='layers', which leaves more in float, or "
            raise RuntimeError(
                f"the int8 file computes something else: relative error {error:.3g} on the calibration rows, where "
                f"{max_relative_error:g} is allowed ({change}). It is not kept. Give {fewer}more rows like those that "
                "the network will see; or go on with max_relative_error"
            )
        size = file.stat().st_size
    return Int8Report(
        path=Path(output_path),
        operations=operations,
        file_bytes=size,
        float_file_bytes=Path(path).stat().st_size,
        calibration_rows=sum(len(next(iter(batch.values()))) for batch in batches),
        change=change,
        relative_error=error,
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


def _compare(model: OnnxModel, other: OnnxModel, batches: list[dict[str, np.ndarray]]) -> tuple[OutputChange, float]:
    """The change of the first output of numbers, and the largest relative error of all outputs."""
    found: dict[str, OutputComparison] = {}
    for batch in batches:
        inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
        for name, array, other_array in zip(model.output_names, model(batch), other(batch), strict=True):
            if array.dtype.kind == "f" and array.size:
                pair = [torch.from_numpy(values) for values in (array, other_array)]
                are_vectors = are_embeddings(model, name, pair[0])
                counted = counted_rows(inputs, pair[0], name) if are_vectors else None
                if counted is None:
                    pair = [classes_last(without_padding(values, inputs, name)) for values in pair]
                found.setdefault(name, OutputComparison()).add(pair[0], pair[1], counted, are_embeddings=are_vectors)
    first = next(iter(found.values()), None)
    if first is None or not first.rows:
        raise ValueError("the graph gives no floating-point output on the calibration rows")
    # torch's maximum, unlike Python's, is NaN where one of them is.
    errors = torch.tensor([output.relative_error for output in found.values()], dtype=torch.float64)
    return first.change, errors.max().item()


def operators_by_precision(path: str | os.PathLike) -> dict[str, dict[str, int]]:
    """{"int8" and "float32": {operation: how many}} of an int8 file, the most frequent first.

    In int8 is what gets its numbers from dequantizations, if onnxruntime computes the operation on integers, which it
    does not of a GELU. Constants, quantizations, dequantizations and what computes on shapes are left out.
    """
    onnx, registry = require("onnx", "onnx"), require("onnxruntime.quantization.registry", "onnx")
    graph = onnx.shape_inference.infer_shapes(read_onnx(path)).graph
    values = itertools.chain(graph.input, graph.output, graph.value_info)
    kinds = {value.name: value.type.tensor_type.elem_type for value in values}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    # What has no known kind is taken for numbers, so that nothing is called int8 that may not be.
    others = {name for name, kind in kinds.items() if kind not in (0, onnx.TensorProto.FLOAT)}
    constants = {tensor.name for tensor in graph.initializer}
    dequantized = {name for node in graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    found: dict[str, Counter[str]] = {"int8": Counter(), "float32": Counter()}
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear", "Constant") or others.issuperset(node.output):
            continue
        numbers = {name for name in node.input if name} - others - constants
        is_int8 = numbers and numbers <= dequantized and node.op_type in registry.QLinearOpsRegistry
        found["int8" if is_int8 else "float32"][node.op_type] += 1
    return {precision: dict(counted.most_common()) for precision, counted in found.items()}


@functools.cache
def products_saturate() -> bool:
    """Whether sums of u8 · s8 products are wrong in onnxruntime on this processor, tried on one matrix.

    x86 processors with AVX2 and without VNNI add two products in 16 bits, which hold 32,767 of up to 64,770.
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
    quantization: Any, path: str | os.PathLike, file: Path, batches: list[dict[str, np.ndarray]], operations: str,
    reduce_range: bool,
) -> int:  # fmt: skip
    """Write the int8 file; returns how many operations stay in float because of large numbers."""
    prepared, raw = file.with_name("prepared.onnx"), file.with_name("quantized.onnx")
    chosen = QUANTIZED_OPERATIONS[operations]
    # It has no error class of its own, and looks operations and tensors up in dictionaries.
    known: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
    known += runtime_errors()
    left = iter(batches)

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(left, None)

    try:
        with silence_python():  # the quantizer gives advice on the root logger
            # Its symbolic shapes need one more package and stop at operations of transformers; ONNX's own suffice.
            require("onnxruntime.quantization.shape_inference", "onnx").quant_pre_process(
                os.fspath(path), os.fspath(prepared), skip_symbolic_shape=True
            )
            large = _large_number_operations(prepared, batches)
            graph = read_onnx(prepared).graph
            outputs = {value.name for value in graph.output}  # what is joined there keeps a scale for each part
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
    except known as error:
        raise RuntimeError(f"onnxruntime cannot quantize {path}: {type(error).__name__}: {error}") from error
    onnx = require("onnx", "onnx")
    proto = read_onnx(raw)
    strip_metadata(proto)
    onnx.save(proto, os.fspath(file))
    return len(large)


def _multiplies_activations(graph: Any) -> bool:
    """Whether the graph multiplies matrices that both depend on the values of its inputs, as attention does."""
    depends = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        found = [name in depends for name in node.input]
        if node.op_type == "Attention" or (node.op_type in ("MatMul", "Gemm", "Einsum") and sum(found[:2]) == 2):
            return True
        if any(found) and node.op_type not in ("Shape", "Size"):
            depends |= set(node.output)
    return False


def _large_number_operations(path: Path, batches: list[dict[str, np.ndarray]]) -> list[str]:
    """The names of the nodes that large numbers flow through, up to a softmax; unnamed nodes get a name.

    Large is a constant of the graph, or an input's value, of at least `LARGE`.
    """
    onnx = require("onnx", "onnx")
    model = read_onnx(path)
    graph, large = model.graph, {name for batch in batches for name, rows in batch.items() if _is_large(rows)}
    large |= {tensor.name for tensor in graph.initializer if _is_large(onnx.numpy_helper.to_array(tensor))}
    found = []
    for number, node in enumerate(graph.node):  # a graph lists its nodes in an order in which they can run
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
