"""Activations that a forward calls as functions, `F.gelu(self.fc1(x))`, as gates: child modules of the calling module.

`Network` is a block in which all gates of a model are modules.

One forward pass finds the calls. Each becomes a module `called.K` of the object whose method has the call, or calls a
function with it, and the method then calls the module (`rewrite`). Code that exchanges, traces or refits gates then
sees only modules.
"""

import inspect
import itertools
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import RLock
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.networks.elementwise import CONVERTED_KINDS, FunctionModule, codes_in, form_at, functions_in, values_at
from hf_lgelu.networks.outputs import OutputReader, agree, outputs_of
from hf_lgelu.networks.rewrite import CALLED, Call, call_at, called_by, calls_of, digest_of, method_in, put_gates
from hf_lgelu.networks.run import NOT_TAKEN, Inputs, evaluation_mode, placed, plain_evaluation
from hf_lgelu.networks.sites import SMOOTH_KINDS, functions_as_modules

CALLED_KINDS = tuple(kind for kind in CONVERTED_KINDS if kind not in ("softplus", "other"))
"""The kinds of calls that are gates by default. Softplus is none: it makes a scale or a step positive where it is
called. "other" is none: clamp(x, min=0.01) would be one, too."""


class Network:
    """A model in eval mode whose gates are modules, without the caller's contexts: inside a block, and not after it.

    Threads take turns: inside the block a model has other gates.
    """

    _one_at_a_time = RLock()

    def __init__(
        self,
        model: nn.Module,
        kinds: Collection[str] | None = None,
        outputs: Sequence[str] | None = None,
        box_channels: int | None = None,
    ) -> None:
        """`kinds` are the rows of `hf_lgelu.networks.sites.KINDS` that count as gates; the rest is for `read`."""
        self.model, self._kinds, self._block = model, kinds, ExitStack()
        self.read = OutputReader(model, outputs, box_channels)

    def __enter__(self) -> "Network":
        with ExitStack() as block:
            block.enter_context(self._one_at_a_time)
            block.enter_context(plain_evaluation(self.model))
            block.enter_context(functions_as_modules(self.model, self._kinds or SMOOTH_KINDS))
            self._block = block.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)

    def take_calls(self, inputs: Inputs) -> None:
        """Turn the activations that a forward on `inputs` calls into modules, too (`gates_as_modules`)."""
        self._block.enter_context(gates_as_modules(self.model, inputs, self._kinds or CALLED_KINDS))


@contextmanager
def gates_as_modules(model: nn.Module, inputs: Inputs, kinds: Collection[str] = CALLED_KINDS) -> Iterator[None]:
    """A block in which the calls of activations of these kinds are modules `called.K` of the objects that call.

    A copy made inside keeps these modules for good; `model` has them no more after the block. Functions in attributes
    must be modules already. A formula is found if it is a function, `def swish(x)`. The search finds only calls of
    `_Search.run`. Raises ValueError where a call stands in no method or function whose source is known. Raises it also
    where the model with these modules computes other values, or still calls activations.
    """
    search = _Search(model, kinds)
    expected = search.run(inputs)
    advice = "write these calls as modules (self.act = nn.GELU(), nn.SiLU())"
    if search.refused:
        raise ValueError(
            f"{type(model).__name__} calls activations where no module can take their place "
            f"({'; '.join(dict.fromkeys(search.refused))}); {advice}"
        )
    with ExitStack() as changes:
        for owner, gates in search.found.items():
            changes.callback(put_gates(owner, list(gates), list(gates.values())))
        again, is_same = _Search(model, kinds), False
        with suppress(*NOT_TAKEN):
            is_same = not search.found or agree(expected, again.run(inputs))
        if not is_same or again.found or again.refused:
            lines = [*(call.where for gates in search.found.values() for call in gates), *again.refused]
            raise ValueError(
                f"{type(model).__name__} gives other outputs where its activations are modules and not calls, or goes "
                f"on calling them ({'; '.join(dict.fromkeys(lines))}); {advice}"
            )
        yield


