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
    """The compiled loop, built on the first call of the process; or the reason why there is none, which is logged."""
    return open_library("rows", SOURCE.with_name("rows.cpp"), _loop, "Maps around ReLUs are read whole")


def _loop(library: ctypes.CDLL) -> Callable[..., None]:
    loop = library.live_rows_float32
    loop.argtypes, loop.restype = (*[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 7, ctypes.c_int), None
    return loop


def run_rows(
    x: Tensor | None,
    gates: Tensor | None,
    up: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """bias + Σ gate·(up·x + up_bias)·down over the units whose gate is not zero, or a part of this sum.

    Without `x` and `up` it is bias + Σ gate·down; without `gates` and `down` it is up·x + up_bias. `x` and `gates` hold
    one token. `up` and `down` have one row per unit. All tensors are float32.
    """
    given = cast(Tensor, x if gates is None else gates)
    units, outputs = (len(cast(Tensor, up)), 0) if down is None else down.shape
    y = given.new_empty(*given.shape[:-1], outputs or units)
    parts = [part if part is None else part.contiguous() for part in (x, gates, up, up_bias, down, bias, y)]
    addresses = [part if part is None else part.data_ptr() for part in parts]
    loop = cast(Callable[..., None], load_loop())
    loop(units, 0 if up is None else up.shape[1], outputs, *addresses, torch.get_num_threads())
    return y
