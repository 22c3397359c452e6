"""Objects that call modules in the place of functions: a class whose methods are made from the source of theirs.

    class Block:                               class Block(Block):
        def forward(self, x):                      def forward(self, x):
            h = F.gelu(self.up(x))                     h = self.called[0](self.up(x))
            return mix(h, "silu")                      return self._hf_lgelu_calls_forward_2(h, "silu")

    def mix(h, name):                              def _hf_lgelu_calls_forward_2(_owner, h, name):
        return ACT2FN[name](h) * 2                     return _owner.called[1](h) * 2

`called` is a list of modules. The object gets the class at the right, and the user's class stays as it is. A function
that calls an activation is copied as a method of this class. Its name says which call in the source of `forward` calls
it: `self.up(x)` is call 0, `F.gelu(…)` is 1, and `mix(…)` is 2.

The source is changed, and not what a call does while it runs: whatever runs or traces the object then sees the
modules, also `forward` itself, torch.fx, torch.jit and torch.export.

1. `networks/calls` finds a `Call`. It has a call chain: the method, and the function that the method calls, if the
   activation is called there. The chain of the second gate is `forward`, `mix`.
2. `put_gates` gives the object its modules and the other class, `_class_with_gates`.
3. `_add_copy` adds a method with its calls to the class. It edits the source of the whole file and compiles it.
4. `_with_code` puts the new code in the place of the old code, below the method's decorators.
5. A saved `Call` is found again by `chain_of`. The digest tells whether the source has changed.
"""

import abc
import ast
import contextlib
import copy
import functools
import hashlib
import inspect
import io
import itertools
import linecache
from collections.abc import Callable, Iterator, Sequence
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, SupportsIndex, cast

from torch import nn

from hf_lgelu.networks.source import codes_in, content_of, digest_of, function_called, functions_in, source_of

GATES_OF_CALLS = "called"
"""The attribute that holds the gates of an object's calls; no state dict shows it, because no gate has a tensor."""

_CALLS_OF_CLASS = "_hf_lgelu_calls"  # the attribute of the new class, and the first part of its copied functions' names


class Call(NamedTuple):
    """A call of an activation in the source of a method, or of a function that the method calls.

    `numbers` has a number for each function of the call chain, first the method (`networks/source`). `digest` is the
    digest of the numbers and of the sources. `where`, "net.py:12 (Net.forward)", and `function`, the name of the called
    function, are for a reader.
    """

    method: str
    numbers: tuple[int, ...]
    digest: str
    where: str
    function: str


class _Place(NamedTuple):
    """The place of gate `called[gate]`: the call chain from some function on, and the number of a call in each."""

    gate: int
    numbers: tuple[int, ...]
    chain: Sequence[FunctionType]


def put_gates(owner: nn.Module, calls: Sequence[Call], gates: Sequence[nn.Module]) -> Callable[[], None]:
    """Make an object call these modules in the place of its calls. Returns the function that undoes it.

    The object gets another class. Raises ValueError where the code of the object does not have these calls.
    """
    cls: Any = type(owner)
    if calls_of(owner):
        raise ValueError(f"calls of {cls.__name__} are gates already; convert all kinds at once")
    if hasattr(owner, GATES_OF_CALLS):
        raise ValueError(f"{cls.__name__} has an attribute {GATES_OF_CALLS!r}, which has to hold its gates: rename it")
    after = _class_with_gates(cls, tuple(calls))
    # A method in an attribute (`self.run = self.fast`, or by accelerate's hooks) is still bound to the old code.
    own: Any = {function: name for name, function in inspect.getmembers_static(cls, inspect.isfunction)}
    bound = {
        name: held
        for name, held in vars(owner).items()
        if isinstance(held, MethodType) and held.__self__ is owner and held.__func__ in own
    }
    owner.add_module(GATES_OF_CALLS, nn.ModuleList(gates))
    owner.__class__ = after
    for name, held in bound.items():
        vars(owner)[name] = MethodType(getattr(after, own[held.__func__]), owner)

    def undo() -> None:
        owner.__class__ = cls
        vars(owner).update(bound)
        del owner._modules[GATES_OF_CALLS]

    return undo


