"""Activations that a forward calls as functions, as gates: found, converted, written into the code, saved."""

import copy
import functools
import importlib.util
import inspect
import json
import pickle
import re
import sys
import threading
from functools import partial

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from huggingface_hub import PyTorchModelHubMixin
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import prepare_fx
from torch.nn import functional as F

import hf_lgelu
from hf_lgelu.networks.calls import calls_as_modules
from hf_lgelu.networks.sites import exchanged, find_sites, functions_as_modules
from hf_lgelu.networks.smooth_calls import find_smooth_calls


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


class FormulaBuiltAnew(BuiltAnew):
    make = transformers.activations.NewGELUActivation


class Bound(Code):
    def __init__(self, call):
        super().__init__()
        self.run = getattr(self, call)

    def smooth(self, x):
        return F.gelu(self.a(x))

    def hard(self, x):
        return F.relu(self.a(x))

    def forward(self, x):
        return self.out(self.run(x))


def doubled(method):
    @functools.wraps(method)
    def run(*args, **kwargs):
        return 2 * method(*args, **kwargs)

    return run


FORMS = {"smooth": F.silu, "hard": F.relu}


@doubled
def in_functions(x, *, form, shift=0.5):
    def inner(x):
        return FORMS[form](x - shift)

    return below(form, inner(x).flip(-1), shift=shift)


def below(form, x, **others):
    return FORMS[form](x.flip(-1)) + others["shift"]


class InFunctions(Code):
    def __init__(self, form):
        super().__init__()
        self.form = form

    @doubled
    def forward(self, x):
        first, second = in_functions(self.a(x), form=self.form, shift=0.25).chunk(2, -1)
        return self.out(self.b(torch.cat([first * below(self.form, second, shift=1.0), first], -1)))


class Child(InFunctions):
    def forward(self, x):
        return super().forward(x) + super().forward(2 * x)


class Container(nn.Sequential):
    def __init__(self, act):
        super().__init__(nn.Linear(6, 12), nn.Linear(12, 3))
        self._act = act

    def forward(self, x):
        return self[1](self._act(self[0](x)))


