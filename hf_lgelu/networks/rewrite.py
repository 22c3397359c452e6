"""Methods that call modules in the place of functions, made from the source of a class's methods.

    class Block:                               class Block(Block):
        def forward(self, x):                      def forward(self, x):
            h = F.gelu(self.up(x))                     h = self.called[0](self.up(x))
            return mix(h, "silu")                      return self._hf_lgelu_calls_forward_2(h, "silu")

    def mix(h, name):                              def _hf_lgelu_calls_forward_2(_owner, h, name):
        return ACT2FN[name](h) * 2                     return _owner.called[1](h) * 2

`called` is a list of modules. A function that calls an activation is copied: this one is called by call 2 in the
source of `forward`. Lines keep their numbers. The object gets the class at the right; the user's class stays as it is.

Everything that runs or traces an object with these methods sees the modules: `forward` itself, torch.fx, torch.jit and
torch.export. So the source is changed, and not what a call does while it runs.

1. While the model runs, `calls` finds a call: `method_in` names the method that runs, `call_at` the call in its source,
   and `called_by` the function that a call names. This gives the call chain: the method, and the functions from there
   to the call of the activation. Here the chain of the second gate is `forward`, `mix`.
2. `put_gates` gives the object its modules and another class, `_class_with_gates`.
3. `_add_copy` adds each method with these calls to this class. It edits the source of the whole file, compiles it, and
   takes the code of the method. A function of a call chain becomes a method in the same way.
4. `_with_code` puts this code in the place of the old code, below the method's decorators.
5. Copies of the object have the same class (`_new`). A conversion then puts ReLU at `called.K`, as at any other gate.
6. A saved `Call` is found again by `chain_of`, which tells by the digest whether the source has changed.
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
import tokenize
from collections.abc import Callable, Iterator, Sequence
from types import CellType, CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple, SupportsIndex, cast

from torch import nn

from hf_lgelu.networks.elementwise import codes_in, content_of, functions_in

CALLED = "called"
"""The attribute that holds the modules of an object's calls; no state dict shows it, because no gate has a tensor."""

_CALLS = "_hf_lgelu_calls"


class Call(NamedTuple):
    """A call in the source of a method, or of a function that the method calls.

    `numbers` has a number for each function of the call chain, first the method: it counts the calls in the function's
    source in the order in which they end. `digest` is the digest of the numbers and of the sources, without comments
    and blanks but with their lines and blocks. `where`, "net.py:12 (Net.forward)", and `function`, the name of the
    called function, are for a reader.
    """

    method: str
    numbers: tuple[int, ...]
    digest: str
    where: str
    function: str


class _Source(NamedTuple):
    """The source of the file with a method, and the method's definition and calls in it; `bare` goes into digests."""

    file: bytes
    definition: ast.FunctionDef
    calls: list[ast.Call]
    bare: str


def method_in(module: nn.Module, frame: FrameType) -> tuple[str, FunctionType] | None:
    """(name, function) of the method of `module` that runs in a frame, without decorators; None for other frames."""
    name = frame.f_code.co_name
    private = [f"_{cls.__name__.lstrip('_')}{name}" for cls in type(module).__mro__ if name.startswith("__")]
    for attribute in (name, *private):
        for function in functions_in(inspect.getattr_static(type(module), attribute, None)):
            if function.__code__ is frame.f_code:
                return attribute, function
    return None


def call_at(function: FunctionType, frame: FrameType) -> tuple[int, ast.Call]:
    """(number, node) of the call at which a frame stands: the frame of a function, or of a function inside it.

    Raises ValueError where the function's source, or the call's place in it, is not known.
    """
    # An instruction has two bytes, and `co_positions` an entry for each instruction.
    _, end, _, end_column = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    for number, call in enumerate(_source(function).calls):
        if (call.end_lineno, call.end_col_offset) == (end, end_column):
            return number, call
    raise ValueError(f"no call is known at line {end} of {function.__code__.co_qualname}")