def calls_of(module: nn.Module) -> tuple[Call, ...]:
    """The calls that `put_gates` has replaced, in the order of their modules."""
    return getattr(type(module), _CALLS_OF_CLASS, ())


def own_class(module: nn.Module) -> Any:
    """The class of a module, as it was before `put_gates`."""
    return next(each for each in type(module).__mro__ if _CALLS_OF_CLASS not in vars(each))


def chain_of(cls: type, call: Call) -> list[FunctionType] | None:
    """The call chain of a call, from a method of the class on; None where sources or numbers have changed."""

    def chains(held: Any, numbers: Sequence[int]) -> Iterator[list[FunctionType]]:
        for function in functions_in(held):
            # A decorator's source may not be known, and a saved record may be damaged.
            with contextlib.suppress(ValueError, IndexError, TypeError):
                _, rest = source_of(function).calls[numbers[0]], numbers[1:]
                below = chains(function_called(function, numbers[0]), rest) if rest else [[]]
                yield from ([function, *chain] for chain in below)

    found = chains(inspect.getattr_static(cls, call.method, None), call.numbers)
    return next((chain for chain in found if digest_of(chain, call.numbers) == call.digest), None)


@functools.lru_cache(512)
def _class_with_gates(cls: type, calls: tuple[Call, ...]) -> type:
    places: dict[str, list[_Place]] = {}
    for gate, call in enumerate(calls):
        chain = chain_of(cls, call)
        if chain is None:
            raise ValueError(
                f"{cls.__name__}.{call.method} has another source than it had when its call of {call.function} at "
                f"{call.where} became a gate, or the record of this call is damaged. Restore that source, or convert "
                "the model again; code that calls ReLU itself loads by its own from_pretrained"
            )
        places.setdefault(call.method, []).append(_Place(gate, call.numbers, chain))

    def reduced(self: Any, protocol: SupportsIndex) -> Any:
        _, _, *state = cast(Any, super)(made, self).__reduce_ex__(protocol)
        return _new, (cls, calls), *state

    body: dict[str, Any] = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {"__reduce_ex__": reduced, _CALLS_OF_CLASS: calls}
    for name in places:
        _add_copy(body, name, inspect.getattr_static(cls, name), places[name])
    # Without the code of a metaclass, which may register the class.
    new: Any = abc.ABCMeta.__new__ if isinstance(cls, abc.ABCMeta) else type.__new__
    made: Any = new(type(cls), cls.__name__, (nn.Module,), body)
    made.__bases__ = (cls,)  # set late, so that no `__init_subclass__` registers it
    return made


def _new(cls: type, calls: tuple[Call, ...]) -> Any:
    """An object without attributes, from which copy and pickle begin."""
    made: Any = _class_with_gates(cls, calls)
    return made.__new__(made)


