"""Activations that a forward calls as functions, `F.gelu(self.fc1(x))`, as gates: child modules of the calling module.

One forward pass finds the calls. Each place in the code becomes a module `called.K` of the module in whose forward it
stands, and while that forward runs, its calls go to these modules. Whatever exchanges, traces or refits gates then
sees modules alone.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode, handle_torch_function, has_torch_function
from torch.utils import _pytree as pytree

from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.models.elementwise import CONVERTED_KINDS, Called, form_at, is_piecewise_linear, values_at
from hf_lgelu.models.example_run import LIBRARIES, Inputs, ids_of, line_of, run_example, running

CALLED = "called"
"""The attribute that holds the gates of a module's calls; no state dict shows it, because no gate has a tensor."""

CALLED_KINDS = tuple(kind for kind in CONVERTED_KINDS if kind not in ("softplus", "other"))
"""The kinds of calls that are gates unless others are asked for: softplus makes a scale or a step positive where it is
called, and clamp(x, min=0.01) bends, too."""

_NO_CALLERS = (LambdaGate, nn.Sequential, nn.ModuleList, nn.ModuleDict)  # containers run their children


class Call(NamedTuple):
    """A place in the code of a module that calls an activation.

    `place` is the name of the function that holds the call, and the line and column counted from that function's first
    line; `where` is the same for a reader, "net.py:12 (Net.forward)".
    """

    function: Callable[..., Tensor]
    place: tuple[str, int, int]
    where: str


class CalledGates(nn.Module):
    """The gates in the place of a module's calls, each with its `Call`; a child's name is the number of its call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Call] = {}
        self.are_alone = False
        """Whether no other smooth gate runs inside the module. Compiled code, which has no frames, needs that."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.calls = {key: call._replace(function=_shown(call.function)) for key, call in self.calls.items()}

    def add(self, call: Call, gate: nn.Module, number: str | None = None) -> None:
        """One more gate, unless there is one for this place."""
        if call not in self.calls.values():
            number = str(len(self.calls)) if number is None else number
            self.calls[number] = call
            self.add_module(number, gate)

    def at(self, function: Callable[..., Tensor], place: tuple[str, int, int] | None) -> nn.Module:
        """The gate of a place, or of another call of the same function, which the example inputs did not reach."""
        alike = [number for number, call in self.calls.items() if call.function is function]
        return self.get_submodule(next((number for number in alike if self.calls[number].place == place), alike[0]))


@contextmanager
def gates_as_modules(model: nn.Module, inputs: Inputs, kinds: Collection[str] = CALLED_KINDS) -> Iterator[None]:
    """A block in which the calls of activations of these kinds are modules `called.K` of the modules that call.

    A copy made inside keeps these modules for good; `model` has them no more after the block. Functions that are kept
    in attributes are to be modules already. A formula is found where it is a function, `def swish(x)`. Only what one
    forward pass on `inputs` calls is found. Raises ValueError where the model computes something else with these
    modules.
    """
    search = _Search(model, kinds)
    with search:
        expected = run_example(model, inputs)
    if search.has_shown:
        search = _Search(model, kinds)
        with search:
            run_example(model, inputs)
    with ExitStack() as routes:
        for owner, gates in search.found.items():
            for handle in _route(owner, gates):
                routes.callback(handle.remove)
            routes.callback(owner._modules.pop, CALLED)
        outputs = (expected, run_example(model, inputs)) if search.found else ()
        pairs = zip(*map(pytree.tree_leaves, outputs), strict=True)
        if not all(torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True) for one, other in pairs
                   if isinstance(one, Tensor)):  # fmt: skip
            lines = "; ".join(call.where for gates in search.found.values() for call in gates.calls.values())
            raise ValueError(
                f"{type(model).__name__} gives other outputs where its activations are modules and not calls ({lines});"
                " write these calls as modules (self.act = nn.GELU(), nn.SiLU())"
            )
        yield


def settle(model: nn.Module) -> list[str]:
    """Where the model's code calls an activation in the place of which another gate runs now, as `Call.where`.

    Notes which modules have no smooth gate any more, so that they can be compiled. Changes `model` in place.
    """
    lines = []
    for module in model.modules():
        gates = module._modules.get(CALLED)
        if isinstance(gates, CalledGates):
            smooth = [each for each in module.modules() if isinstance(each, LambdaGate)
                      or ((values := values_at(each)) is not None and not is_piecewise_linear(values))]  # fmt: skip
            gates.are_alone = not smooth
            lines += [f"{gates.calls[number].where}: {gates.calls[number].function.__name__}"
                      for number, gate in gates.named_children() if not isinstance(gate, Called)]  # fmt: skip
    return list(dict.fromkeys(lines))


