"""int8 files against a layer quantized by hand, and graphs whose nodes can be counted on paper."""

import sys
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from hf_lgelu import export_onnx, quantize_onnx
from hf_lgelu.export.onnx_run import OnnxModel
from hf_lgelu.export.quantize import products_saturate

GENERATOR = np.random.default_rng(0)
WEIGHTS = [GENERATOR.normal(size=(6, 8)), GENERATOR.normal(size=(8, 4))]
WEIGHTS[0][:, 1] *= 100  # channels of very different size: one scale for all would lose the others
WEIGHTS[1] *= [1, 100, 0.1, 10]
INPUTS = GENERATOR.uniform(-1, 3, size=(64, 6)).astype(np.float32)
INPUTS[-1, -1] = 3.0  # the largest is in the last of the calibration's batches


def save_graph(path, nodes, inputs, output, constants=()):
    """The path, with the graph of (operation, inputs, output, attributes or nothing), {name: shape}, {name: array}."""
    made = [helper.make_node(kind, given, [out], **dict(*options)) for kind, given, out, *options in nodes]
    ends = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in e.items()] for e in (inputs, output)]
    arrays = [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in dict(constants).items()]
    graph = helper.make_graph(made, "g", *ends, arrays)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def write_network(path, activation, layers=2):
    nodes = [("Gemm", ["x", "w0"], "h"), (activation, ["h"], "a"), ("Gemm", ["a", "w1"], "logits")]
    nodes = nodes if layers == 2 else [("Gemm", ["x", "w0"], "logits")]
    output = {"logits": ["batch", (8, 4)[layers - 1]]}
    return save_graph(path, nodes, {"x": ["batch", 6]}, output, zip(("w0", "w1"), WEIGHTS[:layers], strict=False))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{activation: (float file, int8 file, report)}."""
    folder = tmp_path_factory.mktemp("int8")
    made = {}
    for activation in ("Relu", "Gelu"):
        path, out = write_network(folder / f"{activation}.onnx", activation), folder / f"{activation}-int8.onnx"
        made[activation] = path, out, quantize_onnx(path, out, [{"x": INPUTS[:40]}, {"x": INPUTS[40:], "y": INPUTS}])
    return made


@pytest.mark.parametrize("opset", [11, 12])
def test_a_file_of_an_older_opset_keeps_its_metadata_in_int8(tmp_path, opset):
    model = onnx.load(write_network(tmp_path / "old.onnx", "Relu"))
    model.opset_import[0].version = opset
    helper.set_model_props(model, {"classes": "cat,dog"})
    onnx.save(model, tmp_path / "old.onnx")
    report = quantize_onnx(tmp_path / "old.onnx", tmp_path / "int8.onnx", [{"x": INPUTS}])
    assert report.change.relative_error < 0.01
    int8 = onnx.load(tmp_path / "int8.onnx")
    assert {entry.key: entry.value for entry in int8.metadata_props} == {"classes": "cat,dog"}
    assert onnx.load(tmp_path / "old.onnx").opset_import[0].version == opset  # the float file stays


def unsigned(values):
    """(integers, scale, zero point) of u8 quantization by the values' range, which always holds 0."""
    low, high = min(0.0, values.min()), max(0.0, values.max())
    scale = (high - low) / 255
    zero = np.rint(-low / scale)
    return np.clip(np.rint(values / scale) + zero, 0, 255), scale, zero


LARGEST = 64 if products_saturate() else 127  # integer of a weight on this processor


def linear_in_integers(values, weights):
    """What one layer gives when inputs are u8 and weights signed, symmetric, with a scale a column."""
    integers, scale, zero = unsigned(values.astype(np.float64))
    weight_scale = np.abs(weights).max(0) / LARGEST
    product = (integers - zero) @ np.rint(weights / weight_scale)
    return product * scale * weight_scale