torch.manual_seed(0)
NETWORKS = {
    "in turn": (InTurn(F.gelu), InTurn(F.relu)),
    "tanh form": (InTurn(F.gelu, approximate="tanh"), InTurn(F.relu)),
    "in place": (InTurn(F.silu, inplace=True), InTurn(F.relu)),
    "twice on one line": (OnOneLine(), OnOneLineEdited()),
    "gated": (Gated(F.silu), Gated(F.relu)),
    "in a loop": (Looped(F.mish), Looped(F.relu)),
    "shared module": (Shared(F.gelu), Shared(F.relu)),
    "module built anew": (BuiltAnew(), BuiltAnewEdited()),
    "method in an attribute": (Bound("smooth"), Bound("hard")),
    "functions below decorators": (InFunctions("smooth"), InFunctions("hard")),
    "a method of a parent": (Child("smooth"), Child("hard")),
    "container": (Container(F.silu), Container(F.relu)),
    "hook of accelerate": (add_hook_to_module(OnOneLine(), ModelHook()), OnOneLineEdited()),
    "formula built anew": (FormulaBuiltAnew(), BuiltAnewEdited()),
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
    assert any("test_calls.py:" in warning and "relu" in warning for warning in report.warnings)


def test_the_lines_are_those_where_the_calls_stand(x):
    (first, _) = NETWORKS["twice on one line"]
    (call,) = find_smooth_calls(first, x[:2])
    line = OnOneLine.forward.__code__.co_firstlineno + 1
    assert (call.count, call.line) == (3, f"test_calls.py:{line} (OnOneLine.forward)")
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
    quantizer = prepare_fx(copy.deepcopy(converted), get_default_qconfig_mapping("x86"), (x,))
    found += [converted.forward(x), torch.fx.symbolic_trace(converted)(x), quantizer(x)]
    found += [torch.jit.trace(converted, x[:2])(x), torch.jit.script(converted)(x)]
    threads = [threading.Thread(target=lambda: found.append(converted(x))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.append(pickle.loads(pickle.dumps(converted))(x))
    found.append(torch.export.export(converted, (x,)).module()(x))
    torch.compiler.reset()
    found.append(torch.compile(converted, backend="eager")(x))
    for output in found:
        torch.testing.assert_close(output, expected)
    assert len(found) == 11
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
    block = calls_as_modules(network, x[:2], ("gelu",))
    block.__enter__()
    assert "called" in network._modules
    assert not block.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert "called" not in network._modules
    assert not network._forward_hooks
    assert not network._forward_pre_hooks


SHAPES_OF_CODE = """
class Base(nn.Module):
    register = {}

    def __init_subclass__(cls):
        assert cls.register.setdefault(cls.__name__, cls) is cls

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.out(self.hidden(x))


class Plain(Base):
    @doubled
    def hidden(self, x, *, scale=3.0):
        \'\'\'A text
    of lines\'\'\'
        first = (torch.nn
                 .functional
                 .silu(
                     self.a(x), inplace=False,  # a comment
                 ))
        return scale * F.gelu(input=self.b(F.elu((first + 1), 0.5)), approximate="tanh") if True else None


class Inner(Base):
    scale = staticmethod(lambda x: x)

    def hidden(self, x):
        x = super().__repr__() and self.scale(x)
        return sum([(lambda y: F.mish(y))(self.b(part)) for part in [whole(self.a(x)), formula(self.a(x))]])


def formula(x, beta=1.0):
    return x * torch.sigmoid(beta * x)


def whole(x):
    return F.silu(x)
"""


def module_of(text, folder, name):
    """A module of a text, which stands in a file that is imported."""
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    specification = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


IMPORTS = f"import torch\nfrom torch import nn\nfrom torch.nn import functional as F\nfrom {__name__} import doubled\n"


@pytest.mark.parametrize("name", ["Plain", "Inner"])
def test_calls_in_every_shape_of_code_become_gates_and_each_line_stays(name, x, tmp_path):
    text = IMPORTS + SHAPES_OF_CODE
    renamed = module_of(text.replace(name, f"{name}2"), tmp_path, "code_of_other_names")  # and of equal methods
    hf_lgelu.convert_to_relu(getattr(renamed, f"{name}2")(), x)
    network = getattr(module_of(text, tmp_path, "code_as_it_was"), name)()
    for call in ("F.gelu", "F.elu", "F.mish", "[whole(", " formula("):
        text = text.replace(f"{call}(" if call[-1] != "(" else call[1:], "relu_of(")
    text = re.sub(r"torch.nn\s+\.functional\s+\.silu", "relu_of", text)
    text += "\n\ndef relu_of(x=None, *args, input=None, **kwargs):\n    return torch.relu(input if x is None else x)\n"
    edited = getattr(module_of(text, tmp_path, "code_edited"), name)()
    converted, report = hf_lgelu.convert_to_relu(network, x)
    assert len(report.gates) == 3
    edited.load_state_dict(converted.state_dict())
    for ran in (converted(x), pickle.loads(pickle.dumps(converted))(x)):
        torch.testing.assert_close(ran, edited(x))
    changed = inspect.getsource(type(converted).hidden)
    assert changed.count("\n") == inspect.getsource(type(network).hidden).count("\n")
    assert type(network) is sys.modules["code_as_it_was"].__dict__[name]


OF_THE_HUB = (
    IMPORTS
    + """
from transformers import PreTrainedConfig, PreTrainedModel

class OwnConfig(PreTrainedConfig):
    model_type = "calls_two_gates"

class Own(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.a, self.b, self.out = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.post_init()

    def forward(self, x):
        x = F.gelu(self.b(F.gelu(self.a(x))))
        return {"logits": self.out(x).softmax(-1) + F.softmax(self.out(x), dim=-1)}
"""
)


def test_a_kept_call_is_found_again_where_its_line_moved_and_refused_where_its_code_changed(x, tmp_path):
    own = module_of(OF_THE_HUB, tmp_path, "of_the_hub")
    converted = hf_lgelu.convert_to_relu(own.Own(own.OwnConfig()), {"x": x}, keep=["called.1"]).model
    converted.save_pretrained(tmp_path / "saved")
    expected, pickled = converted(x)["logits"], pickle.dumps(converted)
    moved = OF_THE_HUB.replace("        x = F.gelu", "        # a comment\n\n        x  =  F.gelu")
    loaded = hf_lgelu.from_pretrained(module_of(moved, tmp_path, "of_the_hub").Own, tmp_path / "saved").eval()
    torch.testing.assert_close(loaded(x)["logits"], expected)
    changed = OF_THE_HUB.replace("F.gelu(self.b(F.gelu(self.a(x))))", "F.gelu(self.b(F.gelu(self.a(F.gelu(x)))))")
    for load in (partial(hf_lgelu.from_pretrained, module_of(changed, tmp_path, "of_the_hub").Own, tmp_path / "saved"),
                 partial(pickle.loads, pickled)):  # fmt: skip
        with pytest.raises(ValueError, match=r"Own.forward.*gelu.*of_the_hub.py:20"):
            load()
    config = tmp_path / "saved" / "config.json"
    # The calls of forward in the order in which they end: a, gelu, b, gelu, out, softmax, out, softmax.
    told, code = json.loads(config.read_text(encoding="utf-8")), module_of(OF_THE_HUB, tmp_path, "of_the_hub").Own
    assert next(entry for entry in told["lambda_gelu"] if "call" in entry)["call"]["numbers"] == [1]
    for numbers, match in (([0], "damaged"), ([7], "damaged"), ([-1], "damaged"), (["1"], "damaged"),
                           (1, "no readable call"), ([1, 0], "damaged"), ([], "damaged")):  # fmt: skip
        next(entry for entry in told["lambda_gelu"] if "call" in entry)["call"]["numbers"] = numbers
        config.write_text(json.dumps(told), encoding="utf-8")
        with pytest.raises(ValueError, match=match):
            hf_lgelu.from_pretrained(code, tmp_path / "saved")


def test_a_statement_that_moves_into_a_loop_is_another_text(x, tmp_path):
    loop = "        for _ in range(2):\n            x = x + 1\n"
    text = OF_THE_HUB.replace("        x = F.gelu", loop + "        x = x * 2\n        x = F.gelu")
    own = module_of(text, tmp_path, "of_the_hub")
    converted = hf_lgelu.convert_to_relu(own.Own(own.OwnConfig()), {"x": x}).model
    converted.save_pretrained(tmp_path / "saved")
    moved = text.replace("        x = x * 2", "            x = x * 2")  # white space alone
    with pytest.raises(ValueError, match="has another source"):
        hf_lgelu.from_pretrained(module_of(moved, tmp_path, "of_the_hub").Own, tmp_path / "saved")


def test_a_call_on_a_parameter_is_no_gate(x):
    class Scaled(Code):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((12,), 0.4))

        def forward(self, x):
            scale = self.act(self.scale)
            return self.out(F.gelu(self.b(F.gelu(self.a(x)))) * scale)

    converted, report = hf_lgelu.convert_to_relu(Scaled(), x)
    hidden = F.relu(converted.b(F.relu(converted.a(x))))
    torch.testing.assert_close(converted(x), converted.out(hidden * F.gelu(converted.scale)))
    assert any("gelu × 1, called as a function" in line for line in report.smooth_calls)


def test_a_graph_of_torch_fx_has_the_gates_in_its_graph(x):
    network = InTurn(F.silu)
    network.act = F.silu
    graph = torch.fx.symbolic_trace(network)
    code, before = graph.code, graph(x)
    converted = hf_lgelu.convert_to_relu(graph, x).model
    expected = converted.out(F.relu(converted.b(F.relu(converted.a(x)))))
    for ran in (converted, copy.deepcopy(converted), torch.fx.symbolic_trace(converted)):
        torch.testing.assert_close(ran(x), expected)
    assert "silu(" not in converted.code
    assert graph.code == code
    assert torch.equal(graph(x), before)


def test_looking_leaves_nothing_and_tries_only_what_a_forward_reads(x):
    class Watched(Code):
        def __init__(self):
            super().__init__()
            self.told = []
            self.gate, self.on_epoch_end = lambda x: F.gelu(x), self.told.append
            self.tell = lambda x: self.told.append(x) or F.relu(x)

        def forward(self, x):
            return self.out(self.gate(self.b(swish(self.a(x)))))

    network, function, forward = Watched(), swish, Watched.forward
    assert [site.name for site in find_sites(network)] == ["gate"]
    assert network.told == []
    hf_lgelu.convert_to_relu(OfFunctions(), x)
    with functions_as_modules(network, ("gelu",)), calls_as_modules(network, x[:2]):
        assert type(network) is not Watched
    assert (type(network), Watched.forward, swish) == (Watched, forward, function)
    pickle.dumps(OfFunctions())


REGISTERED = """
class Registering(type):
    classes = {}

    def __new__(mcs, name, bases, body):
        mcs.classes[name] = made = super().__new__(mcs, name, bases, body)
        return made


class Net(nn.Module, metaclass=Registering):
    # a page \x0c and another line \u2028 of this comment
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.b(F.silu(F.gelu(self.a(x))))
"""


class Called(nn.Module):
    """Its code has another use for the attribute that would hold its gates."""

    def __init__(self):
        super().__init__()
        self.called, self.a = 1, nn.Linear(6, 3)

    def forward(self, x):
        return F.gelu(self.a(x))


def test_an_attribute_of_the_name_for_gates_is_refused():
    with (
        pytest.raises(ValueError, match=r"Called has an attribute 'called', .* rename it"),
        calls_as_modules(Called(), torch.randn(4, 6)),
    ):
        pass


def test_a_class_registers_once_is_scripted_and_its_calls_become_gates_once(x, tmp_path):
    own = module_of(IMPORTS + REGISTERED, tmp_path, "registered")
    converted = hf_lgelu.convert_to_relu(own.Net(), x, options=hf_lgelu.ConversionConfig(kinds=("gelu",))).model
    assert own.Registering.classes["Net"] is own.Net
    torch.testing.assert_close(torch.jit.script(converted)(x), converted(x))
    with pytest.raises(ValueError, match="are gates already; convert all kinds at once"):
        hf_lgelu.convert_to_relu(converted, x)


class CalledItself(Code):
    def __call__(self, x):
        return 2 * F.gelu(super().__call__(x))

    def forward(self, x):
        return self.out(F.gelu(self.a(x)))


def test_a_gate_in_the_networks_own_call_is_found_and_exchanged(x):
    network = CalledItself()
    assert [call.count for call in find_smooth_calls(network, x)] == [1, 1]
    with calls_as_modules(network, x[:2], ("gelu",)):
        gates = dict(network.named_children())["called"]
        with exchanged(find_sites(network), [nn.ReLU() for _ in gates]):
            torch.testing.assert_close(network(x), 2 * F.relu(network.out(F.relu(network.a(x)))))


class InLargeBatches(Code):
    def forward(self, x):
        return self.out(F.gelu(self.b(F.gelu(self.a(x)))) if len(x) > 8 else F.gelu(self.a(x)))


def test_a_gate_that_only_many_rows_reach_is_named(x):
    report = hf_lgelu.convert_to_relu(InLargeBatches(), x).report
    line = InLargeBatches.forward.__code__.co_firstlineno + 1
    assert [call for call in report.smooth_calls if f"test_calls.py:{line}" in call]


def in_a_function(x):
    return F.gelu(x.mean(-1, keepdim=True) + x)


in_a_lambda = lambda x: in_a_function(x) + F.gelu(x)  # noqa: E731


class OneOfTwo(Code):
    def forward(self, x):
        for act in (F.gelu, F.silu):
            x = act(self.a(x))[:, :6]
        return x


class InALambda(Code):
    def forward(self, x):
        return self.out(in_a_lambda(self.a(x)))


class Helper:
    def run(self, x):
        return in_a_function(x)


class OfAnObject(Code):
    def __init__(self):
        super().__init__()
        self.helper = Helper()

    def forward(self, x):
        return self.out(self.helper.run(self.a(x)))


class BoundInAList(Code):
    def __init__(self):
        super().__init__()
        self.steps = [self.hidden]

    def hidden(self, x):
        return F.gelu(self.a(x))

    def forward(self, x):
        return self.out(self.steps[0](x))


class OfAVariable(Code):
    def forward(self, x, below=below):
        return self.out(below("smooth", self.a(x), shift=0.5))


class OfTheClass(Code):
    @classmethod
    def swish(cls, x):
        return F.silu(x)

    def forward(self, x):
        return self.out(OfTheClass.swish(self.a(x)))


NO_TEXT = {"F": F, "Code": Code, "__name__": "no_file"}
exec("class NoText(Code):\n    def forward(self, x):\n        return self.out(F.gelu(self.a(x)))", NO_TEXT)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (OneOfTwo, r"gives other outputs where .*test_calls.py:\d+ \(OneOfTwo.forward\)"),
        (InALambda, r"calls activations where .*test_calls.py:\d+ \(in_a_function\)"),
        (OfAnObject, r"calls activations where .*test_calls.py:\d+ \(in_a_function\)"),
        (NO_TEXT["NoText"], "the source of NoText.forward is not that of the code that runs: <string> is not there"),
        (
            OfTheClass,
            r"calls activations where no module can take their place .*test_calls.py:\d+ \(OfTheClass.swish\)",
        ),
        (OfAVariable, "the source does not say which function runs"),
        (BoundInAList, r"or goes on calling them .*test_calls.py:\d+ \(BoundInAList.hidden\)"),
    ],
)
def test_calls_that_cannot_be_written_anew_are_refused_in_words(cls, reason, x):
    with pytest.raises(ValueError, match=rf"(?s){reason}.*as modules"):
        hf_lgelu.convert_to_relu(cls(), x)