def _shown(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as torch's modes see it: one of somebody's own file is put there anew, and computes the same."""
    # A function that is shown already is one of this file.
    if not isinstance(function, FunctionType) or str(function.__globals__["__name__"]).startswith(("torch.", __name__)):
        return function

    @torch.compiler.disable  # compiled code would run the function itself
    def seen(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        run = functools.partial(handle_torch_function, shown, given) if has_torch_function(given) else function
        return run(*args, **kwargs)

    @functools.wraps(function)
    def shown(*args: Any, **kwargs: Any) -> Any:
        is_seen = not torch.compiler.is_dynamo_compiling() or torch._C._len_torch_function_stack()
        return (seen if is_seen else function)(*args, **kwargs)

    function.__globals__[function.__name__] = shown
    return shown


_HOLDERS = {"torch.nn.functional": F, "torch": torch, "torch.Tensor": Tensor}


def recorded_calls(model: nn.Module) -> dict[str, dict[str, Any]]:
    """{name of a gate in the place of a call: that call in plain values}, from which `restore_call` makes it again.

    Functions are torch's, or of the file that has the class of the module that calls them.
    """
    found = {}
    for name, gates in model.named_modules():
        for number, call in gates.calls.items() if isinstance(gates, CalledGates) else ():
            function = call.function.__name__
            holders = (key for key, held in _HOLDERS.items() if getattr(held, function, None) is call.function)
            holder = next(holders, call.function.__module__)
            said = {"holder": holder, "function": function, "place": list(call.place), "where": call.where}
            found[f"{name}.{number}"] = said
    return found


def restore_call(model: nn.Module, name: str, said: Mapping[str, Any]) -> None:
    """Have a call run as a gate, for now ReLU, as it did where `recorded_calls` was read. Changes `model` in place.

    Nothing is done where the model has no module of that name. Raises ValueError for what is no call of an activation.
    """
    owner_name, _, number = name.rpartition(f"{CALLED}.")
    try:
        owner = model.get_submodule(owner_name.removesuffix("."))
    except AttributeError:
        return  # it was in a head, and this model has another
    try:
        own = {cls.__module__: sys.modules[cls.__module__] for cls in type(owner).__mro__ if cls is not object}
        function = _shown(getattr((own | _HOLDERS)[said["holder"]], said["function"]))
        qualified, line, column = said["place"]
        call = Call(function, (qualified, line, column), said["where"])
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"the config's record has a call at {name} that its code does not have: {said}") from error
    if not isinstance(owner._modules.get(CALLED), CalledGates):
        _route(owner, CalledGates())
    cast(CalledGates, owner._modules[CALLED]).add(call, nn.ReLU(), number)


@functools.lru_cache(4096)
def _place(code: CodeType, instruction: int) -> tuple[str, int, int]:
    """The place of a call, as in `Call`: the name of the code, and line and column from the code's first line."""
    line, _, column, _ = next(itertools.islice(code.co_positions(), instruction // 2, None))
    return code.co_qualname, (line or 0) - code.co_firstlineno, column or 0


class _Search(TorchFunctionMode):
    """Finds the calls of activations while a model runs; `found` is {module: the gates of its calls}."""

    def __init__(self, model: nn.Module, kinds: Collection[str]) -> None:
        super().__init__()
        self.found: dict[nn.Module, CalledGates] = {}
        self.has_shown = False  # a function of somebody's own file: another search finds its calls
        self._modules, self._kinds = ids_of(model.modules()), kinds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        named = {name: value for name, value in (kwargs or {}).items() if name != "inplace"}
        x = args[0] if args else named.pop("input" if "input" in named else next(iter(named), ""), None)
        if (
            isinstance(x, Tensor) and isinstance(output, Tensor) and x.is_floating_point() and output.shape == x.shape
            and not isinstance(x, nn.Parameter)  # a scale
            and not getattr(func, "__name__", "_").endswith("_")
            and not any(isinstance(each, Tensor) for each in pytree.tree_leaves((args[1:], named)))
        ):  # fmt: skip
            gate = Called(func, args[1:], named)
            if self._takes(gate) and (found := running(self._modules)) is not None:
                owner, (inner, *_) = found
                # A module that computes an activation is a gate already.
                if values_at(owner) is None and not isinstance(owner, _NO_CALLERS):
                    call = Call(func, _place(inner.f_code, inner.f_lasti), line_of(inner))
                    self.found.setdefault(owner, CalledGates()).add(call, gate)
                return output
        frame = sys._getframe(1)
        own = frame.f_globals.get(frame.f_code.co_name)
        if (
            isinstance(own, FunctionType) and own.__code__ is frame.f_code and not own.__module__.startswith(LIBRARIES)
            and self._takes(own)
        ):  # fmt: skip
            _shown(own)
            self.has_shown = True
        return output

    def _takes(self, held: Any) -> bool:
        form = form_at(held)
        return form is not None and form.kind in self._kinds


class _Route(TorchFunctionMode):
    """While a module's forward runs, the calls in it go to its gates."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = owner
        self.gates: CalledGates = getattr(owner, CALLED)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(call.function is func for call in self.gates.calls.values()):
            x = args[0] if args else kwargs.get("input", next(iter(kwargs.values())))
            if torch.compiler.is_dynamo_compiling() and self.gates.are_alone:
                return self.gates.at(func, None)(x)
            found = running(ids_of(self.owner.modules()))
            if found is not None and vars(found[0]) is vars(self.owner):
                inner = found[1][0]
                return self.gates.at(func, _place(inner.f_code, inner.f_lasti))(x)
        return func(*args, **kwargs)


def _route(owner: nn.Module, gates: CalledGates) -> tuple[Any, ...]:
    if hasattr(owner, CALLED):
        raise ValueError(f"{type(owner).__name__} has an attribute {CALLED!r}, the name that gates of calls need")
    owner.add_module(CALLED, gates)
    return owner.register_forward_pre_hook(_enter), owner.register_forward_hook(_leave, always_call=True)


@torch.compiler.disable  # a compiled frame may not leave another mode behind
def _enter(module: nn.Module, args: Any) -> None:
    _push_mode(_Route(module))


@torch.compiler.disable
def _leave(module: nn.Module, args: Any, output: Any) -> None:
    _pop_mode()