def test_one_layer_is_what_integers_by_hand_give(tmp_path):
    path = write_network(tmp_path / "one.onnx", "Relu", layers=1)
    quantize_onnx(path, tmp_path / "int8.onnx", [{"x": INPUTS}])
    (found,) = OnnxModel(tmp_path / "int8.onnx")({"x": INPUTS})
    by_hand = linear_in_integers(INPUTS, WEIGHTS[0])
    exact = INPUTS.astype(np.float64) @ WEIGHTS[0]
    step = (exact.max() - exact.min()) / 255  # of the output, which is u8 as well
    assert np.abs(found - by_hand).max() <= 0.51 * step
    assert np.abs(found / step - np.rint(found / step)).max() < 1e-3  # a multiple of the step
    assert not np.allclose(found, exact, atol=0.1 * step)


def test_weights_of_seven_bits_are_right_on_every_processor(tmp_path):
    """Two products of 255 and 64 are less than the 32,767 at which older x86 processors saturate."""
    path = write_network(tmp_path / "float.onnx", "Relu", layers=1)
    report = quantize_onnx(path, tmp_path / "int8.onnx", [{"x": INPUTS}], reduce_range=True)
    assert report.weight_bits == 7
    assert report.change.relative_error < 0.0025
    if products_saturate():
        with pytest.raises(RuntimeError, match="relative error"):
            quantize_onnx(path, tmp_path / "eight.onnx", [{"x": INPUTS}], reduce_range=False, max_relative_error=0.0025)


def test_weights_have_a_scale_for_each_channel(files):
    weights = {c.name: numpy_helper.to_array(c) for c in onnx.load(files["Relu"][1]).graph.initializer}
    scales = [np.abs(weight).max(0) / LARGEST for weight in WEIGHTS]
    np.testing.assert_allclose(weights["w0_scale"], scales[0], rtol=1e-5)
    np.testing.assert_array_equal(weights["w1_quantized"], np.rint(WEIGHTS[1] / scales[1]))
    assert weights["w0_quantized"].dtype == np.int8
    assert weights["x_zero_point"].dtype == np.uint8
    np.testing.assert_allclose(weights["x_scale"], (INPUTS.max() - INPUTS.min()) / 255, rtol=1e-5)  # of both batches