class Flip(nn.Module):
    forward = staticmethod(torch.fliplr)  # no frame of Python is inside it


def test_a_forward_that_is_a_function_of_torch_is_looked_through(x):
    network = nn.Sequential(nn.Linear(6, 12), nn.GELU(), Flip(), nn.Linear(12, 3))
    assert list(hf_lgelu.convert_to_relu(network, x).report.gates) == ["1"]


class GeluAtTheSecondRun(Code):
    """Calls SiLU only where GELU is a module."""

    def forward(self, x):
        x = F.gelu(self.a(x))
        return self.out(F.silu(self.b(x)) if hasattr(self, "called") else self.b(x))


def test_the_refusal_names_the_calls_that_are_left(x):
    with pytest.raises(ValueError, match=r"goes on calling them \(.*; .*test_calls.py:\d+ \(GeluAtTheSecondRun"):
        hf_lgelu.convert_to_relu(GeluAtTheSecondRun(), x)


def test_a_copy_that_is_another_network_is_refused(x):
    class Copied(OnOneLine):
        def __deepcopy__(self, memo):
            made = OnOneLine()  # without the calls that were written anew
            for name, child in self.named_children():
                setattr(made, name, copy.deepcopy(child, memo))
            return made

    with pytest.raises(RuntimeError, match="__deepcopy__"):
        hf_lgelu.convert_to_relu(Copied(), x)


