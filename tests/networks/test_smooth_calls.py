"""What one forward pass still computes smoothly."""

import math
import threading

import pytest
import timm
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from hf_lgelu import LambdaGELU
from hf_lgelu.networks.smooth_calls import SmoothCall, find_smooth_calls


class Calls(nn.Module):
    """A module with a function in its code. It has a part, so it is no activation module itself."""

    def __init__(self, function):
        super().__init__()
        self._function, self.part = function, nn.Identity()

    def forward(self, x):
        return self._function(self.part(x))


def hand_written_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


SMOOTH_FUNCTIONS = {
    "gelu": (F.gelu, "gelu"),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), "gelu"),
    "silu": (F.silu, "silu"),
    "silu in place": (lambda x: F.silu(x.clone(), inplace=True), "silu"),
    "x * sigmoid": (lambda x: x * torch.sigmoid(1.702 * x), "sigmoid"),
    "erf": (lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), "erf"),
    "erfc": (lambda x: 0.5 * x * torch.erfc(-x / 2**0.5), "erfc"),
    "ndtr": (lambda x: x * torch.special.ndtr(x), "erf"),
    "tanh by hand": (hand_written_gelu, "tanh"),
    "mish": (F.mish, "mish"),
    "elu": (F.elu, "elu"),
    "celu": (F.celu, "celu"),
    "selu": (F.selu, "elu"),
    "softplus": (F.softplus, "softplus"),
    "logsigmoid": (F.logsigmoid, "log_sigmoid_forward"),
    "glu": (F.glu, "glu"),
    "tanhshrink": (F.tanhshrink, "tanh"),
    "hardswish": (F.hardswish, "hardswish"),
    "method": (lambda x: x.tanh(), "tanh"),
    "in place": (lambda x: x.clone().sigmoid_(), "sigmoid"),
}


@pytest.mark.parametrize("name", SMOOTH_FUNCTIONS)
def test_a_smooth_function_is_found_with_the_module_that_calls_it(name):
    function, operation = SMOOTH_FUNCTIONS[name]
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Calls(function)))
    (call,) = find_smooth_calls(model, torch.randn(2, 4))
    assert call == SmoothCall("0.1", "Calls", operation, 1, call.line)
    assert "test_smooth_calls.py:" in call.line


PIECEWISE_LINEAR = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "clamp": lambda x: x.clamp(min=0),
    "abs": torch.abs,
    "prelu": lambda x: F.prelu(x, torch.tensor([0.1])),
    "softmax": lambda x: F.softmax(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "product": lambda x: x * x.mean(),
}


@pytest.mark.parametrize("name", PIECEWISE_LINEAR)
def test_what_is_no_smooth_gate_is_not_listed(name):
    assert find_smooth_calls(Calls(PIECEWISE_LINEAR[name]), torch.randn(2, 4)) == []


def test_a_square_root_in_a_module_is_no_activation():
    class Root(nn.Module):  # of a normalization that a reader of ONNX files spreads over modules
        def forward(self, x):
            return x.sqrt()

    assert find_smooth_calls(nn.Sequential(nn.Linear(4, 4), Root()), torch.randn(2, 4)) == []


LINE = f"test_smooth_calls.py:{Calls.forward.__code__.co_firstlineno + 1} (Calls.forward)"


def test_modules_and_functions_are_told_apart_and_counted():
    gelu = nn.GELU()
    model = nn.Sequential(gelu, nn.ReLU(), Calls(F.gelu), nn.SiLU(), nn.Tanh(), LambdaGELU(), gelu)
    assert find_smooth_calls(model, torch.randn(2, 4)) == [
        SmoothCall("0", "GELU", "gelu", 2),
        SmoothCall("2", "Calls", "gelu", 1, LINE),
        SmoothCall("3", "SiLU", "silu", 1),
        SmoothCall("4", "Tanh", "tanh", 1),
        SmoothCall("5", "LambdaGELU", "erf", 1),
    ]


def test_the_softplus_of_the_hardness_is_no_gate_and_a_softplus_of_the_input_is():
    assert [call.operation for call in find_smooth_calls(LambdaGELU(), torch.randn(2))] == ["erf"]
    assert [call.operation for call in find_smooth_calls(nn.Softplus(), torch.randn(2))] == ["softplus"]