def counted(path, tmp_path):
    """{operation: nodes} of the graph that onnxruntime makes of a file and runs."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)


def test_relu_vanishes_into_integers_and_gelu_does_not(files, tmp_path):
    assert counted(files["Relu"][1], tmp_path) == {"DequantizeLinear": 1, "QGemm": 2, "QuantizeLinear": 1}
    assert counted(files["Gelu"][1], tmp_path) == {"DequantizeLinear": 2, "Gelu": 1, "QGemm": 2, "QuantizeLinear": 2}
    path, out, gelu = files["Gelu"]
    assert gelu.calibration_rows == 64
    assert str(gelu).splitlines() == [
        f"{out}: int8, {out.stat().st_size:,} bytes (float32: {path.stat().st_size:,}), calibrated on 64 rows, "
        "operations 'all'" + ", weights of 7 bits" * (gelu.weight_bits == 7),
        "  on these rows, against float32: relative error (share of squares) "
        f"{gelu.change.relative_error:.3g}, {gelu.change}",
    ]


def test_of_layers_alone_only_the_inputs_are_rounded(tmp_path):
    path, out = write_network(tmp_path / "two.onnx", "Relu"), tmp_path / "int8.onnx"
    quantize_onnx(path, out, [{"x": INPUTS}], operations="layers")
    (found,) = OnnxModel(out)({"x": INPUTS})
    exact_hidden = np.maximum(INPUTS.astype(np.float64) @ WEIGHTS[0], 0)
    step, hidden = exact_hidden.max() / 255, np.maximum(linear_in_integers(INPUTS, WEIGHTS[0]), 0)
    rounded = np.clip(np.rint(hidden / step), 0, 255) * step
    weight_scale = np.abs(WEIGHTS[1]).max(0) / LARGEST
    by_hand = rounded @ (np.rint(WEIGHTS[1] / weight_scale) * weight_scale)
    # A value half way between two steps may fall to either side: as a hidden value it moves an output by a step of it.
    assert np.abs(found - by_hand).max() <= 1e-4 * np.abs(by_hand).max() + step * np.abs(WEIGHTS[1]).max()
    assert np.median(np.abs(found - by_hand)) <= 1e-5 * np.abs(by_hand).max()
    assert counted(out, tmp_path)["QGemm"] == 2


@pytest.mark.parametrize("activation", ["Relu", "Gelu"])
def test_the_report_says_how_far_int8_is_from_float(files, activation):
    report = files[activation][2]
    wanted, found = (OnnxModel(path)({"x": INPUTS})[0].astype(np.float64) for path in files[activation][:2])
    unexplained = np.square(found - wanted).sum() / np.square(wanted - wanted.mean(0)).sum()
    assert report.change.relative_error == pytest.approx(unexplained, rel=1e-6)
    assert report.change.largest_change == pytest.approx(np.abs(found - wanted).max())
    assert report.change.largest_output == pytest.approx(np.abs(wanted).max())
    assert report.change.rows == 64
    assert 0 < report.change.relative_error < 0.01
    assert report.large_number_operations == 0


@pytest.mark.parametrize("broken", [0, 1])
def test_nan_in_any_output_is_never_near_enough(tmp_path, broken):
    """Of negative numbers there is no logarithm."""
    nodes = [
        ("Gemm", ["x", "w"], "a"), ("Abs", ["x"], "p"), ("Neg", ["p"], "n"), ("Sub", ["n", "one"], "s"),
        ("Log", ["s"], "b"),
    ]  # fmt: skip
    ends = {"x": ["batch", 6]}, {name: ["batch", None] for name in ("ba", "ab")[broken]}
    path = save_graph(tmp_path / "a.onnx", nodes, *ends, {"w": WEIGHTS[0], "one": 1})
    with pytest.raises(RuntimeError, match="relative error nan"):
        quantize_onnx(path, tmp_path / "int8.onnx", INPUTS, operations="layers", max_relative_error=np.inf)


def test_a_file_too_far_from_float_is_not_kept(files, tmp_path):
    path, _, report = files["Relu"]
    out = tmp_path / "int8.onnx"
    with pytest.raises(RuntimeError, match=r"relative error.*operations='layers'"):
        quantize_onnx(path, out, INPUTS, max_relative_error=report.change.relative_error / 2)
    with pytest.raises(RuntimeError, match="more rows"):  # "layers" is what was given
        quantize_onnx(path, out, INPUTS, operations="layers", max_relative_error=1e-9)
    assert list(tmp_path.iterdir()) == []


def attention(path, mask):
    """softmax(x·W·xᵀ + mask)·x: the mask as an input "m" of 0 and 1 that becomes −3.4e38, or as given."""
    before = {
        "product": [("Sub", ["one", "m"], "off"), ("Mul", ["off", "far"], "mask")],
        "where": [("Equal", ["m", "zero"], "off"), ("Where", ["off", "far", "zero"], "mask")],
        "given": [("Identity", ["m"], "mask")],
        "none": [("Mul", ["m", "zero"], "mask")],
    }[mask]
    steps = [
        ("MatMul", ["x", "w"], "q"), ("Transpose", ["x"], "k", {"perm": [0, 2, 1]}), ("MatMul", ["q", "k"], "scores"),
        *before, ("Add", ["scores", "mask"], "masked"), ("Softmax", ["masked"], "probabilities"),
        ("MatMul", ["probabilities", "x"], "context"),
    ]  # fmt: skip
    constants = {"far": -3.4028235e38, "zero": 0, "one": 1, "w": GENERATOR.normal(size=(6, 6))}
    ends = {"x": ["batch", 5, 6], "m": ["batch", 1, 5]}, {"context": ["batch", 5, 6]}
    save_graph(path, steps, *ends, constants)


@pytest.mark.parametrize(("mask", "left"), [("product", 3), ("where", 3), ("given", 2), ("none", 0)])
def test_masks_and_the_softmax_behind_them_stay_in_float(tmp_path, mask, left):
    attention(tmp_path / "a.onnx", mask)
    x = GENERATOR.normal(size=(32, 5, 6)).astype(np.float32)
    seen = (np.arange(5) < GENERATOR.integers(1, 6, size=(32, 1))).astype(np.float32)[:, None]
    m = (1 - seen) * -1e9 if mask == "given" else seen
    rows = {"x": x, "m": m.astype(np.float32)}
    report = quantize_onnx(tmp_path / "a.onnx", tmp_path / "int8.onnx", rows, operations="all")
    assert report.large_number_operations == left
    assert report.change.relative_error < 0.01
    operations = counted(tmp_path / "int8.onnx", tmp_path)
    assert operations["Softmax"] == (1 if left else 0)
    assert operations["QLinearMatMul"] + operations["MatMulIntegerToFloat"] == 3


def test_int8_is_by_default_what_the_graph_bears(files, tmp_path):
    """Only products of activations with activations ask for "layers": a softmax at the end of a classifier does not."""
    assert files["Gelu"][2].operations == "all"
    attention(tmp_path / "attention.onnx", "none")
    rows = {"x": GENERATOR.normal(size=(8, 5, 6)), "m": np.ones((8, 1, 5))}
    rows = {name: array.astype(np.float32) for name, array in rows.items()}
    assert quantize_onnx(tmp_path / "attention.onnx", tmp_path / "a.onnx", rows).operations == "layers"
    nodes = [
        ("Transpose", ["w"], "t"), ("MatMul", ["x", "t"], "h"), ("MatMul", ["h", "w"], "k"), ("Softmax", ["k"], "p"),
        ("Shape", ["x"], "shape"), ("Cast", ["shape"], "sizes", {"to": 1}), ("MatMul", ["sizes", "v"], "c"),
        ("Add", ["p", "c"], "y"),
    ]  # fmt: skip
    constants = {"w": WEIGHTS[0].T, "v": np.zeros((2, 1))}
    save_graph(tmp_path / "plain.onnx", nodes, {"x": ["batch", 6]}, {"y": ["batch", 6]}, constants)
    assert quantize_onnx(tmp_path / "plain.onnx", tmp_path / "b.onnx", INPUTS, max_relative_error=9).operations == "all"


def test_raw_features_of_different_sizes_stay_in_float_up_to_the_first_layer(tmp_path):
    """Ages and incomes in one range of 256 values: of the ages nothing would be left. No mask is anywhere."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.tensor([40.0, 5e4]))
            self.register_buffer("std", torch.tensor([10.0, 2e4]))
            self.net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x):
            return self.net(x * (1 / self.std) - self.mean / self.std)

    torch.manual_seed(0)
    network = Scaled().eval()
    rows = torch.randn(64, 2) * network.std + network.mean
    export_onnx(network, tmp_path / "float.onnx", rows[:4])
    report = quantize_onnx(tmp_path / "float.onnx", tmp_path / "int8.onnx", rows)
    assert report.change.relative_error < 0.0025
    assert report.large_number_operations == 2
    assert counted(tmp_path / "int8.onnx", tmp_path)["QGemm"] == 2
    assert "  2 operations on numbers of 10,000 and more, such as attention masks, stay in float" in str(report)


