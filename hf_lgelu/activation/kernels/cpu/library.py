"""The compiled kernels, one library a gate, loaded into the process."""

import ctypes
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_lgelu.activation.kernels.cpu.build import build_library

logger = logging.getLogger(__name__)

MAX_AXES = 8
_MAX_OPERANDS = 4
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
GATES = ("lambda_gelu", "lambda_gelu_tanh", "lambda_silu")
"""The structs of formulas.h."""


class LoopsArgument(ctypes.Structure):
    """Nested loops over the elements of several operands of one shape, as the C++ side reads them."""

    _fields_ = (
        ("axes", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * MAX_AXES),
        ("strides", (ctypes.c_int64 * MAX_AXES) * _MAX_OPERANDS),
    )

    @classmethod
    def of(cls, sizes: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> "LoopsArgument":
        """Of the sizes of the loops, the innermost last, and each operand's steps per loop in elements."""
        argument = cls(axes=len(sizes))
        argument.sizes[: len(sizes)] = sizes
        for row, steps in zip(argument.strides, strides, strict=False):
            row[: len(steps)] = steps
        return argument


_pointer, _loops = ctypes.c_void_p, ctypes.POINTER(LoopsArgument)


@dataclass(frozen=True)
class Library:
    """The functions of the compiled kernel, by the dtype of x.

    Attributes:
        path: the shared library.
        forward: (loops over x, λ, y; x, λ, y; threads).
        backward: (loops over x, δ, λ, dx; the axis along which λ varies or -1; x, δ, λ, dx, sums; threads),
            with dx or the sums 0 where they are not wanted.
    """

    path: Path
    forward: dict[torch.dtype, Callable[..., None]]
    backward: dict[torch.dtype, Callable[..., None]]

    @classmethod
    def load(cls, path: Path) -> "Library":
        """Raises RuntimeError where the file is no library of this kernel."""
        try:
            library = ctypes.CDLL(str(path))

            def functions(name: str, *arguments: type) -> dict[torch.dtype, Callable[..., None]]:
                found = {dtype: getattr(library, f"lambda_gate_{name}_{suffix}") for dtype, suffix in DTYPES.items()}
                for function in found.values():
                    function.argtypes, function.restype = (*arguments, ctypes.c_int), None
                return found

            forward = functions("forward", _loops, *(_pointer,) * 3)
            return cls(path, forward, functions("backward", _loops, ctypes.c_int64, *(_pointer,) * 5))
        except (OSError, AttributeError) as error:
            raise RuntimeError(
                f"the compiled kernel cannot be loaded; delete {path} to build it anew ({error})"
            ) from error


_lock = threading.Lock()
_libraries: dict[str, Library | str] = {}
"""Gate → its library, or why there is none."""


def load_library(gate: str) -> Library | str:
    """The compiled kernel of a gate, built on the first call of the process; or why there is none, which is logged."""
    found = _libraries.get(gate)
    if found is None:
        with _lock:
            found = _libraries.get(gate)
            if found is None:
                found = _libraries[gate] = _try_to_load(gate)
    return found


def _try_to_load(gate: str) -> Library | str:
    try:
        return Library.load(build_library(gate))
    except RuntimeError as error:
        # Another gate fails for the same reason, which has been told.
        if not any(isinstance(found, str) for found in _libraries.values()):
            logger.warning(
                "λ-gates run on torch's own operations, which are slower: their C++ kernel is not to be had: %s",
                str(error).splitlines()[0],
            )
        return str(error)