def digest_of(chain: Sequence[FunctionType], numbers: Sequence[int]) -> str:
    """The digest of a call: a record whose number names another call of the same source has another digest."""
    sources = (f"{number} {_source(function).bare}" for number, function in zip(numbers, chain, strict=True))
    return hashlib.sha256(" ".join(sources).encode()).hexdigest()[:16]


def called_by(function: FunctionType, call: ast.Call, cls: type) -> FunctionType | None:
    """The function that a call in the source of `function` names, with its decorators; None where it does not say.

    It is a function of a file, a static method, or a method of a parent class of `cls` (`super().forward(x)`).
    """
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def named(name: str) -> Any:
        return content_of(cells[name]) if name in cells else function.__globals__.get(name)

    held: Any = None
    match call.func:
        case ast.Name(name):
            held = named(name)
        case ast.Attribute(ast.Name(name), attribute):
            is_own = name in function.__code__.co_varnames[:1] and attribute in dir(cls)
            held = inspect.getattr_static(cls if is_own else named(name), attribute, None)
            # A method of its own has a frame that `_method_around` finds. A class method takes the class, too.
            held = held.__func__ if isinstance(held, staticmethod) else None if is_own else held
        case ast.Attribute(ast.Call(ast.Name("super"), given), attribute):
            base = named(given[0].id if given and isinstance(given[0], ast.Name) else "__class__")
            parents = cls.__mro__[cls.__mro__.index(base) + 1 :] if base in cls.__mro__ else ()
            held = next((vars(parent)[attribute] for parent in parents if attribute in vars(parent)), None)
    return held if isinstance(held, FunctionType) else None


def put_gates(owner: nn.Module, calls: Sequence[Call], gates: Sequence[nn.Module]) -> Callable[[], None]:
    """Make an object call these modules, `called.K`, in the place of its calls. Returns the function that undoes it.

    The object gets another class. Raises ValueError where the code of the object does not have these calls.
    """
    if hasattr(owner, CALLED):
        why = "are gates already; convert all kinds at once" if calls_of(owner) else f"need its attribute {CALLED!r}"
        raise ValueError(f"calls of {type(owner).__name__} {why}")
    cls: Any = type(owner)
    # A method in an attribute (`self.run = self.fast`, or by accelerate's hooks) is still bound to the old code.
    own: Any = {function: name for name, function in inspect.getmembers_static(cls, inspect.isfunction)}
    bound = {
        name: held
        for name, held in vars(owner).items()
        if isinstance(held, MethodType) and held.__self__ is owner and held.__func__ in own
    }
    after = _class_with_gates(cls, tuple(calls))
    owner.add_module(CALLED, nn.ModuleList(gates))
    owner.__class__ = after
    for name, held in bound.items():
        vars(owner)[name] = MethodType(getattr(type(owner), own[held.__func__]), owner)

    def undo() -> None:
        owner.__class__ = cls
        vars(owner).update(bound)
        del owner._modules[CALLED]

    return undo


def calls_of(module: nn.Module) -> tuple[Call, ...]:
    """The calls that `put_gates` has replaced, in the order of their modules."""
    return getattr(type(module), _CALLS, ())


def own_class(module: nn.Module) -> Any:
    """The class of a module, as it was before `put_gates`."""
    return next(each for each in type(module).__mro__ if _CALLS not in vars(each))


