"""A model's own forward, where somebody has put another one on the instance.

accelerate puts autocast around the forward of a model that it prepares (Trainer with bf16 or fp16) and leaves it there:
the trained model then computes otherwise than its weights do when they are loaded again. And a function put there by
hand, such as `torch.compile(model.forward)`, belongs to that one model: a deep copy goes on calling it, and computes
what the original does whatever becomes of the copy.
"""

import copy
import functools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from hf_lgelu.models.example_run import Function, buffers_kept, evaluation_mode
from hf_lgelu.models.operable import require_values_here

Model = TypeVar("Model", bound=nn.Module)

_OWN = ("_parameters", "_buffers", "_modules")  # of a module: what a copy has copies of
_KEPT = "_original_forward"  # where accelerate keeps what it puts its own around


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """Without accelerate's autocast inside; behind, also after an error, with it as before.

    Changes `model` in place, in the meantime. What is no module is left alone.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    held = [(module, {name: vars(module)[name] for name in ("forward", _KEPT)}) for module in modules
            if {"forward", _KEPT} <= vars(module).keys()]  # fmt: skip
    try:
        for module, wrapped in held:
            original = wrapped[_KEPT]
            del module.__dict__["forward"], module.__dict__[_KEPT]
            if getattr(original, "__func__", None) is not type(module).forward:
                module.__dict__["forward"] = original
        yield
    finally:
        for module, wrapped in held:
            module.__dict__.update(wrapped)


@contextmanager
def looked_at(model: nn.Module) -> Iterator[None]:
    """The model as it is, in eval mode, whatever the caller is in; neither its modes nor its buffers change.

    What is compiled (`model.compile()`) runs eagerly inside, for its code looks at no hook; autocast, also what
    accelerate leaves around a model's forward, would put casts between the weights and their use; in inference mode
    nothing has gradients.
    """
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    with ExitStack() as stack:
        stack.enter_context(own_forward(model))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.inference_mode(False))
        if torch.amp.is_autocast_available(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(evaluation_mode(model))
        stack.enter_context(buffers_kept(model))
        yield


def in_own_forward(function: Function) -> Function:
    """Run a function of a model, its first argument, in `own_forward`."""

    @functools.wraps(function)
    def called(model: nn.Module, *args: Any, **options: Any) -> Any:
        with own_forward(model):
            return function(model, *args, **options)

    return cast(Function, called)


def independent_copy(model: Model) -> Model:
    """A deep copy that computes with its own weights, without accelerate's autocast.

    Raises RuntimeError for a forward on an instance that the copy would share with the original, and for another
    function that knows the original (`_shared_function`), or where accelerate keeps a part of the values elsewhere.
    """
    require_values_here(model.named_modules())
    with own_forward(model):
        twin = copy.deepcopy(model)
        pairs = zip(model.named_modules(), twin.modules(), strict=True)
        shared = [name for (name, module), other in pairs
                  if "forward" in vars(module) and vars(module)["forward"] is vars(other).get("forward")]  # fmt: skip
        known_to = _shared_function(model, twin)
    if shared:
        where = f"its module {shared[0]!r}" if shared[0] else "it"
        raise RuntimeError(
            f"{type(model).__name__} cannot be copied: {where} has a function in the place of its forward, and a copy "
            "would go on running the original. After model.forward = torch.compile(model.forward), undo it with "
            "`del model.forward`; model.compile() compiles without that"
        )
    if known_to is not None:
        raise RuntimeError(
            f"{type(model).__name__} cannot be copied: {known_to} holds a function that knows a module or tensor of "
            "the model from elsewhere (a closure, torch.compile or a decorator of a bound method, a hook), and a copy "
            "would go on running the original. Make it a method, decorate or compile it in the class, or remove the "
            "hook"
        )
    return twin


def _shared_function(model: nn.Module, twin: nn.Module) -> str | None:
    """Where `twin`, a deep copy of `model`, holds a function or weak reference that knows a module or tensor of
    `model`: "block.step", or "block._forward_hooks"; None where it holds none.

    Python copies no function: `self.step = torch.compile(self._step)`, a decorated method, a lambda or a hook that
    reads the model goes on running the original's modules. Looked at are attributes and hooks of its modules, what
    these functions close over and are given by default, and globals that they name. Objects of other classes are not
    looked into.
    """
    originals = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for name, module in twin.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _OWN and _reaches(value, originals):
                return f"{name}.{attribute}" if name else attribute
    return None


def _reaches(value: Any, originals: set[int]) -> bool:
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if id(value) in originals:
            return True
        if id(value) not in seen:
            seen.add(id(value))
            left += _known_to(value, originals)
    return False


def _known_to(value: Any, originals: set[int]) -> Iterator[Any]:
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # nothing was put into it
                continue
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from vars(value).values()  # what it wraps
        named = (value.__globals__.get(name) for name in value.__code__.co_names)
        yield from (found for found in named if id(found) in originals)
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