def _add_copy(body: dict[str, Any], name: str, held: Any, places: Sequence[_Place], is_method: bool = True) -> None:
    """Add a copy of the function `held`, which calls gates at these places, to the body of a class as `name`.

        F.gelu(self.up(x), approximate="tanh")  →  self.called[0](self.up(x))      the chain ends with this call
        mix(h, "silu")                          →  self._hf_lgelu_calls_forward_2(h, "silu")      it goes on
        super().forward(x)                      →  self._hf_lgelu_calls_forward_2(x)      it goes on
        def mix(h, name):                       →  def mix(_owner, h, name):      a function that becomes a method

    The chains of the places begin with `held`, without its decorators. Each line stays where it was. The changed source
    is in `linecache`, where `inspect` and torch.jit read it.
    """
    function = places[0].chain[0]
    source, code = source_of(function), function.__code__
    starts = [0, *itertools.accumulate(map(len, source.file.splitlines(keepends=True)))]

    def span(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    # An edit puts a text in the place of the source from `begin` to `end`. Line breaks there stay, after the text.
    edits: list[tuple[int, int, str]] = []
    owner = code.co_varnames[0] if is_method else "_owner"
    if not is_method:
        opening = source.file.index(b"(", span(source.definition)[0]) + 1
        edits.append((opening, opening, f"{owner}, "))
    for number in dict.fromkeys(place.numbers[0] for place in places):
        call = source.calls[number]
        below = [_Place(gate, tuple(rest), chain[1:]) for gate, (first, *rest), chain in places if first == number]
        own_gate = next((place.gate for place in below if not place.chain), None)
        if own_gate is not None:  # the chain ends here; the gate holds the other arguments
            (begin, end), (x_begin, x_end) = span(call), span(_argument(call))
            edits += [(begin, x_begin, f"{owner}.{GATES_OF_CALLS}[{own_gate}]("), (x_end, end - 1, "")]
        else:
            copied = f"{_CALLS_OF_CLASS}_{name}_{number}"
            edits.append((*span(call.func), f"{owner}.{copied}"))
            # Only `super().forward` has a call before the dot. The parent's method has its `self` already.
            is_parents = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call)
            _add_copy(body, copied, function_called(function, number), below, is_method=is_parents)
    file = source.file
    for begin, end, text in sorted(edits, reverse=True):
        file = file[:begin] + text.encode() + b"\n" * file.count(b"\n", begin, end) + file[end:]
    changed = file.decode()
    path = f"<{GATES_OF_CALLS} {hashlib.sha256(file).hexdigest()[:16]}>/{code.co_filename}"
    linecache.cache[path] = (len(changed), None, io.StringIO(changed).readlines(), path)
    codes = codes_in(compile(changed, path, "exec", dont_inherit=True))
    place_of = (code.co_qualname, code.co_firstlineno)
    own = next(each for each in codes if (each.co_qualname, each.co_firstlineno) == place_of)
    body[name] = _with_code(held, function, own)


def _argument(call: ast.Call) -> ast.expr:
    """The node of the tensor that a call of an activation takes: the first argument, or "input" by name."""
    named = {each.arg: each.value for each in call.keywords}
    given = [*call.args, *([named["input"]] if "input" in named else named.values())]
    if not given or isinstance(given[0], ast.Starred) or None in named:
        raise ValueError(f"line {call.lineno} does not say which argument is the input: {ast.unparse(call)}")
    return given[0]


def _with_code(held: FunctionType, function: FunctionType, code: CodeType) -> FunctionType:
    """A copy of `held` in which `function`, which is `held` or below its decorators, has another code.

    def decorator(func):                    held      wrapper, whose variable `func` is the function
        def wrapper(*args):         →       copy      another wrapper, whose variable `func` is a function with
            return func(*args)                        the other code, and the same variables and defaults
        return wrapper
    """
    cells = dict(zip(held.__code__.co_freevars, held.__closure__ or (), strict=True))
    for name, cell in cells.items():
        if function in functions_in(content_of(cell)):
            cells[name] = CellType(_with_code(cell.cell_contents, function, code))
    own = code if held is function else held.__code__
    closure = tuple(cells[name] for name in own.co_freevars)
    made = FunctionType(own, held.__globals__, held.__name__, held.__defaults__, closure)
    functools.update_wrapper(made, held)
    made.__kwdefaults__ = copy.copy(held.__kwdefaults__)
    # `inspect`, torch.jit and torch.compile look for the source in attributes that hold the decorated function.
    # update_wrapper has set `__wrapped__` to the function itself, whose source is the old one.
    vars(made).pop("__wrapped__")
    inside = {name: each for name, each in vars(held).items() if function in functions_in(each)}
    vars(made).update({name: _with_code(each, function, code) for name, each in inside.items()})
    return made