def lines_of_old_gates(model: nn.Module) -> list[str]:
    """The places in the model's code that call an activation where another gate runs now: `Call.where` and function."""
    lines = [
        f"{call.where}: {call.function}"
        for module in model.modules()
        for call, gate in zip(calls_of(module), module.get_submodule(CALLED) if calls_of(module) else (), strict=True)
        if gate._get_name() != call.function
    ]
    return list(dict.fromkeys(lines))


def recorded_calls(model: nn.Module) -> dict[str, dict[str, Any]]:
    """{name of a gate in the place of a call: the call in plain values}; `restore_calls` restores gates from these."""
    return {
        f"{name}.{CALLED}.{place}".removeprefix("."): call._asdict()
        for name, module in model.named_modules()
        for place, call in enumerate(calls_of(module))
    }


class _Search(TorchFunctionMode):
    """Finds the calls of activations while a model runs.

    `found` is {object: {call in a method of its class: the gate that computes the same}}. `refused` are the lines of
    calls in other places.
    """

    def __init__(self, model: nn.Module, kinds: Collection[str]) -> None:
        super().__init__()
        self.found: dict[nn.Module, dict[Call, nn.Module]] = defaultdict(dict)
        self.refused: list[str] = []
        self._model, self._modules, self._kinds = model, set(map(id, model.modules())), kinds

    def run(self, inputs: Inputs) -> list[Tensor]:
        """`outputs_of` the model. A language model that calls activations also writes two tokens.

        With a cache, it may call functions that a plain forward does not reach.
        """
        with self:
            found, model = outputs_of(self._model, inputs), self._model
            ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
            calls = self.found or any(map(calls_of, model.modules()))
            if calls and isinstance(model, PreTrainedModel) and model.can_generate() and isinstance(ids, Tensor):
                given: Any = placed({"input_ids": ids[:1, :2], "attention_mask": torch.ones_like(ids[:1, :2])}, model)
                with evaluation_mode(model), suppress(Exception):  # what it cannot do is no part of a conversion
                    model.generate(**given, max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0)
            return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        module, frames = frames_inside(self._modules)
        # A module that computes an activation is a gate already.
        if not isinstance(module, LambdaGate) and values_at(module) is None:
            self._look(_call_of(func, args, kwargs or {}), output, frames[1:])  # without this method's own frame
        return output

    def _look(self, seen: tuple[Any, nn.Module], output: Any, frames: list[FrameType]) -> None:
        """Note where a call of torch stands, if it is a gate or inside of one.

        `frames` are those of the call, the innermost first. For `torch.exp` in `swish`, which `mix` calls, which
        `forward` calls: the method is `forward`. From there the call chain goes down, a call at a time: `numbers` are
        the place of `mix(…)` in the source of `forward` and of `swish(…)` in that of `mix`. The chain ends at the first
        call that computes a gate as a whole, here `swish(…)`, and else at the call of torch itself.
        """
        is_network_code = [not str(frame.f_globals.get("__name__")).startswith(LIBRARIES) for frame in frames]
        user_frame = next(itertools.compress(itertools.count(), is_network_code), len(frames) - 1)
        where = line_of(frames[user_frame])
        # 1. The gate that the call of torch computes, or a library's module that was built for this call alone.
        built = [frame.f_locals for frame in frames[:user_frame] if frame.f_code is _CALL_OF_MODULE]
        whole = [(_call_of(None, run["args"], run["kwargs"])[0], run["self"]) for run in built]
        shape = getattr(output, "shape", None)
        gates = (gate for x, gate in (seen, *whole) if getattr(x, "shape", ()) == shape and self._takes(x, gate))
        torch_gate = next(gates, None)
        # 2. The method around it.
        around = self._method_around(frames)
        if around is None:
            if torch_gate is not None:
                self.refused.append(where)
            return
        frame_number, owner, name, method = around
        # 3. Down from the source of the method, frame by frame, to the source that calls an activation.
        chain, numbers, gate = [method], list[int](), None
        try:
            while gate is None:
                frame, calls_function = frames[frame_number], any(is_network_code[:frame_number])
                if not calls_function and torch_gate is None:
                    return  # a call of torch that is no gate, and no part of one
                call_number, node = call_at(chain[-1], frame)
                numbers.append(call_number)
                if calls_function:
                    held = called_by(chain[-1], node, type(owner))
                    frame_number, function = _running(held, frames[:frame_number])
                    x, function_gate = _call_in_progress(held, frames[frame_number])
                    gate = function_gate if self._takes(x, function_gate) else None
                    chain += [] if gate else [function]
                else:
                    gate = torch_gate
            call = Call(name, tuple(numbers), digest_of(chain, numbers), line_of(frame), gate._get_name())
        except ValueError as error:
            self.refused += [f"{where}: {error}"] * (torch_gate is not None or gate is not None)
            return
        self.found[owner].setdefault(call, gate)

    def _method_around(self, frames: list[FrameType]) -> tuple[int, nn.Module, str, FunctionType] | None:
        """(number of the frame that calls, object, name and function of the method around the frame).

        The method is the innermost one of a module of the model.
        """
        for frame in frames:
            first = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()
            owner = frame.f_locals.get(*first) if first else None
            if isinstance(owner, nn.Module) and id(owner) in self._modules:
                method = method_in(owner, frame)
                if method is not None:
                    codes = set(codes_in(frame.f_code))
                    return next(below for below, each in enumerate(frames) if each.f_code in codes), owner, *method
        return None

    def _takes(self, x: Any, gate: nn.Module) -> bool:
        if not isinstance(x, Tensor) or not x.is_floating_point() or isinstance(x, nn.Parameter):  # it is a scale
            return False
        if gate._get_name().endswith("_") or any(map(torch.is_tensor, pytree.tree_leaves(vars(gate)))):
            return False
        form = form_at(gate)
        return form is not None and form.kind in self._kinds