def test_parts_that_are_joined_into_an_output_keep_a_scale_each(tmp_path):
    """Boxes in pixels and scores on one scale would leave no score: its step is larger than a score."""
    nodes = [("Gemm", ["x", "boxes"], "b"), ("Gemm", ["x", "scores"], "s"), ("Concat", ["b", "s"], "maps", {"axis": 1})]
    weights = {"boxes": WEIGHTS[0] * 100, "scores": WEIGHTS[0][:, :3] / [1, 100, 1]}
    path = save_graph(tmp_path / "maps.onnx", nodes, {"x": ["batch", 6]}, {"maps": ["batch", 11]}, weights)
    report = quantize_onnx(path, tmp_path / "int8.onnx", INPUTS, operations="all")
    exact = INPUTS.astype(np.float64) @ weights["scores"]
    (found,) = OnnxModel(tmp_path / "int8.onnx")({"x": INPUTS})
    assert abs(found[:, 8:] - exact).max() < 4 * (exact.max() - exact.min()) / 255
    assert report.large_number_operations == 0


def test_data_are_what_export_takes(files, tmp_path):
    path = files["Relu"][0]
    expected = quantize_onnx(path, tmp_path / "a.onnx", [{"x": INPUTS}]).change
    for data in (INPUTS, torch.from_numpy(INPUTS), [INPUTS], {"x": INPUTS, "labels": None}, iter([(INPUTS,)])):
        assert quantize_onnx(path, tmp_path / "a.onnx", data, overwrite=True).change == expected
    attention(tmp_path / "two.onnx", "where")
    x, m = GENERATOR.normal(size=(4, 5, 6)).astype(np.float32), np.ones((4, 1, 5), np.float32)
    expected = quantize_onnx(tmp_path / "two.onnx", tmp_path / "b.onnx", {"x": x, "m": m}).change
    assert (
        quantize_onnx(tmp_path / "two.onnx", tmp_path / "b.onnx", [{"m": m, "x": x}], overwrite=True).change == expected
    )
    with pytest.raises(ValueError, match=r"x, m.* m"):  # a pair is (inputs, labels)
        quantize_onnx(tmp_path / "two.onnx", tmp_path / "b.onnx", [(x, m)], overwrite=True)


