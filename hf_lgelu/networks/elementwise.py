"""The function that an activation computes, read from its values on a grid of inputs.

No class is known here. A function or module that looks at one element at a time is an activation, and its values tell
its kind.
"""

import copy
import math
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.networks.run import same_randomness

_NEAR = torch.linspace(-8, 8, 129, device="cpu")
_FAR = torch.tensor([16.0, 32.0, 64.0, 80.0, 1e3, 1e4], device="cpu")
_GRID = torch.cat([_NEAR, _FAR, -_FAR])  # large values come last, so that the first half has none
_PLACES = {value: place for place, value in enumerate(_GRID.tolist())}
_FINITE_UP_TO = 80.0  # exp overflows from 89 on in float32, in formulas that people spell out
_CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # a user's formula may compute in float32, whatever its input


@dataclass(frozen=True)
class Form:
    """An elementwise function: its kind, its name in transformers, and its values.

    `values` takes the inputs and a function that gives the value at one input: a slope or scale may be read there.
    """

    kind: str
    name: str
    values: Callable[[Tensor, Callable[[float], float]], Tensor]


_OTHER = Form("other", "", lambda x, at: x)
_FORMS = (
    Form("relu", "relu", lambda x, at: x.relu()),
    Form("relu6", "relu6", lambda x, at: F.relu6(x)),
    Form("gelu", "gelu", lambda x, at: F.gelu(x)),
    Form("gelu", "gelu_pytorch_tanh", lambda x, at: F.gelu(x, approximate="tanh")),
    Form("gelu", "quick_gelu", lambda x, at: x * torch.sigmoid(1.702 * x)),
    Form("silu", "silu", lambda x, at: F.silu(x)),
    Form("mish", "mish", lambda x, at: F.mish(x)),
    Form("hardswish", "hardswish", lambda x, at: F.hardswish(x)),
    Form("leaky_relu", "leaky_relu", lambda x, at: torch.where(x > 0, x, -at(-1.0) * x)),
    Form("elu", "elu", lambda x, at: torch.where(x > 0, x, -at(-1e4) * torch.expm1(x))),
    Form("selu", "selu", lambda x, at: F.selu(x)),
    Form("celu", "celu", lambda x, at: torch.where(x > 0, x, -at(-1e4) * torch.expm1(-x / at(-1e4)))),
    Form("softplus", "softplus", lambda x, at: F.softplus(x, beta=math.log(2) / at(0.0)) if at(0.0) > 0 else x),
    Form("tanh", "tanh", lambda x, at: x.tanh()),
    Form("sigmoid", "sigmoid", lambda x, at: x.sigmoid()),
    Form("softsign", "softsign", lambda x, at: F.softsign(x)),
)

CONVERTED_KINDS: tuple[str, ...] = (
    *("gelu", "silu", "mish", "hardswish", "leaky_relu", "prelu", "elu", "selu", "celu", "softplus", "other"),
)
"""The kinds that ReLU can replace: linear far above zero, and linear far below zero with a smaller slope, 0 or more.
"other" is a function without a name that does so; "prelu" is a leaky ReLU with slopes of its own."""

BOUNDED_KINDS: tuple[str, ...] = ("tanh", "sigmoid", "softsign")
"""The kinds that ReLU can replace only where inputs are small; they are taken when they are named."""


