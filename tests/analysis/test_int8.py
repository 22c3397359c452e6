"""int8 files against a layer quantized by hand, and graphs whose nodes can be counted on paper."""

import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hf_lgelu.analysis.int8 import count_optimized, quantize_onnx
from hf_lgelu.export.onnx.onnx_run import OnnxModel, count_activations, strip_metadata

GENERATOR = np.random.default_rng(0)
WEIGHTS = [GENERATOR.normal(size=(6, 8)), GENERATOR.normal(size=(8, 4))]
WEIGHTS[0][:, 1] *= 100  # channels of very different size: one scale for all would lose the others
WEIGHTS[1] *= [1, 100, 0.1, 10]
INPUTS = GENERATOR.uniform(-1, 3, size=(64, 6)).astype(np.float32)
INPUTS[-1, -1] = 3.0  # the largest is in the last of the calibration's batches


def write_network(path, activation, layers=2):
    nodes, constants, name = [], [], "x"
    for i, weights in enumerate(WEIGHTS[:layers]):
        constants += [numpy_helper.from_array(weights.astype(np.float32), f"w{i}")]
        out = "logits" if i == layers - 1 else f"h{i}"
        nodes.append(helper.make_node("Gemm", [name, f"w{i}"], [out], name=f"gemm{i}"))
        name = out
        if i < layers - 1:
            nodes.append(helper.make_node(activation, [name], [f"a{i}"], name=f"act{i}"))
            name = f"a{i}"
    ends = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", w])
        for n, w in (("x", 6), ("logits", (8, 4)[layers - 1]))
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{activation: (float file, int8 file, report)}."""
    folder = tmp_path_factory.mktemp("int8")
    made = {}
    for activation in ("Relu", "Gelu"):
        path, out = write_network(folder / f"{activation}.onnx", activation), folder / f"{activation}-int8.onnx"
        made[activation] = path, out, quantize_onnx(path, out, [{"x": INPUTS[:40]}, {"x": INPUTS[40:], "y": INPUTS}])
    return made


def unsigned(values):
    """(integers, scale, zero point) of u8 quantization by the values' range, which always holds 0."""
    low, high = min(0.0, values.min()), max(0.0, values.max())
    scale = (high - low) / 255
    zero = np.rint(-low / scale)
    return np.clip(np.rint(values / scale) + zero, 0, 255), scale, zero


def linear_in_integers(values, weights):
    """What one layer gives when inputs are u8 and weights s8, symmetric, with a scale a column."""
    integers, scale, zero = unsigned(values.astype(np.float64))
    weight_scale = np.abs(weights).max(0) / 127
    product = (integers - zero) @ np.clip(np.rint(weights / weight_scale), -127, 127)
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


def test_weights_have_a_scale_for_each_channel(files):
    weights = {c.name: numpy_helper.to_array(c) for c in onnx.load(files["Relu"][1]).graph.initializer}
    np.testing.assert_allclose(weights["w0_scale"], np.abs(WEIGHTS[0]).max(0) / 127, rtol=1e-5)
    np.testing.assert_array_equal(weights["w1_quantized"], np.rint(WEIGHTS[1] / (np.abs(WEIGHTS[1]).max(0) / 127)))
    assert weights["w0_quantized"].dtype == np.int8
    assert weights["x_zero_point"].dtype == np.uint8
    np.testing.assert_allclose(weights["x_scale"], (INPUTS.max() - INPUTS.min()) / 255, rtol=1e-5)  # of both batches


def test_relu_vanishes_into_integers_and_gelu_does_not(files):
    relu, gelu = files["Relu"][2], files["Gelu"][2]
    assert relu.counts.operations == {"DequantizeLinear": 1, "QGemm": 2, "QuantizeLinear": 1}
    assert gelu.counts.operations == {"DequantizeLinear": 2, "Gelu": 1, "QGemm": 2, "QuantizeLinear": 2}
    assert (relu.activations, relu.float_activations, relu.vanished_activations) == (1, 0, 1)
    assert (gelu.activations, gelu.float_activations, gelu.vanished_activations) == (1, 1, 0)
    for report in (relu, gelu):
        assert (report.counts.integer_layers, report.calibration_rows) == (2, 64)
    assert (gelu.counts.quantize, gelu.counts.dequantize) == (2, 2)
    path, out, _ = files["Gelu"]
    assert str(gelu).splitlines() == [
        f"{out}: int8, {out.stat().st_size:,} bytes (float32: {path.stat().st_size:,}), calibrated on 64 rows",
        "  2 layers in integers, 2 steps from float to integers and 2 back",
        "  of 1 activations, 0 are part of an integer operation and 1 are computed in float",
    ]