def test_a_formula_is_refused_with_its_line(x):
    class Formula(Code):
        def forward(self, x):
            x = self.a(x)
            return self.out(x * torch.sigmoid(x))

    line = Formula.forward.__code__.co_firstlineno + 2
    with pytest.raises(ValueError, match=rf"(?s)test_calls.py:{line} .*functional.silu") as error:
        hf_lgelu.convert_to_relu(Formula(), x)
    assert "sigmoid" in str(error.value)


def swish(x):
    return x * torch.sigmoid(x)


class OfFunctions(Code):
    @(torch.compile(backend="eager") if torch.__version__ >= (2, 9) else lambda method: method)  # 2.8 exports none
    def forward(self, x):
        return self.out(swish(self.b(swish(x=self.a(x)))))


class StaticSiLU(nn.Module):
    @staticmethod
    def forward(x):
        return x * torch.sigmoid(x)


def test_a_module_with_a_static_forward_is_a_gate(x):
    network = nn.Sequential(nn.Linear(6, 12), StaticSiLU(), nn.Linear(12, 3))
    converted, report = hf_lgelu.convert_to_relu(network, x)
    assert report.gates == {"1": "StaticSiLU"}
    assert not find_smooth_calls(converted, x[:2])


def test_a_formula_that_is_a_function_is_a_gate(x):
    model = OfFunctions()
    before = model(x)
    converted, report = hf_lgelu.convert_to_relu(model, x)
    assert list(report.gates.values()) == ["swish", "swish"]
    assert report.held_out.refitted.value < report.held_out.direct.value
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


class OwnMixin(Gated, PyTorchModelHubMixin):
    pass


def test_of_a_mixin_of_the_hub_the_conversion_says_that_no_gates_are_saved(x):
    report = hf_lgelu.convert_to_relu(OwnMixin(), x).report
    assert "OwnMixin.from_pretrained builds the gates of its code and config, which is another" in " ".join(
        report.warnings
    )


def test_a_saved_model_loads_with_the_gates_in_the_place_of_its_calls(tmp_path, x):
    model = OwnModel(OwnConfig())
    converted, report = hf_lgelu.convert_to_relu(model, {"x": x})
    assert report.gates == {"block.called.0": "silu", "act": "GELU", "called.0": "swish"}
    converted.save_pretrained(tmp_path)
    loaded = hf_lgelu.from_pretrained(OwnModel, tmp_path).eval()
    torch.testing.assert_close(loaded(x), converted(x))
    assert not find_smooth_calls(loaded, {"x": x[:2]})


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
    with calls_as_modules(network, x[:2]):
        assert "called" not in network._modules
