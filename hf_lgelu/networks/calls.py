"""Activations that a forward calls as functions, found and made child modules of the object that calls.

    def forward(self, x):                          def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))           return self.fc2(self.called[0](self.fc1(x)))

1. `_Search` runs the model once. torch tells it of each call of one of torch's functions (`__torch_function__`).
2. The values of the function on a grid of inputs tell whether it is a gate (`_gate_of`).
3. The frames of Python tell in which method the call stands, or by which functions the method leads to it (`_locate`).
4. `put_gates` of `networks/rewrite` gives the object the gates and methods that call them.
5. The model runs again. It is refused if it gives other outputs, or still calls an activation (`calls_as_modules`).

Code that exchanges, traces or refits gates then sees only modules: a copy of the model gets ReLU at `called.0` as at
any other gate (`Exchange.carry_out` in `refit/task`). `GatesAsModules` is the block in which this is so.
"""

import inspect
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from threading import RLock
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.networks.elementwise import CONVERTED_KINDS, FunctionModule, form_of_activation, values_of_activation
from hf_lgelu.networks.outputs import OutputReader, agree, outputs_of
from hf_lgelu.networks.rewrite import Call, calls_of, put_gates
from hf_lgelu.networks.run import NOT_TAKEN, Inputs, evaluation_mode, placed, plain_evaluation
from hf_lgelu.networks.sites import SMOOTH_KINDS, functions_as_modules
from hf_lgelu.networks.source import (
    LIBRARIES,
    RUN_OF_A_MODULE,
    digest_of,
    frames_inside,
    function_called,
    functions_in,
    innermost_run,
    line_of,
    number_of_call,
)

CALLED_KINDS = tuple(kind for kind in CONVERTED_KINDS if kind not in ("softplus", "other"))
"""The kinds of calls that are gates by default. Softplus is none: it makes a scale or a step positive where it is
called. "other" is none: clamp(x, min=0.01) would be one, too."""


