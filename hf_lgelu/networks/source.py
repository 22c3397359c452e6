"""Python functions: those below a decorator, the calls in their source by number, and the frames that run now.

The calls of a function are counted in the order in which they end. Here `up` is 0, `gelu` 1 and `mix` 2:

    def forward(self, x):
        return mix(F.gelu(self.up(x)), "silu")
"""

import ast
import functools
import hashlib
import inspect
import io
import itertools
import linecache
import sys
import tokenize
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from torch import nn

LIBRARIES = ("torch.", "hf_lgelu.", "transformers.activations", "timm.layers.activations")
"""The first parts of module names whose frames are not a network's own code."""

RUN_OF_A_MODULE = nn.Module._call_impl.__code__  # its frames have the module as `self`


class Source(NamedTuple):
    """The whole file with a function, in UTF-8, and the function's definition and calls in it.

    `words` is the function's source without comments and blanks, but with its lines and blocks.
    """

    file: bytes
    definition: ast.FunctionDef
    calls: list[ast.Call]
    words: str


@functools.lru_cache(512)
def source_of(function: FunctionType) -> Source:
    """The source of a function without its decorators. Raises ValueError where it is not that of the code that runs."""
    code = function.__code__  # equal codes may come from several files
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
    text = "".join(marks.get(word.type, "".join(word.string.split())) for word in words)
    calls = [node for node in ast.walk(definition) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.end_lineno, call.end_col_offset))
    return Source(file.encode(), definition, calls, text)


@functools.lru_cache(8)
def _parsed(file: str, name: str) -> tuple[ast.Module, frozenset[CodeType]]:
    """The tree of a file's source, and all codes in it: modeling files have dozens of methods and many lines."""
    tree = ast.parse(file)
    return tree, frozenset(codes_in(compile(tree, name, "exec", dont_inherit=True)))


def number_of_call(function: FunctionType, frame: FrameType) -> int:
    """The number of the call at which a frame of the function, or of a function inside it, stands now.

    Raises ValueError where the source does not show it.
    """
    # An instruction has two bytes, and `co_positions` an entry for each instruction.
    _, end, _, end_column = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    for number, call in enumerate(source_of(function).calls):
        if (call.end_lineno, call.end_col_offset) == (end, end_column):
            return number
    raise ValueError(f"no call is known at line {end} of {function.__code__.co_qualname}")


def function_called(function: FunctionType, number: int) -> FunctionType:
    """The function that a call in another function names, with its decorators.

    It is a function of a file, `mix(h)` or `ops.mix(h)`, or a parent's method, `super().forward(x)`. Raises ValueError
    for all other calls: of methods, of variables, of what another call gives.
    """
    held, code = None, function.__code__
    variables = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    match source_of(function).calls[number].func:
        case ast.Name(name) if name not in variables:
            held = function.__globals__.get(name)
        case ast.Attribute(ast.Name(name), attribute) if name not in variables:
            held = inspect.getattr_static(function.__globals__.get(name), attribute, None)
        case ast.Attribute(ast.Call(ast.Name("super"), []), attribute) if "__class__" in code.co_freevars:
            cell = (function.__closure__ or ())[code.co_freevars.index("__class__")]
            parents = (vars(parent) for parent in content_of(cell).__mro__[1:])
            held = next((parent[attribute] for parent in parents if attribute in parent), None)
    if not isinstance(held, FunctionType):
        raise ValueError("the source does not say which function runs")
    return held


def digest_of(chain: Sequence[FunctionType], numbers: Sequence[int]) -> str:
    """A digest of functions and of the number of a call in each; it changes with their sources."""
    sources = (f"{number} {source_of(function).words}" for number, function in zip(numbers, chain, strict=True))
    return hashlib.sha256(" ".join(sources).encode()).hexdigest()[:16]


def functions_in(held: Any) -> Iterator[FunctionType]:
    """A function and the functions that it wraps as their decorator."""
    left, seen = [held], set[int]()
    while left:
        function = left.pop(0)
        if isinstance(function, FunctionType) and id(function) not in seen:
            seen.add(id(function))
            yield function
            left += map(content_of, function.__closure__ or ())


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code, and the codes of the functions that are defined inside it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes_in(each)


def content_of(cell: CellType) -> Any:
    """The content of a function's variable, or None."""
    return None if cell == CellType() else cell.cell_contents  # a cell is empty until its variable has a value


def innermost_run(held: FunctionType, frames: Sequence[FrameType]) -> tuple[FunctionType, int]:
    """(the function that runs, the number of its innermost frame) of a function and those that it decorates.

    Raises ValueError where no frame runs one of these.
    """
    for function in reversed([*functions_in(held)]):  # decorators of several functions have the same code
        codes = set(codes_in(function.__code__))
        for number, frame in enumerate(frames):
            if frame.f_code in codes:
                return function, number
    raise ValueError("the source does not say which function runs")


def line_of(frame: FrameType) -> str:
    """The place of a frame, for a reader: "net.py:12 (Net.forward)"."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_qualname})"


def frames_inside(modules: Collection[int] | None = None) -> tuple[nn.Module | None, list[FrameType]]:
    """(the innermost module that runs now, of those with the ids `modules` if given; its frames, innermost first).

    Outside of all modules, as in a `__call__` of a network's own, it is None and every frame.
    """
    frame: FrameType | None = sys._getframe(1)
    frames: list[FrameType] = []
    while frame is not None:
        if frame.f_code is RUN_OF_A_MODULE and (modules is None or id(frame.f_locals["self"]) in modules):
            return frame.f_locals["self"], frames
        frames.append(frame)
        frame = frame.f_back
    return None, frames