def _call_of(function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, FunctionModule]:
    """(the input of a call, the module that computes the same as the call)."""
    rest = {name: value for name, value in named.items() if name != "inplace"}
    x = args[0] if args else rest.pop("input" if "input" in rest else next(iter(rest), ""), None)
    return x, FunctionModule(function, args[1:], rest)


def _call_in_progress(function: Any, frame: FrameType) -> tuple[Any, FunctionModule]:
    """`_call_of` for the function that runs in a frame; a function with any number of arguments has no input."""
    given = inspect.getargvalues(frame)
    is_open = given.varargs is not None or given.keywords is not None
    return _call_of(function, (), {} if is_open else {name: given.locals[name] for name in given.args})


def _running(held: FunctionType | None, frames: Sequence[FrameType]) -> tuple[int, FunctionType]:
    """(number of the innermost frame that runs a function or the one that it decorates, this function).

    Raises ValueError where no frame runs it.
    """
    for function in reversed([*functions_in(held)]):  # decorators of several functions have the same code
        for place, frame in enumerate(frames):
            if frame.f_code in codes_in(function.__code__):
                return place, function
    raise ValueError("the source does not say which function runs")


_CALL_OF_MODULE = nn.Module._call_impl.__code__
LIBRARIES = ("torch.", "hf_lgelu.", "transformers.activations", "timm.layers.activations")
"""The first parts of module names whose frames are not a network's own code."""


def line_of(frame: FrameType) -> str:
    """The place of a frame, for a reader: "net.py:12 (Net.forward)"."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_qualname})"


def frames_inside(modules: Collection[int] | None = None) -> tuple[nn.Module | None, list[FrameType]]:
    """(the innermost module that runs now, if given one of the modules with these ids; its frames, innermost first).

    Outside of all modules, as in a `__call__` of a network's own, it is None and every frame.
    """
    frame: FrameType | None = sys._getframe(1)
    frames: list[FrameType] = []
    while frame is not None:
        if frame.f_code is _CALL_OF_MODULE and (modules is None or id(frame.f_locals["self"]) in modules):
            return frame.f_locals["self"], frames
        frames.append(frame)
        frame = frame.f_back
    return None, frames