def elementwise_values(function: Callable[[Tensor], Tensor], channels: int = 1) -> Tensor | None:
    """The values of a function on a grid, in float64, or None if it is not elementwise, or not finite (a square root).

    An elementwise function gives the same for each element in another order, in a part of the tensor, and in each shape
    that it takes. `channels` is the size of axis 1 and of the last axis of its inputs.
    """
    columns, values = channels if channels > 1 else 8, None
    for inner in ((), (2, 2)) if channels > 1 else ((),):
        size = columns * math.prod(inner)
        rows = max(2, -(-len(_GRID) // size))
        grid_place = torch.arange(rows * size, device="cpu") * len(_GRID) // (rows * size)
        x = _GRID[grid_place].view(rows, columns, *inner)
        order = torch.randperm(x.numel(), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        alike = partial(torch.allclose, rtol=1e-5, atol=1e-6, equal_nan=True)
        with _alone(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:  # copies, because in-place operations would change them
                whole = function(x.clone())
                mixed = function(x.flatten()[order].view_as(x))
                part = function(x[: rows // 2].clone())
                if not whole.is_floating_point() or (whole.shape, part.shape) != (x.shape, x[: rows // 2].shape):
                    continue
                if not (alike(mixed.flatten(), whole.flatten()[order]) and alike(part, whole[: rows // 2])):
                    return None
            except Exception:  # noqa: BLE001 anybody's code, given what it may not take
                continue
        if values is None:
            places = torch.searchsorted(grid_place, torch.arange(len(_GRID), device="cpu"))
            values = whole.cpu().flatten()[places].double()  # `x.to(device)` moves them
            if not values[_GRID.abs() <= _FINITE_UP_TO].isfinite().all():
                return None
    return values


@contextmanager
def _alone() -> Iterator[None]:
    """A block that draws no random numbers and that no mode of torch sees (for example a mode that records)."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad(), same_randomness():
        yield


class FunctionModule(nn.Module):
    """A module that computes the same as a call of a function, with the call's other arguments."""

    def __init__(self, function: Callable[..., Tensor], args: Sequence[Any] = (), kwargs: Any = None) -> None:
        super().__init__()
        self.function, self.args, self.kwargs = function, tuple(args), dict(kwargs or {})

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.args, **self.kwargs)

    def _get_name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


@_alone()
def form_of_values(values: Tensor | None) -> Form | None:
    """The row of _FORMS with these values, or the row "other".

    None for a function that is linear or constant, grows faster, or looks at more than one element at a time.
    """
    if values is None:
        return None

    def at(x: float) -> float:
        return float(values[_PLACES[x]])

    known = values.isfinite()
    for form in _FORMS:
        if torch.allclose(form.values(_GRID.double(), at)[known], values[known], **_CLOSE):
            return None if form.kind == "leaky_relu" and not 0 < -at(-1.0) < 0.99 else form
    ends = ((32.0, 64.0), (64.0, 80.0), (80.0, 1e3), (1e3, 1e4))
    above, below = (
        [(at(sign * b) - at(sign * a)) / (sign * (b - a)) for a, b in ends if math.isfinite(at(sign * b))]
        for sign in (1, -1)
    )
    slope = above[0]
    is_linear_far_out = all(abs(other - end[0]) < 0.01 * slope for end in (above, below) for other in end)
    if not (is_linear_far_out and -0.01 * slope < below[0] < 0.99 * slope):
        return None
    return None if abs(below[0]) < 1e-4 and is_piecewise_linear(values) else _OTHER


def is_linear(values: Tensor) -> bool:
    """Whether values of a grid lie on one straight line."""
    zero, one = (values[_PLACES[x]] for x in (0.0, 1.0))
    return torch.allclose(values, zero + (one - zero) * _GRID.double(), **_CLOSE)


def is_piecewise_linear(values: Tensor) -> bool:
    """Whether values of a grid lie on a few straight lines."""
    near = values[: len(_NEAR)]
    return int((near.diff(n=2).abs() > 1e-5).sum()) <= 8  # a corner bends two differences


def _apart(held: Any) -> Any:
    """A copy of the tensors and containers that tried code may write into."""
    if isinstance(held, Tensor):
        return held.detach().clone()
    if type(held) in (list, tuple, set):
        return type(held)(map(_apart, held))
    made = held if isinstance(held, nn.Module | types.MethodType) else copy.copy(held)
    if isinstance(made, dict):
        made.update({key: _apart(value) for key, value in held.items()})
    return made


def _as_key(value: Any) -> Any:
    if type(value) in (tuple, list, dict) and len(value) < 8:  # arguments; a class of its own may have no length
        return type(value), *map(_as_key, value.items() if isinstance(value, dict) else value)
    # Two bound methods are equal if their objects are the same; a method also keeps its object alive.
    return (type(value), value) if isinstance(value, _PLAIN) else types.MethodType(id, value)


_PLAIN = (str, int, float, bool, type(None), type, types.FunctionType, types.BuiltinFunctionType, torch.dtype)
_MODULE_ATTRIBUTES = frozenset({*vars(nn.Module())})
_known: dict[Any, tuple[Tensor | None, Form | None]] = {}
_MOST_KNOWN = 2048


def form_of_activation(held: Any) -> Form | None:
    """The form of a plain activation (module or function), or None; for a λ-gate None."""
    return _read(held)[1]


def values_of_activation(held: Any) -> Tensor | None:
    """`elementwise_values` of a function, or of a module without children in eval mode; None for λ-gates and others.

    A copy is tried, with a constant for each of its weights, so that only the form is read, whatever and wherever the
    weights are. The result is remembered by the module's class, its attributes, and the shapes of its weights.
    """
    return _read(held)[0]


def _read(held: Any) -> tuple[Tensor | None, Form | None]:
    if held is None or isinstance(held, LambdaGate):
        return None, None
    module: nn.Module = held if isinstance(held, nn.Module) else FunctionModule(held)
    tensors = [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]
    if module._modules or any(isinstance(each, nn.parameter.UninitializedTensorMixin) for each in tensors):
        return None, None
    if any(sum(size > 1 for size in each.shape) > 1 for each in tensors):
        return None, None
    key = (
        type(module),
        tuple(each.shape for each in tensors),
        *((name, _as_key(value)) for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES),
    )
    if key not in _known:
        while len(_known) >= _MOST_KNOWN:
            del _known[next(iter(_known))]

        def forward(x: Tensor) -> Tensor:
            own = copy.copy(module)  # the module's own attributes stay as they are
            vars(own).update({name: _apart(value) for name, value in vars(module).items()})
            own.training = False
            for place, (name, weight) in enumerate(own._parameters.items()):
                if weight is not None:
                    value = torch.full(weight.shape, 0.25 / (1 + place), device="cpu")
                    own._parameters[name] = nn.Parameter(value, requires_grad=False)
            for name, buffer in own._buffers.items():
                if buffer is not None:
                    dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
                    own._buffers[name] = torch.ones(buffer.shape, dtype=dtype, device="cpu")
            vars(own).pop("forward", None)  # without hooks
            return own.forward(x)

        values = elementwise_values(forward, max((each.numel() for each in tensors), default=1))
        form = form_of_values(values)
        if form is not None and form.kind == "leaky_relu" and any(True for _ in module.parameters()):
            form = replace(form, kind="prelu", name="prelu")
        _known[key] = values, form
    return _known[key]