@functools.lru_cache(512)
def _source(method: FunctionType) -> _Source:
    code = method.__code__  # equal codes may come from several files
    linecache.checkcache(code.co_filename)
    file = "".join(linecache.getlines(code.co_filename))
    tree, codes = _parsed(file, code.co_filename)
    if code not in codes:
        raise ValueError(
            f"the source of {code.co_qualname} is not that of the code that runs: {code.co_filename} is not there, or "
            "it has changed since it was imported"
        )
    definitions = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name == code.co_name
        and min([node.lineno, *(each.lineno for each in node.decorator_list)]) == code.co_firstlineno
    )
    definition = next(definitions, None)
    if definition is None:
        raise ValueError(f"{code.co_qualname} is defined without a name")
    words = tokenize.generate_tokens(io.StringIO(ast.get_source_segment(file, definition)).readline)
    # A statement that moves into a loop changes only white space, and is another network.
    marks = {tokenize.COMMENT: "", tokenize.INDENT: "{", tokenize.DEDENT: "}", tokenize.NEWLINE: "\n"}
    bare = "".join(marks.get(word.type, "".join(word.string.split())) for word in words)
    calls = [node for node in ast.walk(definition) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.end_lineno, call.end_col_offset))
    return _Source(file.encode(), definition, calls, bare)


@functools.lru_cache(8)
def _parsed(file: str, name: str) -> tuple[ast.Module, frozenset[CodeType]]:
    """The tree of a file's source, and all codes in it: modeling files have dozens of methods and many lines."""
    tree = ast.parse(file)
    return tree, frozenset(codes_in(compile(tree, name, "exec", dont_inherit=True)))


def _argument(call: ast.Call) -> ast.expr:
    """The node of the tensor that a call of an activation takes: the first argument, or "input" by name."""
    named = {each.arg: each.value for each in call.keywords}
    given = [*call.args, *([named["input"]] if "input" in named else named.values())]
    if not given or isinstance(given[0], ast.Starred) or None in named:
        raise ValueError(f"line {call.lineno} does not say which argument is the input: {ast.unparse(call)}")
    return given[0]


def chain_of(cls: type, call: Call) -> list[FunctionType] | None:
    """The call chain of a call, from a method of the class on; None where sources or numbers have changed."""

    def chains(held: Any, numbers: Sequence[int]) -> Iterator[list[FunctionType]]:
        for function in functions_in(held):
            # A decorator's source may not be known, and a saved record may be damaged.
            with contextlib.suppress(ValueError, IndexError, TypeError):
                node, rest = _source(function).calls[numbers[0]], numbers[1:]
                below = chains(called_by(function, node, cls), rest) if rest else [[]]
                yield from ([function, *chain] for chain in below)

    found = chains(inspect.getattr_static(cls, call.method, None), call.numbers)
    return next((chain for chain in found if digest_of(chain, call.numbers) == call.digest), None)


@functools.lru_cache(512)
def _class_with_gates(cls: type, calls: tuple[Call, ...]) -> type:
    body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    places: dict[str, dict[tuple[int, ...], Any]] = {}
    for place, call in enumerate(calls):
        chain = chain_of(cls, call)
        if chain is None:
            raise ValueError(
                f"{cls.__name__}.{call.method} has another source than it had when its call of {call.function} at "
                f"{call.where} became a gate, or the record of this call is damaged. Restore that source, or convert "
                "the model again; code that calls ReLU itself loads by its own from_pretrained"
            )
        places.setdefault(call.method, {})[call.numbers] = place, chain
    for name in places:
        _add_copy(body, cls, name, inspect.getattr_static(cls, name), places[name])

    def reduced(self: Any, protocol: SupportsIndex) -> Any:
        _, _, *state = cast(Any, super)(made, self).__reduce_ex__(protocol)
        return _new, (cls, calls), *state

    body |= {"__reduce_ex__": reduced, _CALLS: calls}
    # Without the code of a metaclass, which may register the class.
    new: Any = abc.ABCMeta.__new__ if isinstance(cls, abc.ABCMeta) else type.__new__
    made: Any = new(type(cls), cls.__name__, (nn.Module,), body)
    made.__bases__ = (cls,)  # set late, so that no `__init_subclass__` registers it
    return made


def _new(cls: type, calls: tuple[Call, ...]) -> Any:
    """An object without attributes, from which copy and pickle begin."""
    made: Any = _class_with_gates(cls, calls)
    return made.__new__(made)


