"""The maps around a ReLU at one token, by the compiled loop of `rows.cpp`, which reads the live units' rows alone."""

import ctypes
import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from hf_lgelu.activation.kernels.cpu.build import SOURCE
from hf_lgelu.activation.kernels.cpu.function import open_library


@functools.cache
def load_loop() -> Callable[..., None] | str:
    """The compiled loop, built on the first call of the process; or why there is none, which is logged."""
    return open_library("rows", SOURCE.with_name("rows.cpp"), _loop, "Maps around ReLUs are read whole")


def _loop(library: ctypes.CDLL) -> Callable[..., None]:
    loop = library.live_rows_float32
    loop.argtypes, loop.restype = (*[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 7, ctypes.c_int), None
    return loop


def apply_rows(x: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    """rows·x + bias of one token x. All tensors here are float32, and rows are contiguous."""
    return _run(x.new_empty(*x.shape[:-1], len(rows)), x, None, rows, bias, None, None)


def sum_live_rows(
    gates: Tensor,
    down: Tensor,
    bias: Tensor | None,
    others: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> Tensor:
    """bias + Σ gate·down over the units whose gate is not zero; with others = (x, up, b), Σ gate·(up·x + b)·down.

    `gates` and `x` hold one token. `up` and `down` have a row a unit.
    """
    x, up, up_bias = others
    return _run(gates.new_empty(*gates.shape[:-1], down.shape[1]), x, gates, up, up_bias, down, bias)


def _run(y: Tensor, x: Tensor | None, gates: Tensor | None, up: Tensor | None, *others: Tensor | None) -> Tensor:
    parts = [part if part is None else part.contiguous() for part in (x, gates, up, *others, y)]
    units = y.shape[-1] if gates is None else gates.shape[-1]
    addresses = [part if part is None else part.data_ptr() for part in parts]
    loop = cast(Callable[..., None], load_loop())
    loop(units, 0 if up is None else up.shape[1], y.shape[-1], *addresses, torch.get_num_threads())
    return y