@pytest.mark.parametrize(
    ("cell", "inputs", "counts"),
    [
        (nn.GRU(4, 4), (2, 3, 4), {"sigmoid": 4, "tanh": 2}),  # two steps
        (nn.LSTMCell(4, 4), (2, 4), {"sigmoid": 3, "tanh": 2}),
        (nn.RNN(4, 4), (2, 3, 4), {"tanh": 2}),
        (nn.LSTM(4, 4), (2, 3, 4), {"sigmoid": 6, "tanh": 4}),
    ],
    ids=["GRU", "LSTMCell", "RNN", "LSTM"],
)
def test_recurrent_cells_are_smooth(cell, inputs, counts):
    with torch.backends.mkldnn.flags(enabled=False):  # which has one operation for all of an LSTM
        found = find_smooth_calls(cell, torch.randn(inputs))
    assert {call.operation: call.count for call in found} == counts
    assert all((call.module, call.line is None) == ("", False) for call in found)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without mkldnn")
def test_an_lstm_in_one_operation_is_smooth():
    assert [call.operation for call in find_smooth_calls(nn.LSTM(4, 4), torch.randn(2, 3, 4))] == ["mkldnn_rnn_layer"]


@pytest.mark.parametrize(("activation", "operations"), [("gelu", ["gelu"]), ("relu", [])])
def test_torchs_encoder_layer_is_smooth_with_gelu_only(activation, operations):
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation=activation, batch_first=True)
    assert [call.operation for call in find_smooth_calls(layer, torch.randn(2, 3, 8))] == operations


def test_nothing_is_left_behind_by_an_error():
    def fail(x):
        F.gelu(x)
        raise LookupError("no such thing")

    model = nn.Sequential(nn.GELU(), nn.Sequential(Calls(fail))).train()
    with pytest.raises(LookupError, match="no such thing"):
        find_smooth_calls(model, torch.randn(2))
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())
    # and a later run is not disturbed by the one that failed
    assert find_smooth_calls(nn.Sequential(nn.GELU()), torch.randn(2)) == [SmoothCall("0", "GELU", "gelu", 1)]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_model_hides_nothing():
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), Calls(F.silu)).eval()
    x = torch.randn(2, 4)
    expected = [SmoothCall("1", "GELU", "gelu", 1), SmoothCall("2", "Calls", "silu", 1, LINE)]
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        compiled(x)
    assert find_smooth_calls(compiled, x) == expected
    model.compile(backend="aot_eager")
    with torch.no_grad():
        model(x)
    assert find_smooth_calls(model, x) == expected


def activation_modules():
    """Every activation of torch, transformers and timm that takes one tensor and needs no arguments, by name."""
    found = {}
    for library in (torch.nn.modules.activation, transformers.activations, timm.layers.activations):
        for name, kind in vars(library).items():
            if not isinstance(kind, type) or not issubclass(kind, nn.Module) or kind.__module__ != library.__name__:
                continue
            if "max" in name or "min" in name or name in ("MultiheadAttention", "GLU", "Threshold"):
                continue
            found[f"{library.__name__}.{name}"] = kind(-1, 1) if name == "ClippedGELUActivation" else kind()
    return found


@pytest.mark.parametrize("name", activation_modules())
def test_an_activation_module_is_found_unless_it_is_piecewise_linear(name):
    """The oracle: of a piecewise linear function all but a few second differences on a fine grid are zero."""
    module = activation_modules()[name].eval()
    grid = torch.linspace(-5, 5, 4001, dtype=torch.float64)
    with torch.no_grad():
        curvature = module.double()(grid.clone()).diff().diff().abs()
    is_smooth = int((curvature > 1e-9).sum()) > 20
    calls = find_smooth_calls(nn.Sequential(nn.Linear(4, 4), module.float()), torch.randn(2, 4))
    if is_smooth:
        assert "1" in {call.module for call in calls if call.line is None}
    else:
        assert calls == []


def test_what_another_thread_runs_is_not_counted():
    """A model that is served while this one is checked, here begun in the midst of it."""
    other = nn.Sequential(nn.Tanh(), nn.GELU())

    def meanwhile(x):
        thread = threading.Thread(target=other, args=(x,))
        thread.start()
        thread.join()
        return x

    calls = find_smooth_calls(nn.Sequential(nn.GELU(), Calls(meanwhile), nn.SiLU()), torch.zeros(1, 4))
    assert [(call.module, call.count) for call in calls] == [("0", 1), ("2", 1)]