BAD = INPUTS.copy()
BAD[3, 2] = np.nan


@pytest.mark.parametrize(
    ("data", "options", "error", "said"),
    [
        (INPUTS, {"operations": "some"}, ValueError, "'some'.*all, layers"),
        ([], {}, ValueError, "no inputs"),
        ([{"x": INPUTS[:0]}], {}, ValueError, "no inputs"),
        ([{"y": INPUTS}], {}, ValueError, "lacks x"),
        ([{"x": None}], {}, ValueError, "no tensor"),
        ([{"x": BAD}], {}, ValueError, "x holds NaN"),
        ([{"x": INPUTS.astype(np.float64)}], {}, RuntimeError, "onnxruntime cannot quantize|refuses the inputs"),
        ([{"x": INPUTS[:, :3]}], {}, RuntimeError, "onnxruntime cannot quantize|refuses the inputs"),
        ("rows.csv", {}, TypeError, "str cannot be read"),
        ({"x": np.array(["a"])}, {}, TypeError, "x"),
    ],
)
def test_bad_calls_are_refused_and_leave_nothing(files, tmp_path, data, options, error, said):
    with pytest.raises(error, match=said):
        quantize_onnx(files["Relu"][0], tmp_path / "a.onnx", data, **options)
    assert list(tmp_path.iterdir()) == []


def test_files_that_will_not_do_are_refused_as_they_were(files, tmp_path, monkeypatch):
    path, there, _ = files["Relu"]
    float_file = path.read_bytes()
    for call, error, said in (
        (lambda: quantize_onnx(path, there, INPUTS), FileExistsError, "`overwrite`"),
        (lambda: quantize_onnx(tmp_path / "none.onnx", tmp_path / "a", INPUTS), FileNotFoundError, "No such file"),
        (lambda: quantize_onnx(there, tmp_path / "a", INPUTS), ValueError, "is quantized already"),
        (lambda: quantize_onnx(path, path.parent / "." / path.name, INPUTS, overwrite=True), ValueError, "float file"),
    ):
        with pytest.raises(error, match=said):
            call()
    monkeypatch.setitem(sys.modules, "onnxruntime.quantization", None)
    with pytest.raises(ImportError, match=r"hf-lgelu\[onnx\]"):
        quantize_onnx(path, tmp_path / "a", INPUTS)
    assert path.read_bytes() == float_file
    assert not (tmp_path / "a").exists()