def _with_code(function: FunctionType, method: FunctionType, code: CodeType) -> FunctionType:
    """A copy of a function in which `method` has another code: the function itself, or one below its decorators."""
    copies: dict[FunctionType, FunctionType] = {}

    def copied(function: FunctionType) -> FunctionType:
        if function in copies:
            return copies[function]  # a decorator's function may refer to itself
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        inside = {name: cell.cell_contents for name, cell in cells.items() if method in functions_in(content_of(cell))}
        cells |= {name: CellType() for name in inside}
        own = code if function is method else function.__code__
        closure = tuple(cells[name] for name in own.co_freevars)
        made = FunctionType(own, function.__globals__, function.__name__, function.__defaults__, closure)
        copies[function] = made
        functools.update_wrapper(made, function)
        made.__kwdefaults__ = copy.copy(function.__kwdefaults__)
        for name, held in inside.items():
            cells[name].cell_contents = copied(held)
        # `inspect`, torch.jit and torch.compile look for the source in attributes that hold the decorated function.
        # update_wrapper has set `__wrapped__` to the function itself, whose source is the old one.
        vars(made).pop("__wrapped__")
        vars(made).update({name: copied(held) for name, held in vars(function).items() if method in functions_in(held)})
        return made

    return copied(function)


def _add_copy(body: dict[str, Any], cls: type, name: str, held: Any, places: Any, is_method: bool = True) -> None:
    """Add the method `name`, a copy of `held` that calls gates `self.called[place]`, to the body of a class.

    `places` is {numbers of a call: (place of its gate, its call chain)}, both from `held` on. A function of the chain
    becomes a method as well, with the object as a further argument. Each line stays where it was. The changed source is
    in `linecache`, where `inspect` and torch.jit read it.
    """
    function = next(iter(places.values()))[1][0]
    source, code = _source(function), function.__code__
    starts = [0, *itertools.accumulate(map(len, source.file.splitlines(keepends=True)))]
    arguments = source.definition.args
    owner = [*arguments.posonlyargs, *arguments.args][0].arg if is_method else "_owner"

    def span(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    opening = source.file.index(b"(", span(source.definition)[0]) + 1
    # An edit puts two texts in the place of the source from `first` to `last`, around the line breaks that were there.
    edits = [] if is_method else [(opening, opening, f"{owner}, ", "")]
    for number in dict.fromkeys(numbers[0] for numbers in places):
        call = source.calls[number]
        below = {numbers[1:]: (place, chain[1:]) for numbers, (place, chain) in places.items() if numbers[0] == number}
        if () in below:  # the chain ends here: this call is that of the activation
            (begin, end), (x_begin, x_end) = span(call), span(_argument(call))
            edits += [(begin, x_begin, f"{owner}.{CALLED}[{below[()][0]}](", ""), (x_end, end, "", ")")]
        else:  # this call leads to the activation, by the function that it calls
            copied, is_parents = f"{_CALLS}_{name}_{number}", ast.unparse(call.func).startswith("super(")
            edits.append((*span(call.func), f"{owner}.{copied}", ""))
            _add_copy(body, cls, copied, called_by(function, call, cls), below, is_parents)
    file = source.file
    for first, last, before, after in sorted(edits, reverse=True):
        lines = b"\n" * file.count(b"\n", first, last)
        file = b"".join([file[:first], before.encode(), lines, after.encode(), file[last:]])
    changed = file.decode()
    path = f"<{CALLED} {hashlib.sha256(file).hexdigest()[:16]}>/{code.co_filename}"
    linecache.cache[path] = (len(changed), None, io.StringIO(changed).readlines(), path)
    codes = codes_in(compile(changed, path, "exec", dont_inherit=True))
    place_of = (code.co_qualname, code.co_firstlineno)
    own = next(each for each in codes if (each.co_qualname, each.co_firstlineno) == place_of)
    body[name] = _with_code(held, function, own)
