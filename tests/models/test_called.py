"""Activations that a forward calls as functions, as gates: found, converted, written into the code, saved."""

import copy
import pickle
import threading
from functools import partial

import pytest
import torch
import transformers
from huggingface_hub import PyTorchModelHubMixin
from torch import nn
from torch.nn import functional as F

import hf_lgelu
from hf_lgelu.models.called import gates_as_modules
from hf_lgelu.models.smooth_calls import find_smooth_calls


class Code(nn.Module):
    """A network whose code is `act` of its gates: the edited code has another one."""

    def __init__(self, act=F.gelu, **arguments):
        super().__init__()
        self._act = partial(act, **arguments)  # private: no attribute that is a gate itself
        self.a, self.b, self.u = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(6, 12)
        self.out = nn.Linear(12, 3)

    def act(self, x):
        return self._act(x)


class InTurn(Code):
    def forward(self, x):
        return self.out(self.act(self.b(self.act(self.a(x)))))


class OnOneLine(Code):
    def forward(self, x):
        return self.out(F.gelu(self.a(x)) + F.gelu(self.b(F.gelu(self.a(x)))))


class OnOneLineEdited(Code):
    def forward(self, x):
        return self.out(F.relu(self.a(x)) + F.relu(self.b(F.relu(self.a(x)))))


class Gated(Code):
    def forward(self, x):
        return self.out(self.act(self.a(x)) * self.u(x))


class Looped(Code):
    def __init__(self, act=F.gelu, **arguments):
        super().__init__(act, **arguments)
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])

    def forward(self, x):
        x = self.a(x)
        for layer in self.layers:
            x = x + layer(self.act(x))
        return self.out(self.act(x))


class Dropped(nn.Module):
    def __init__(self, act):
        super().__init__()
        self._act, self.dropout = act, nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self._act(x))


class Shared(Code):
    def __init__(self, act=F.gelu, **arguments):
        super().__init__(act, **arguments)
        self.dropped = Dropped(self._act)
        self.again = self.dropped

    def forward(self, x):
        return self.out(self.again(self.b(self.dropped(self.a(x)))))


class BuiltAnew(Code):
    make = nn.SiLU

    def forward(self, x):
        return self.out(self.make()(self.a(x)))


class BuiltAnewEdited(BuiltAnew):
    make = nn.ReLU


NETWORKS = {
    "in turn": (InTurn(F.gelu), InTurn(F.relu)),
    "tanh form": (InTurn(F.gelu, approximate="tanh"), InTurn(F.relu)),
    "in place": (InTurn(F.silu, inplace=True), InTurn(F.relu)),
    "twice on one line": (OnOneLine(), OnOneLineEdited()),
    "gated": (Gated(F.silu), Gated(F.relu)),
    "in a loop": (Looped(F.mish), Looped(F.relu)),
    "shared module": (Shared(F.gelu), Shared(F.relu)),
    "module built anew": (BuiltAnew(), BuiltAnewEdited()),
}


