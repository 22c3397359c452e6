"""ONNX files as networks, converted and written back; onnxruntime is the oracle of every operator."""

import copy
import math
import pickle

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional as F

from hf_lgelu import OnnxNetwork, convert_to_relu, export_int8


def draw(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def save(path, nodes, inputs, constants=(), outputs=("y",), opset=17, **options):
    """A file of these nodes; `inputs` are {name: (shape, type)}, `constants` {name: array}."""
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(name, kind, shape) for name, (shape, kind) in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in dict(constants).items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="test", **{"ir_version": 9} | options)
    onnx.save(model, path)
    return path


def of(network, x):
    """The only output, which has no name where it has two axes."""
    output = network(x)
    return output if isinstance(output, torch.Tensor) else output["y" if "y" in output else "scores"]


def run(path, inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {name: np.asarray(value) for name, value in inputs.items()})


IMAGE, ROW = draw(4, 6, 8, 10), draw(4, 12)
I64 = np.int64
OPERATORS = {
    # name: (operator, x, other inputs, attributes[, opset])
    **{name: (name, np.abs(ROW) + 0.5, [], {}) for name in ("Sqrt", "Log", "Reciprocal", "Sigmoid", "Tanh", "Erf")},
    **{name: (name, ROW * 3, [], {}) for name in ("Neg", "Floor", "Round", "Sign", "Sin", "HardSigmoid", "HardSwish")},
    **{name: (name, ROW, [], {}) for name in ("Softplus", "Elu", "LeakyRelu", "Selu", "Celu", "Relu", "Exp", "Abs")},
    **{name: (name, ROW, [draw(1, 12)], {}) for name in ("Add", "Sub", "Mul", "Div", "Max", "Min", "PRelu")},
    "Mish": ("Mish", ROW, [], {}, 18),
    "Gelu, tanh": ("Gelu", ROW, [], {"approximate": "tanh"}, 20),
    "Pow": ("Pow", np.abs(ROW), [np.float32(3)], {}),
    "Clip": ("Clip", ROW, [np.float32(-0.5), np.float32(0.5)], {}),
    "Clip, one end, old": ("Clip", ROW, [], {"max": 0.25}, 10),
    "Softmax, old": ("Softmax", draw(4, 3, 5), [], {"axis": 1}, 11),
    "LogSoftmax": ("LogSoftmax", draw(4, 3, 5), [], {"axis": 1}),
    "Conv": ("Conv", IMAGE, [draw(4, 3, 3, 2), draw(4)], dict(strides=[2, 1], pads=[1, 0, 1, 0], group=2)),
    "Conv, uneven pads": ("Conv", IMAGE, [draw(4, 6, 3, 3)], dict(pads=[0, 1, 2, 0], dilations=[2, 1])),
    "Conv, same": ("Conv", IMAGE, [draw(4, 6, 3, 4)], dict(auto_pad="SAME_UPPER", strides=[2, 2])),
    "Conv, same lower": ("Conv", IMAGE, [draw(4, 6, 2, 2)], dict(auto_pad="SAME_LOWER")),
    "Conv 1d": ("Conv", draw(4, 6, 9), [draw(4, 6, 3)], {}),
    "ConvTranspose": (
        *("ConvTranspose", IMAGE, [draw(6, 2, 3, 3), draw(4)]),
        dict(strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 0], group=2),
    ),
    "Gemm": ("Gemm", ROW, [draw(5, 12), draw(5)], dict(transB=1, alpha=0.5, beta=2.0)),
    "Gemm, a matrix added": ("Gemm", draw(8, 4), [draw(8, 5), draw(4, 5)], dict(transA=1)),
    "MatMul": ("MatMul", draw(4, 3, 12), [draw(12, 5)], {}),
    "BatchNormalization": ("BatchNormalization", IMAGE, [draw(6), draw(6), draw(6), np.abs(draw(6)) + 1], {}),
    "LayerNormalization": ("LayerNormalization", ROW, [draw(12), draw(12)], {"epsilon": 1e-3}),
    "InstanceNormalization": ("InstanceNormalization", IMAGE, [draw(6), draw(6)], {}),
    "MaxPool": ("MaxPool", IMAGE, [], dict(kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 0], ceil_mode=1)),
    "MaxPool, same": ("MaxPool", IMAGE, [], dict(kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER")),
    "AveragePool": ("AveragePool", IMAGE, [], dict(kernel_shape=[3, 3], pads=[1, 1, 1, 1])),
    "AveragePool, with the pads": (
        *("AveragePool", IMAGE, []),
        dict(kernel_shape=[2, 2], pads=[0, 0, 1, 1], count_include_pad=1, strides=[2, 2]),
    ),
    "GlobalAveragePool": ("GlobalAveragePool", IMAGE, [], {}),
    "GlobalMaxPool": ("GlobalMaxPool", IMAGE, [], {}),
    "ReduceMean, old": ("ReduceMean", IMAGE, [], dict(axes=[2, -1], keepdims=0)),
    "ReduceSum": ("ReduceSum", IMAGE, [np.array([1], I64)], {}),
    "ReduceMax": ("ReduceMax", IMAGE, [], dict(axes=[1])),
    "Reshape": ("Reshape", IMAGE, [np.array([0, -1, 5], I64)], {}),
    "Flatten": ("Flatten", IMAGE, [], dict(axis=2)),
    "Flatten, all": ("Flatten", IMAGE, [], dict(axis=0)),
    "Transpose": ("Transpose", IMAGE, [], dict(perm=[0, 2, 3, 1])),
    "Squeeze": ("Squeeze", draw(4, 1, 3, 1), [np.array([1, -1], I64)], {}),
    "Squeeze, old": ("Squeeze", draw(4, 1, 3, 1), [], dict(axes=[3]), 11),
    "Unsqueeze": ("Unsqueeze", ROW, [np.array([1, -1], I64)], {}),
    "Concat": ("Concat", IMAGE, [draw(4, 2, 8, 10)], dict(axis=1)),
    "Slice": ("Slice", IMAGE, [*(np.array(each, I64) for each in ([1, 8], [99, -99], [1, 3], [2, -3]))], {}),
    "Slice, old": ("Slice", IMAGE, [], dict(starts=[1, -3], ends=[4, 2**31 - 1], axes=[2, 3]), 9),
    "Gather": ("Gather", IMAGE, [np.array([[0, -1], [2, 2]], I64)], dict(axis=2)),
    "Gather, one": ("Gather", IMAGE, [np.array(-2, I64)], dict(axis=1)),
    "GatherElements": ("GatherElements", ROW, [np.array([[0, -1]] * 4, I64)], dict(axis=1)),
    "GatherND": ("GatherND", IMAGE, [np.array([[0, 1], [3, -1]], I64)], {}),
    "GatherND, of each sample": (
        "GatherND",
        draw(4, 3, 5),
        [np.array([[[0]], [[2]], [[1]], [[0]]], I64)],
        dict(batch_dims=1),
    ),
    "GroupNormalization": ("GroupNormalization", IMAGE, [draw(6), draw(6)], dict(num_groups=3), 21),
    "Mod": ("Mod", ROW * 3, [np.float32(0.7)], dict(fmod=1)),
    "ReduceL2": ("ReduceL2", IMAGE, [], dict(axes=[1], keepdims=0)),
    "Sum": ("Sum", ROW, [draw(12), draw(4, 1)], {}),
    "Trilu": ("Trilu", draw(4, 5, 5), [np.array(1, I64)], dict(upper=0)),
    "Expand": ("Expand", draw(4, 1, 3), [np.array([2, 1], I64)], {}),
    "Tile": ("Tile", ROW, [np.array([1, 2], I64)], {}),
    "Pad": ("Pad", IMAGE, [np.array([0, 0, 1, 0, 0, 0, 0, 2], I64), np.float32(1.5)], {}),
    "Pad, reflect": ("Pad", IMAGE, [np.array([0, 0, 1, 2, 0, 0, 0, 1], I64)], dict(mode="reflect")),
    "Resize, nearest": (
        *("Resize", IMAGE, [np.array([], np.float32), np.array([1, 1, 2, 3], np.float32)]),
        dict(mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
    ),
    "Resize, linear to a size": (
        *("Resize", IMAGE, ["", "", np.array([4, 6, 5, 17], I64)]),
        dict(mode="linear", coordinate_transformation_mode="half_pixel"),
    ),
    "Resize, corners": (
        *("Resize", IMAGE, ["", np.array([1, 1, 1.5, 2], np.float32)]),
        dict(mode="linear", coordinate_transformation_mode="align_corners"),
    ),
    "Upsample": ("Upsample", IMAGE, [np.array([1, 1, 2, 2], np.float32)], dict(mode="nearest"), 9),
    "DepthToSpace": ("DepthToSpace", draw(4, 8, 3, 3), [], dict(blocksize=2)),
    "DepthToSpace, CRD": ("DepthToSpace", draw(4, 8, 3, 3), [], dict(blocksize=2, mode="CRD")),
    "CumSum": ("CumSum", ROW, [np.array(1, I64)], {}),
    "Einsum": ("Einsum", ROW, [draw(12, 3)], {"equation": "bi,io->bo"}),
}


@pytest.mark.parametrize("case", OPERATORS)
def test_an_operator_computes_what_onnxruntime_computes(tmp_path, case):
    name, x, others, attributes, *opset = OPERATORS[case]
    constants = {f"c{place}": each for place, each in enumerate(others) if not isinstance(each, str)}
    inputs = ["x", *("" if isinstance(each, str) else f"c{place}" for place, each in enumerate(others))]
    # A constant that torch.fx cannot fold away: the operator runs on the input.
    path = tmp_path / "net.onnx"
    save(path, [helper.make_node(name, inputs, ["y"], **attributes)], {"x": (x.shape, 1)}, constants,
         opset=opset[0] if opset else 17, ir_version=4 if opset and opset[0] < 12 else 9)  # fmt: skip
    network = OnnxNetwork(path, torch.tensor(x))
    (expected,) = run(path, {"x": x})
    torch.testing.assert_close(of(network, torch.tensor(x)), torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_shapes_are_computed_from_the_input(tmp_path):
    """As exporters write `x.flatten(2)` with a free size, a mask, a table of places and parts of a tensor."""
    make = helper.make_node
    nodes = [
        make("Shape", ["x"], ["shape"]),
        make("Gather", ["shape", "zero"], ["size"], axis=0),
        make("Unsqueeze", ["size", "first"], ["size1"]),
        make("Concat", ["size1", "minus"], ["target"], axis=0),
        make("Reshape", ["x", "target"], ["flat"]),
        make("Split", ["flat", "sizes"], ["a", "b"], axis=1),
        make("Slice", ["shape", "first", "second"], ["count"]),
        make("ConstantOfShape", ["count"], ["ones"], value=helper.make_tensor("v", 7, [1], [3])),
        make("Cast", ["ones"], ["float"], to=1),
        make("Squeeze", ["count"], ["count0"]),
        make("Cast", ["count0"], ["limit"], to=7),
        make("Range", ["zero", "limit", "one"], ["places"]),
        make("Less", ["places", "two"], ["early"]),
        make("Where", ["early", "zero_", "one_"], ["chosen"]),
        make("Unsqueeze", ["chosen", "second"], ["column"]),
        make("Mul", ["b", "column"], ["masked"]),
        make("TopK", ["masked", "k"], ["best", "where"], axis=1),
        make("ArgMax", ["masked"], ["top"], axis=1, keepdims=1),
        make("Cast", ["top"], ["top_"], to=1),
        make("Concat", ["a", "best", "top_"], ["y"], axis=1),
    ]
    numbers = dict(zero=0, one=1, two=2, first=[0], second=[1], minus=[-1], sizes=[10, 14], k=[3])
    constants = {name: np.array(value, I64) for name, value in numbers.items()}
    constants |= {"zero_": np.float32(0), "one_": np.float32(1)}
    path = save(tmp_path / "net.onnx", nodes, {"x": (["batch", 4, 6], 1)}, constants)
    network = OnnxNetwork(path, torch.randn(8, 4, 6))
    x = torch.randn(5, 4, 6)
    torch.testing.assert_close(of(network, x), torch.tensor(run(path, {"x": x})[0]))


def test_what_cannot_be_read_is_named(tmp_path):
    nodes = [helper.make_node("Gelu", ["x"], ["z"]), helper.make_node("Hardmax", ["z"], ["y"])]
    path = save(tmp_path / "net.onnx", nodes, {"x": ((4, 4), 1)}, opset=20)
    with pytest.raises(ValueError, match="Hardmax"):
        OnnxNetwork(path, torch.randn(4, 4))
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = save(tmp_path / "net.onnx", nodes, {"x": ((4, 4), 1)})
    with pytest.raises(ValueError, match=r"inputs x, .* 4 .*images"):
        OnnxNetwork(path, {"images": torch.randn(4, 4)})


class Detector(nn.Module):
    """Two maps of boxes and scores, from a backbone with residuals, a pyramid and SiLU."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 12, 3, 2, 1), nn.Conv2d(12, 12, 3, 1, 1), nn.Conv2d(12, 16, 3, 2, 1)
        self.norm, self.up = nn.BatchNorm2d(16), nn.ConvTranspose2d(16, 12, 2, 2)
        self.fine, self.coarse = nn.Conv2d(24, 6, 1), nn.Conv2d(16, 6, 1)
        self.norm.running_mean.normal_()

    def forward(self, x):
        low = F.silu(self.a(x))
        low = low + F.silu(self.b(low))
        high = F.silu(self.norm(self.c(low)))
        both = torch.cat([F.silu(self.up(high)), low], 1)
        return torch.cat([self.fine(both).flatten(2), self.coarse(high).flatten(2)], 2)


class Hard(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.Hardswish(), nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.Hardswish(),
            nn.Conv2d(16, 24, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


class Text(nn.Module):
    """A classifier of tokens: an embedding, products of matrices with a tanh-GELU between them, a maximum."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(30, 16), nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 48), nn.Linear(48, 16), nn.Linear(16, 4)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))
        return self.head(x.amax(1))


def images(count):
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


NETWORKS = {
    "detector": (Detector, images(96), 4, 17),
    "hardswish": (Hard, images(96), 3, 17),
    "text": (Text, torch.randint(30, (200, 10), generator=torch.Generator().manual_seed(1)), 1, 18),
}


def exported(name, path, **options):
    build, rows, gates, opset = NETWORKS[name]
    torch.manual_seed(0)
    network = build().eval()
    with torch.no_grad():
        for each in network.parameters():
            each.mul_(2 if each.ndim > 1 else 1)
    options = {"dynamic_axes": {"rows": {0: "batch"}, "scores": {0: "batch"}}} | options
    torch.onnx.export(network, rows[:4], path, input_names=["rows"], output_names=["scores"], opset_version=opset,
                      dynamo=False, **options)  # fmt: skip
    return network, rows, gates


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_file_is_converted_as_its_network_is(tmp_path, name):
    before, after = tmp_path / "net.onnx", tmp_path / "relu.onnx"
    network, rows, gates = exported(name, before)
    read = OnnxNetwork(before, rows)
    converted, report = convert_to_relu(read, rows)
    assert len(report.gates) == gates
    assert not any(layer.is_unfit for layer in report.layers)
    _, of_network = convert_to_relu(network, rows)
    errors = [each.held_out.refitted.relative_error for each in (report, of_network)]
    assert errors[0] < 0.3 * report.held_out.direct.relative_error
    assert math.isclose(*errors, rel_tol=0.02)

    converted.save(after)
    torch.testing.assert_close(torch.tensor(run(after, {"rows": rows})[0]), of(converted, rows), rtol=1e-4, atol=1e-4)
    old, new = onnx.load(before), onnx.load(after)
    assert [node.op_type for node in new.graph.node].count("Relu") == gates
    assert not {"Sigmoid", "HardSwish", "Tanh", "HardSigmoid"} & {node.op_type for node in new.graph.node}
    kept = {node.name: node for node in old.graph.node}
    assert all(kept[node.name] == node for node in new.graph.node if node.op_type != "Relu" and node.name in kept)
    assert (new.graph.input, new.graph.output) == (old.graph.input, old.graph.output)
    assert (new.opset_import, new.ir_version, new.producer_name) == (old.opset_import, old.ir_version, "pytorch")
    assert {each.name for each in new.graph.initializer} <= {each.name for each in old.graph.initializer}
    with pytest.raises(FileExistsError):
        converted.save(after)
    again = pickle.loads(pickle.dumps(converted))
    assert torch.equal(of(again, rows), of(converted, rows))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_file_with_one_batch_size_is_converted_in_larger_ones_and_keeps_it(tmp_path):
    before, after = tmp_path / "net.onnx", tmp_path / "relu.onnx"
    build, rows, *_ = NETWORKS["detector"]
    torch.manual_seed(0)
    network = build().eval()
    torch.onnx.export(network, rows[:1], before, input_names=["rows"], output_names=["scores"], dynamo=False)
    read = OnnxNetwork(before, rows)
    torch.testing.assert_close(of(read, rows), of(network, rows), rtol=1e-4, atol=1e-4)
    converted, _ = convert_to_relu(read, rows)
    converted.save(after)
    assert onnx.load(after).graph.input == onnx.load(before).graph.input
    with pytest.raises(ValueError, match="takes 1 rows at a time"):
        export_int8(converted, tmp_path / "int8", rows)
    assert not (tmp_path / "int8").exists()
    found = [run(after, {"rows": row[None]})[0] for row in rows[:3]]
    torch.testing.assert_close(torch.tensor(np.concatenate(found)), of(converted, rows[:3]), rtol=1e-4, atol=1e-4)


def test_a_graph_that_holds_its_batch_size_is_refused(tmp_path):
    """The first of the axes is lost, so that nothing tells samples apart."""
    nodes = [helper.make_node("Squeeze", ["x", "first"], ["row"]), helper.make_node("Sigmoid", ["row"], ["y"])]
    path = save(tmp_path / "net.onnx", nodes, {"x": ((1, 4, 6), 1)}, {"first": np.array([0], I64)})
    with pytest.raises(RuntimeError, match=r"onnxruntime gives y of shape \(4, 6\) .*, torch \(1, 4, 6\)"):
        OnnxNetwork(path, torch.tensor(draw(8, 4, 6)))


def test_constants_of_nodes_and_biases_that_are_added_are_refitted(tmp_path):
    """As paddle2onnx writes them: each weight a node, the bias of a convolution in an Add with reshaped values."""
    make = helper.make_node

    def constant(name, value):
        return make("Constant", [], [name], value=numpy_helper.from_array(value, name))

    nodes = [
        constant("w1", draw(12, 3, 3, 3) / 5), constant("b1", draw(12)), constant("w2", draw(5, 12, 1, 1) / 3),
        constant("b2", draw(5)), constant("shape", np.array([1, -1, 1, 1], I64)),
        make("Conv", ["x", "w1"], ["conv1"]), make("Reshape", ["b1", "shape"], ["b1_"]),
        make("Add", ["conv1", "b1_"], ["h"]),
        make("HardSigmoid", ["h"], ["hard"], alpha=1 / 6), make("Mul", ["h", "hard"], ["gate"]),
        make("Conv", ["gate", "w2"], ["conv2"]), make("Reshape", ["b2", "shape"], ["b2_"]),
        make("Add", ["b2_", "conv2"], ["y"]),
    ]  # fmt: skip
    before, after = tmp_path / "net.onnx", tmp_path / "relu.onnx"
    save(before, nodes, {"x": (["batch", 3, 8, 8], 1)})
    rows = torch.tensor(draw(100, 3, 8, 8))
    converted, report = convert_to_relu(OnnxNetwork(before, rows), rows)
    assert report.held_out.refitted.relative_error < 0.3 * report.held_out.direct.relative_error
    assert "no bias" not in str(report.layers)
    converted.save(after)
    torch.testing.assert_close(torch.tensor(run(after, {"x": rows})[0]), of(converted, rows), rtol=1e-4, atol=1e-4)
    assert {each.name for each in onnx.load(after).graph.initializer} == {"w2", "b2_"}


def test_int8_of_a_file_is_written_from_its_own_graph(tmp_path):
    """A Reshape by sizes that the file computes: torch's exporter does not write it."""
    make = helper.make_node
    nodes = [
        make("Shape", ["x"], ["sizes"]), make("Slice", ["sizes", "zero", "one"], ["rows"]),
        make("Concat", ["rows", "minus"], ["target"], axis=0), make("Reshape", ["x", "target"], ["flat"]),
        make("Gemm", ["flat", "w1"], ["h"]), make("Sigmoid", ["h"], ["s"]), make("Mul", ["h", "s"], ["g"]),
        make("Gemm", ["g", "w2"], ["y"]),
    ]  # fmt: skip
    constants = {"zero": np.array([0], I64), "one": np.array([1], I64), "minus": np.array([-1], I64)}
    constants |= {"w1": draw(12, 24) / 3, "w2": draw(24, 5) / 3}
    path, rows = tmp_path / "net.onnx", torch.tensor(draw(160, 3, 4))
    save(path, nodes, {"x": (["n", 3, 4], 1)}, constants)
    original = OnnxNetwork(path, rows)
    converted, _ = convert_to_relu(original, rows)
    report = export_int8(converted, tmp_path / "int8", rows, original=original, allow_worse=True)
    assert [(row.network, row.precision) for row in report.rows][-1] == ("converted", "int8")
    (written,) = run(tmp_path / "int8" / "model.onnx", {"x": rows})
    torch.testing.assert_close(torch.tensor(written), of(converted, rows), rtol=1e-4, atol=1e-4)
    assert [node.op_type for node in onnx.load(tmp_path / "int8" / "model.onnx").graph.node].count("Relu") == 1


ADDED = {
    # name: (operator, x, weight, what is added, attributes, whether it becomes the bias)
    "a convolution's, of one row": ("Conv", draw(4, 3, 6, 8), draw(8, 3, 1, 1), draw(8, 1, 1), {}, True),
    "along the width": ("Conv", draw(4, 3, 6, 8), draw(8, 3, 1, 1), draw(8), {}, False),
    "of groups": ("ConvTranspose", draw(4, 6, 5, 5), draw(6, 2, 3, 3), draw(1, 6, 1, 1), {"group": 3}, True),
    "a product's": ("MatMul", draw(4, 3, 6), draw(6, 5), draw(1, 5), {}, True),
    "a product of stacks": ("MatMul", draw(4, 2, 3, 6), draw(2, 6, 2), draw(2), {}, False),
}


@pytest.mark.parametrize("case", ADDED)
def test_what_is_added_for_each_channel_is_the_bias(tmp_path, case):
    name, x, weight, added, attributes, is_bias = ADDED[case]
    nodes = [helper.make_node(name, ["x", "w"], ["h"], **attributes), helper.make_node("Add", ["b", "h"], ["y"])]
    path = save(tmp_path / "net.onnx", nodes, {"x": (x.shape, 1)}, {"w": weight, "b": added})
    network = OnnxNetwork(path, torch.tensor(x))
    torch.testing.assert_close(of(network, torch.tensor(x)), torch.tensor(run(path, {"x": x})[0]), rtol=1e-4, atol=1e-4)
    assert len(list(network.parameters())) == 1 + is_bias


def test_a_gate_that_stays_is_written(tmp_path):
    before, after = tmp_path / "net.onnx", tmp_path / "relu.onnx"
    make = helper.make_node
    nodes = [
        make("Gemm", ["x", "w1"], ["h"], name="first"), make("Sigmoid", ["h"], ["s"]), make("Mul", ["h", "s"], ["g"]),
        make("Gemm", ["g", "w2"], ["h2"]), make("Sigmoid", ["h2"], ["s2"]), make("Mul", ["h2", "s2"], ["g2"]),
        make("Gemm", ["g2", "w3"], ["y"]),
    ]  # fmt: skip
    save(before, nodes, {"x": (["n", 8], 1)}, {"w1": draw(8, 20), "w2": draw(20, 20) / 3, "w3": draw(20, 3)})
    rows = torch.tensor(draw(200, 8))
    read = OnnxNetwork(before, rows)
    kept = [name for name in convert_to_relu(read, rows).report.gates][:1]
    converted, report = convert_to_relu(read, rows, keep=kept)
    assert len(report.gates) == 1
    converted.save(after)
    kinds = [node.op_type for node in onnx.load(after).graph.node]
    assert (kinds.count("Relu"), kinds.count("Sigmoid")) == (1, 1)
    torch.testing.assert_close(torch.tensor(run(after, {"x": rows})[0]), of(converted, rows), rtol=1e-4, atol=1e-4)
    unlike = copy.deepcopy(converted)
    unlike.set_submodule(next(iter(report.gates)), nn.ReLU6())
    with pytest.raises(ValueError, match="ReLU6"):
        unlike.save(tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()
