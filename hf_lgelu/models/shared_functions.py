"""What a deep copy of a model shares with it: Python copies no function, and a function may know the original.

`self.step = torch.compile(self._step)`, a decorated method, a lambda or a hook that reads the model: in the copy they
go on running the original's modules with the original's weights, whatever becomes of the copy.
"""

import functools
import weakref
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn

_OWN = ("_parameters", "_buffers", "_modules")  # of a module: what a copy has copies of


def shared_function(model: nn.Module, twin: nn.Module) -> str | None:
    """Where `twin`, a deep copy of `model`, holds a function or weak reference that knows a module or tensor of
    `model`: "block.step", or "block._forward_hooks"; None where it holds none.

    Looked at are attributes and hooks of its modules, what these functions close over and are given by default, and
    globals that they name. Objects of other classes are not looked into.
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