@pytest.fixture(scope="module")
def x():
    return torch.randn(128, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_that_calls_its_gates_becomes_the_one_that_calls_relu(name, x):
    network, edited = (each.eval() for each in NETWORKS[name])
    keys, before = list(network.state_dict()), network(x)
    converted, report = hf_lgelu.convert_to_relu(network, x)
    assert list(converted.state_dict()) == keys == list(network.state_dict())
    torch.testing.assert_close(network(x), before, rtol=0, atol=0)
    edited.load_state_dict(converted.state_dict())
    torch.testing.assert_close(converted(x), edited(x))
    assert not find_smooth_calls(converted, x[:2])
    assert report.held_out.refitted.relative_error < report.held_out.direct.relative_error
    assert any("test_called.py:" in warning and "relu" in warning for warning in report.warnings)


def test_the_lines_are_those_where_the_calls_stand(x):
    (first, _) = NETWORKS["twice on one line"]
    (call,) = find_smooth_calls(first, x[:2])
    line = OnOneLine.forward.__code__.co_firstlineno + 1
    assert (call.role, call.count, call.line) == ("function", 3, f"test_called.py:{line} (OnOneLine.forward)")
    report = hf_lgelu.convert_to_relu(first, x).report
    assert set(report.gates) == {"called.0", "called.1", "called.2"}
    assert call.line in str(report)


def test_a_kept_call_stays_smooth_in_every_copy(x):
    network, _ = NETWORKS["twice on one line"]
    converted = hf_lgelu.convert_to_relu(network, x, keep=["called.1"]).model
    kept = {name: [type(gate) is nn.ReLU for gate in gates.children()] for name, gates in converted.named_children()
            if name == "called"}  # fmt: skip
    assert kept == {"called": [True, False, True]}
    hidden = converted.a(x)
    expected = converted.out(torch.relu(hidden) + torch.relu(converted.b(F.gelu(hidden))))
    for copied in (converted, copy.deepcopy(converted)):
        torch.testing.assert_close(copied(x), expected)


def test_pickled_traced_threaded_and_trained_networks_run_the_same_gates(x):
    network, edited = OnOneLine(), OnOneLineEdited()
    converted = hf_lgelu.convert_to_relu(network, x).model
    edited.load_state_dict(converted.state_dict())
    expected, found = edited(x), []
    threads = [threading.Thread(target=lambda: found.append(converted(x))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.append(pickle.loads(pickle.dumps(converted))(x))
    found.append(torch.export.export(converted, (x,)).module()(x))
    torch._dynamo.reset()
    found.append(torch.compile(converted, backend="eager")(x))
    for output in found:
        torch.testing.assert_close(output, expected)
    assert len(found) == 6
    gradients = [torch.autograd.grad(each.train()(x).square().sum(), each.a.weight) for each in (converted, edited)]
    torch.testing.assert_close(*gradients)


def test_a_gate_that_is_a_module_below_is_no_call_of_the_module_above(x):
    network = InTurn(F.gelu)
    network.b = nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 12))
    converted, report = hf_lgelu.convert_to_relu(network, x, keep=["b.1"])
    assert list(report.kept) == ["b.1"]
    relu = torch.relu
    torch.testing.assert_close(converted(x), converted.out(relu(converted.b(relu(converted.a(x))))))


def test_nothing_stays_behind_an_error(x):
    network = InTurn(F.gelu)
    block = gates_as_modules(network, x[:2], ("gelu",))
    block.__enter__()
    assert "called" in network._modules
    assert not block.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert "called" not in network._modules
    assert not network._forward_hooks
    assert not network._forward_pre_hooks


def test_a_formula_is_refused_with_its_line(x):
    class Formula(Code):
        def forward(self, x):
            x = self.a(x)
            return self.out(x * torch.sigmoid(x))

    line = Formula.forward.__code__.co_firstlineno + 2
    with pytest.raises(ValueError, match=rf"(?s)test_called.py:{line} .*functional.silu") as error:
        hf_lgelu.convert_to_relu(Formula(), x)
    assert "sigmoid" in str(error.value)


def swish(x):
    return x * torch.sigmoid(x)


class OfFunctions(Code):
    def forward(self, x):
        return self.out(swish(self.b(swish(x=self.a(x)))))


def test_a_formula_that_is_a_function_is_a_gate(x):
    model = OfFunctions()
    before = model(x)
    converted, report = hf_lgelu.convert_to_relu(model, x)
    assert list(report.gates.values()) == ["swish", "swish"]
    assert report.held_out.refitted.distance < report.held_out.direct.distance
    assert torch.equal(model(x), before)
    expected = converted.out(F.relu(converted.b(F.relu(converted.a(x)))))
    compiled = torch.compile(converted, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    for copied in (converted, pickle.loads(pickle.dumps(converted))):
        torch.testing.assert_close(copied(x), expected)
        assert not find_smooth_calls(copied, x[:2])


class OwnConfig(transformers.PreTrainedConfig):
    model_type = "calls_its_gates"


class OwnModel(transformers.PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.block, self.act, self.out = Gated(F.silu), nn.GELU(), nn.Linear(3, 4)
        self.post_init()

    def forward(self, x):
        return {"logits": self.out(swish(self.act(self.block(x))))}


def test_a_saved_model_loads_with_the_gates_in_the_place_of_its_calls(tmp_path, x):
    model = OwnModel(OwnConfig())
    converted, report = hf_lgelu.convert_to_relu(model, {"x": x})
    assert report.gates == {"block.called.0": "silu", "act": "GELU", "called.0": "swish"}
    converted.save_pretrained(tmp_path)
    loaded = hf_lgelu.from_pretrained(OwnModel, tmp_path).eval()
    torch.testing.assert_close(loaded(x), converted(x))
    assert not find_smooth_calls(loaded, {"x": x[:2]})


class OwnMixin(Gated, PyTorchModelHubMixin):
    pass


def test_a_mixin_of_the_hub_says_that_it_saves_no_gates(tmp_path, x, caplog):
    OwnMixin().save_pretrained(tmp_path)
    assert not caplog.records
    hf_lgelu.convert_to_relu(OwnMixin(), x).model.save_pretrained(tmp_path)
    assert "OwnMixin.from_pretrained builds those of the code, another network" in caplog.text


def test_onnx_has_relu_in_the_place_of_the_calls(tmp_path, x):
    onnx = pytest.importorskip("onnx")
    converted = hf_lgelu.convert_to_relu(OnOneLine(), x).model
    hf_lgelu.export_onnx(converted, tmp_path / "model.onnx", inputs=x[:8])
    kinds = {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert "Relu" in kinds
    assert not kinds & {"Erf", "Gelu", "Tanh"}


def test_arithmetic_and_scales_are_no_gates(x):
    class Scaled(Code):
        def forward(self, x):
            x = self.a(x) + 1e-6
            scale = F.softplus(x.square().mean(-1, keepdim=True)) + F.elu(self.out.bias).sum()
            return self.out(2 * x.clamp(min=0.01).abs().relu() / scale)

    network = Scaled()
    with gates_as_modules(network, x[:2]):
        assert "called" not in network._modules