class GatesAsModules:
    """A block in which a model is in eval mode and its gates are modules; its calls become modules by `take_calls`.

    Inside, the caller's autocast, inference mode and compilation are off. Threads take turns.
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

    def __enter__(self) -> "GatesAsModules":
        with ExitStack() as block:
            block.enter_context(self._one_at_a_time)
            block.enter_context(plain_evaluation(self.model))
            block.enter_context(functions_as_modules(self.model, self._kinds or SMOOTH_KINDS))
            self._block = block.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)

    def take_calls(self, inputs: Inputs) -> None:
        """Turn the activations that a forward on `inputs` calls into modules, too (`calls_as_modules`)."""
        self._block.enter_context(calls_as_modules(self.model, inputs, self._kinds or CALLED_KINDS))


@contextmanager
def calls_as_modules(model: nn.Module, inputs: Inputs, kinds: Collection[str] = CALLED_KINDS) -> Iterator[None]:
    """A block in which the calls of activations of these kinds are modules `called.K` of the objects that call.

    A copy made inside keeps these modules for good; `model` has them no more after the block. Functions in attributes
    must be modules already. A formula is found if it is a function, `def swish(x)`. Only what runs on these inputs is
    found. Raises ValueError where a call stands in no method or function whose source is known. Raises it also where
    the model with these modules computes other values, or still calls activations.
    """
    search = _Search(model, kinds)
    expected = search.run(inputs)
    advice = "write these calls as modules (self.act = nn.GELU(), nn.SiLU())"
    if search.refused:
        raise ValueError(
            f"{type(model).__name__} calls activations where no module can take their place "
            f"({'; '.join(dict.fromkeys(search.refused))}); {advice}"
        )
    if not search.found:
        yield
        return
    with ExitStack() as changes:
        for owner, gates in search.found.items():
            changes.callback(put_gates(owner, list(gates), list(gates.values())))
        again = _Search(model, kinds)
        try:
            is_same = agree(expected, again.run(inputs))
        except NOT_TAKEN:
            is_same = False
        if not is_same or again.found or again.refused:
            calls = (call for found in (search.found, again.found) for gates in found.values() for call in gates)
            lines = [*(call.where for call in calls), *again.refused]
            raise ValueError(
                f"{type(model).__name__} gives other outputs where its activations are modules and not calls, or goes "
                f"on calling them ({'; '.join(dict.fromkeys(lines))}); {advice}"
            )
        yield


class _Search(TorchFunctionMode):
    """Finds the calls of activations while a model runs: torch tells it of each call of one of its functions.

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

        With a cache, it may call functions that a plain forward does not reach (`causal_conv1d_update` of Mamba).
        """
        with self:
            outputs, model = outputs_of(self._model, inputs), self._model
            ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
            calls = self.found or any(map(calls_of, model.modules()))  # or they are modules already
            if calls and isinstance(model, PreTrainedModel) and model.can_generate() and isinstance(ids, Tensor):
                given: Any = placed({"input_ids": ids[:1, :2], "attention_mask": torch.ones_like(ids[:1, :2])}, model)
                with evaluation_mode(model), suppress(Exception):  # what it cannot do is no part of a conversion
                    model.generate(**given, max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0)
            return outputs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        module, frames = frames_inside(self._modules)
        frames = frames[1:]  # without this method's own frame; none where a forward is a function of torch itself
        # A module that computes an activation is a gate already.
        if frames and not isinstance(module, LambdaGate) and values_of_activation(module) is None:
            # Frames are numbered from the innermost one: those of libraries come first, then the network's own code.
            of_library = [str(frame.f_globals.get("__name__")).startswith(LIBRARIES) for frame in frames]
            innermost = of_library.index(False) if False in of_library else len(frames) - 1
            # The call of torch, and modules around it that a library has built for one call: `ACT2FN["gelu_new"](x)`.
            runs = [frame.f_locals for frame in frames[:innermost] if frame.f_code is RUN_OF_A_MODULE]
            candidates = [(func, args, kwargs or {}), *((run["self"], run["args"], run["kwargs"]) for run in runs)]
            gates = (self._gate_of(*each, shape=getattr(output, "shape", None)) for each in candidates)
            self._locate(next(filter(None, gates), None), frames, innermost)
        return output

    def _gate_of(self, function: Any, args: Any, named: Mapping[str, Any], shape: Any = None) -> nn.Module | None:
        """The module that computes the same as a call, if it is a gate whose output has the `shape`; else None.

        A call in place, `F.elu_(x)`, and one that takes other tensors (a PReLU's weight) are no gates here.
        """
        rest = {name: value for name, value in named.items() if name != "inplace"}
        x = args[0] if args else rest.pop("input" if "input" in rest else next(iter(rest), ""), None)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
        if isinstance(x, nn.Parameter):  # a learned scale, made positive by a function
            return None
        gate = function if isinstance(function, nn.Module) else FunctionModule(function, args[1:], rest)
        if gate._get_name().endswith("_") or any(map(torch.is_tensor, pytree.tree_leaves(vars(gate)))):
            return None
        form = form_of_activation(gate) if shape is None or shape == x.shape else None
        return gate if form is not None and form.kind in self._kinds else None

    def _locate(self, torch_gate: nn.Module | None, frames: Sequence[FrameType], innermost: int) -> None:
        """Note the place of a call of torch, if it is a gate or a part of one.

            frames[2]   Block.forward   return mix(self.up(x))         the method of a module of the model
            frames[1]   mix             return swish(h) * 2            functions that it calls
            frames[0]   swish           return h * torch.sigmoid(h)    the innermost code of the network's own

        The way down leads from the method's source to `mix(…)` there, and from the source of `mix` to `swish(…)`. It
        ends at the first call that computes a gate as a whole, here `swish(…)`, and else at the call of torch.
        `torch_gate` is the gate that the call of torch computes by itself. It is None for a part of a gate, such as the
        product in `swish`, and for all other calls: then a place that is not found is no error. Frames before the
        number `innermost` are those of a library; here there are none.
        """
        method_around, where = self._method_around(frames), line_of(frames[innermost])
        if method_around is None:
            if torch_gate is not None:
                self.refused.append(where)
            return
        owner, method, at = method_around
        try:
            way = self._way_down(method, at, innermost, frames, torch_gate)
            if way is None:
                return
            chain, numbers, gate, line = way
            call = Call(method.__code__.co_name, tuple(numbers), digest_of(chain, numbers), line, gate._get_name())
        except ValueError as error:
            if torch_gate is not None:
                self.refused.append(f"{where}: {error}")
            return
        self.found[owner].setdefault(call, gate)

    def _way_down(
        self,
        method: FunctionType,
        at: int,
        innermost: int,
        frames: Sequence[FrameType],
        torch_gate: nn.Module | None,
    ) -> tuple[list[FunctionType], list[int], nn.Module, str] | None:
        """(call chain, the number of a call in each, the gate, the line of the last call) from a method's frame `at`.

        None where no call on the way computes a gate. Raises ValueError where the sources do not show the way.
        """
        chain, numbers = [method], list[int]()
        while at > innermost:
            numbers.append(number_of_call(chain[-1], frames[at]))
            function, next_frame = innermost_run(function_called(chain[-1], numbers[-1]), frames[:at])
            whole = self._gate_in_progress(function, frames[next_frame])
            if whole is not None:
                return chain, numbers, whole, line_of(frames[at])
            chain.append(function)
            at = next_frame
        if torch_gate is None:
            return None
        numbers.append(number_of_call(chain[-1], frames[at]))
        return chain, numbers, torch_gate, line_of(frames[at])

    def _method_around(self, frames: Sequence[FrameType]) -> tuple[nn.Module, FunctionType, int] | None:
        """(object, method, number of the frame where the method stands) of the innermost method around the frames.

        The object is a module of the model. The frame is the method's own, or of a function inside it. A method that
        `super()` calls is passed over where the object's class has another one of this name: the way leads down to it.
        """
        for frame in frames:
            first = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()
            owner = frame.f_locals.get(*first) if first else None
            if isinstance(owner, nn.Module) and id(owner) in self._modules:
                held = inspect.getattr_static(type(owner), frame.f_code.co_name, None)
                for method in functions_in(held):
                    if method.__code__ is frame.f_code:
                        return owner, method, innermost_run(method, frames)[1]
        return None

    def _gate_in_progress(self, function: FunctionType, frame: FrameType) -> nn.Module | None:
        """The gate that the function in a frame computes as a whole; none for one with any number of arguments."""
        given = inspect.getargvalues(frame)
        if given.varargs is not None or given.keywords is not None:
            return None
        return self._gate_of(function, (), {name: given.locals[name] for name in given.args})