def test_a_relu_fused_into_a_float_layer_counts_as_float(files):
    counts = count_optimized(files["Relu"][0])
    assert counts.operations == {"FusedGemm": 1, "Gemm": 1}
    assert (counts.float_activations, counts.integer_layers) == (1, 0)
    assert count_activations(files["Relu"][0]) == 1


@pytest.mark.parametrize("activation", ["Relu", "Gelu"])
def test_two_layers_stay_within_the_steps_of_their_scales(files, activation):
    (wanted,), (found,) = (OnnxModel(path)({"x": INPUTS}) for path in files[activation][:2])
    inputs, hidden = np.abs(INPUTS.astype(np.float64)), INPUTS.astype(np.float64) @ WEIGHTS[0]
    steps = [np.abs(weights).max(0) / 127 for weights in WEIGHTS]
    # Half a step each for inputs and weights; two of the layer's u8 output, before and after the activation.
    error = (INPUTS.max() - INPUTS.min()) / 255 * np.abs(WEIGHTS[0]).sum(0) / 2
    error = error + inputs.sum(1, keepdims=True) * steps[0] / 2 + 2 * (hidden.max() - hidden.min()) / 255
    # No slope of GELU is above 1.13.
    bound = 1.13 * error @ np.abs(WEIGHTS[1]) + np.abs(hidden).sum(1, keepdims=True) * steps[1] / 2
    assert (np.abs(found - wanted) <= bound + (wanted.max() - wanted.min()) / 255).all()
    assert not np.array_equal(found, wanted)


def test_layers_alone_are_quantized_if_asked(files, tmp_path):
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["h"], name="g"),
        helper.make_node("Add", ["h", "h"], ["logits"], name="a"),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", w]) for n, w in (("x", 6), ("logits", 8))]
    constant = numpy_helper.from_array(WEIGHTS[0].astype(np.float32), "w")
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [constant])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "f.onnx")
    found = {
        operations: quantize_onnx(tmp_path / "f.onnx", tmp_path / operations, [{"x": INPUTS}], operations=operations)
        for operations in ("all", "layers")
    }
    assert found["all"].counts.operations.get("QLinearAdd") == 1
    assert found["layers"].counts.operations.get("Add") == 1
    assert [report.counts.integer_layers for report in found.values()] == [1, 1]


def test_bad_calls_are_refused_and_leave_nothing(files, tmp_path, monkeypatch):
    path, there, _ = files["Relu"]
    out = tmp_path / "a.onnx"
    bad = INPUTS.copy()
    bad[3, 2] = np.nan
    cases = [
        ([{"x": INPUTS}], {"operations": "some"}, "operations must be one of all, layers, got 'some'"),
        ([], {}, "at least one batch"),
        ([{"y": INPUTS}], {}, "must hold x; it lacks x"),
        ([{"x": bad}], {}, "x holds NaN or infinity"),
    ]
    for batches, options, error in cases:
        with pytest.raises(ValueError, match=error):
            quantize_onnx(path, out, batches, **options)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        quantize_onnx(path, there, [{"x": INPUTS}])
    with pytest.raises(FileNotFoundError, match="is no file"):
        quantize_onnx(tmp_path / "none.onnx", out, [{"x": INPUTS}])
    with pytest.raises(TypeError, match="must be a mapping from x to rows, got ndarray"):
        quantize_onnx(path, out, INPUTS)
    float_file = path.read_bytes()
    with pytest.raises(ValueError, match="is the float file itself"):
        quantize_onnx(path, path.parent / "." / path.name, [{"x": INPUTS}], overwrite=True)
    assert path.read_bytes() == float_file
    monkeypatch.setitem(sys.modules, "onnxruntime.quantization", None)
    with pytest.raises(ImportError, match=r"hf-lgelu\[onnx\]"):
        quantize_onnx(path, out, [{"x": INPUTS}])
    assert list(tmp_path.iterdir()) == []
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "Gelu-int8.onnx", "Gelu.onnx", "Relu-int8.onnx", "Relu.onnx",
    ]  # fmt: skip


def test_metadata_is_removed_at_every_depth():
    inner = helper.make_graph([helper.make_node("Relu", ["a"], ["b"], doc_string="inner")], "inner", [], [])
    node = helper.make_node("If", ["c"], ["d"], then_branch=inner, else_branch=inner)
    helper.set_model_props(
        model := helper.make_model(helper.make_graph([node], "g", [], [], doc_string="g")), {"k": "v"}
    )
    node_entry = model.graph.node[0].metadata_props.add()
    node_entry.key, node_entry.value = "stack", "/home/me"
    strip_metadata(model)
    raw = model.SerializeToString()
    assert not any(word in raw for word in (b"inner\x32", b"/home/me", b"stack", b"\x12\x01v"))
    assert model.graph.node[0].attribute[0].g.node[0].doc_string == ""
    assert model.graph.node[0].attribute[0].g.node[0].op_type == "Relu"
