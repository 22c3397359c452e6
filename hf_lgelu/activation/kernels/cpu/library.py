"""The compiled kernel, loaded into the process."""

import ctypes
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_lgelu.activation.kernels.cpu.build import build_library
from hf_lgelu.activation.kernels.layout import Loops

logger = logging.getLogger(__name__)

MAX_AXES = 8
_MAX_OPERANDS = 4
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class LoopsArgument(ctypes.Structure):
    """`Loops` as the C++ side reads it."""

    _fields_ = (
        ("axes", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * MAX_AXES),
        ("strides", (ctypes.c_int64 * MAX_AXES) * _MAX_OPERANDS),
    )

    @classmethod
    def of(cls, loops: Loops) -> "LoopsArgument":
        argument = cls(axes=len(loops.sizes))
        argument.sizes[: len(loops.sizes)] = loops.sizes
        for row, strides in zip(argument.strides, loops.strides, strict=False):
            row[: len(strides)] = strides
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
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise RuntimeError(
                f"the compiled kernel cannot be loaded; delete {path} to build it anew ({error})"
            ) from error

        def functions(name: str, *arguments: type) -> dict[torch.dtype, Callable[..., None]]:
            found = {dtype: getattr(library, f"lambda_gelu_{name}_{suffix}") for dtype, suffix in DTYPES.items()}
            for function in found.values():
                function.argtypes, function.restype = (*arguments, ctypes.c_int), None
            return found

        return cls(
            path,
            functions("forward", _loops, *(_pointer,) * 3),
            functions("backward", _loops, ctypes.c_int64, *(_pointer,) * 5),
        )


_lock = threading.Lock()
_library: Library | None = None
_failure: str | None = None


def load_library() -> Library | None:
    """The compiled kernel, built on the first call of the process; None where that failed.

    A failure is logged in one line, once; `load_failure` tells what it was.
    """
    if _library is None and _failure is None:
        with _lock:
            _try_to_load()
    return _library


def load_failure() -> str | None:
    """Why there is no compiled kernel, or None if there is one. Builds it if need be."""
    return _failure if load_library() is None else None


def _try_to_load() -> None:
    global _library, _failure
    if _library is not None or _failure is not None:
        return
    try:
        _library = Library.load(build_library())
    except RuntimeError as error:
        _failure = str(error)
        logger.warning(
            "λ-GELU runs on torch's own operations, which are slower: its C++ kernel is not to be had: %s",
            _failure.splitlines()[0],
        )
