"""The operators of ONNX as functions of torch: inputs by position, attributes by name, which ONNX gives them."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_DTYPES = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64}


def _whole(value: Any) -> list[int]:
    """Sizes, axes and the like, which newer versions of an operator take as a tensor."""
    found = value.tolist() if isinstance(value, Tensor) else value or []
    return [found] if isinstance(found, int) else list(found)


def _window(
    x: Tensor, kernel: Sequence[int], pads: Any, strides: Any, auto_pad: str, fill: float
) -> tuple[Tensor, Any]:
    """(x with the values around it that torch cannot pad by itself, the padding that is left to torch)."""
    pads, count = _whole(pads) or [0] * 2 * len(kernel), len(kernel)
    if auto_pad.startswith("SAME"):
        steps = zip(x.shape[2:], kernel, (_whole(strides) or [1]) * count, strict=False)
        both = [max(0, (-(-size // step) - 1) * step + width - size) for size, width, step in steps]
        less, more = [each // 2 for each in both], [-(-each // 2) for each in both]
        pads = [*less, *more] if auto_pad == "SAME_UPPER" else [*more, *less]
    if pads[:count] == pads[count:] and not fill:
        return x, pads[:count]
    return F.pad(x, [pads[axis + end] for axis in reversed(range(count)) for end in (0, count)], value=fill), 0


def _conv(x: Tensor, weight: Tensor, bias: Any = None, strides: Any = 1, pads: Any = (), dilations: Any = 1,
          group: int = 1, auto_pad: str = "", **_: Any) -> Tensor:  # fmt: skip
    dilated = [(size - 1) * each + 1 for size, each in zip(weight.shape[2:], _whole(dilations) * 3, strict=False)]
    x, padding = _window(x, dilated, pads, strides, auto_pad, 0.0)
    function = (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3]
    return function(x, weight, None if bias is None else bias.flatten(), strides, padding, dilations, group)


def _transposed(x: Tensor, weight: Tensor, bias: Any = None, strides: Any = 1, pads: Any = (), dilations: Any = 1,
                group: int = 1, output_padding: Any = 0, auto_pad: str = "NOTSET", **_: Any) -> Tensor:  # fmt: skip
    _, padding = _window(x, weight.shape[2:], pads, 1, "", 0.0)
    if padding == 0 or auto_pad != "NOTSET":
        raise ValueError("a ConvTranspose with other zeros before than after, or with auto_pad, is not read")
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[weight.ndim - 3]
    bias = None if bias is None else bias.flatten()
    return function(x, weight, bias, strides, padding, output_padding, group, dilations)


def _gemm(x: Tensor, weight: Tensor, bias: Any = None, alpha: float = 1.0, beta: float = 1.0, **turned: int) -> Tensor:
    x, weight = x.t() if turned.get("transA") else x, weight if turned.get("transB") else weight.t()
    bias = bias if bias is None or beta == 1 else bias * beta
    plain = bias is None or bias.shape == weight.shape[:1]
    found = F.linear(x, weight if alpha == 1 else weight * alpha, bias if plain else None)
    return found if plain else found + bias


def _pool(x: Tensor, kind: str, kernel_shape: Any, strides: Any = 1, pads: Any = (), ceil_mode: int = 0,
          auto_pad: str = "", count_include_pad: int = 0, dilations: Any = 1, **_: Any) -> Tensor:  # fmt: skip
    strides = strides or 1
    given, padding = _window(x, kernel_shape, pads, strides, auto_pad, -torch.inf if kind == "max" else 0.0)
    function = getattr(F, f"{kind}_pool{x.ndim - 2}d")
    if kind == "max":
        return function(given, kernel_shape, strides, padding, dilations, bool(ceil_mode))
    if padding == 0 and given is not x and not count_include_pad:
        raise ValueError("an AveragePool with other zeros before than after is not read")
    return function(given, kernel_shape, strides, padding, bool(ceil_mode), bool(count_include_pad))


def _reshape(x: Tensor, shape: Any, batch: int | None = None, allowzero: int = 0) -> Tensor:
    """With `batch`, the shapes in the file hold this batch size, and x may have another one."""
    sizes = [x.shape[axis] if not size and not allowzero else size for axis, size in enumerate(_whole(shape))]
    if batch and sizes and sizes[0] % batch == 0 and x.numel():
        if -1 not in sizes:
            sizes[0] = sizes[0] * x.numel() // torch.Size(sizes).numel()
        elif sizes[0] == batch:
            sizes[0] = len(x)
    return x.reshape(sizes)


def _slice(x: Tensor, *given: Any, **named: Any) -> Tensor:
    given = given or tuple(named.get(name) for name in ("starts", "ends", "axes", "steps"))
    starts, ends, axes, steps = [*map(_whole, given), [], []][:4]
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = axes[number] if axes else number
        places = range(x.shape[axis])[slice(start, end, steps[number] if steps else 1)]
        if places.step > 0:
            x = x[(*[slice(None)] * (axis % x.ndim), slice(places.start, places.stop, places.step))]
        else:
            x = x.index_select(axis, torch.tensor(places, device=x.device))
    return x


def _gather(x: Tensor, places: Tensor, axis: int = 0) -> Tensor:
    places = torch.where(places < 0, places + x.shape[axis], places)
    if axis == 0 and x.ndim == 2 and x.is_floating_point():
        return F.embedding(places, x)
    axis = axis % x.ndim
    return x.index_select(axis, places.flatten()).reshape([*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]])


def _gather_nd(x: Tensor, places: Tensor, batch_dims: int = 0) -> Tensor:
    if batch_dims:
        parts = zip(x, places, strict=True)
        return torch.stack([_gather_nd(part, place, batch_dims - 1) for part, place in parts])
    return x[places.unbind(-1)]


def _concat(*parts: Tensor, axis: int) -> Tensor:
    """A part of one sample, such as a learned token, is repeated for a larger batch."""
    most = max(len(part) for part in parts) if axis % parts[0].ndim else 0
    return torch.cat([part.expand(most, *part.shape[1:]) if len(part) == 1 < most else part for part in parts], axis)


def _resize(x: Tensor, *given: Any, mode: str = "nearest", coordinate_transformation_mode: str = "half_pixel",
            nearest_mode: str = "round_prefer_floor", scales: Any = None, **_: Any) -> Tensor:  # fmt: skip
    last: Any = next((each for each in reversed(given) if each is not None and each.numel()), None)
    factors = scales or last.tolist()  # of Upsample; else the scales or sizes are the last input
    sizes = factors if last is not None and not last.is_floating_point() else [
        int(size * factor) for size, factor in zip(x.shape, factors, strict=True)
    ]  # fmt: skip
    is_whole = all(new % old == 0 for new, old in zip(sizes[2:], x.shape[2:], strict=True))
    if mode == "nearest" and (is_whole or (coordinate_transformation_mode, nearest_mode) == ("asymmetric", "floor")):
        return F.interpolate(x, sizes[2:])
    kind = {("linear", 3): "linear", ("linear", 4): "bilinear", ("linear", 5): "trilinear"}.get((mode, x.ndim))
    if kind is None or not coordinate_transformation_mode.endswith(("half_pixel", "align_corners")):
        raise ValueError(f"a Resize by {mode}, {coordinate_transformation_mode}, {nearest_mode} is not read")
    return F.interpolate(x, sizes[2:], mode=kind, align_corners=coordinate_transformation_mode == "align_corners")


def _pad(x: Tensor, pads: Any, value: Any = None, axes: Any = None, mode: str = "constant") -> Tensor:
    pads, axes = _whole(pads), [axis % x.ndim for axis in _whole(axes)] or [*range(x.ndim)]
    sides = dict(zip(axes, zip(pads[: len(axes)], pads[len(axes) :], strict=True), strict=True))
    around = [side for axis in reversed(range(x.ndim)) for side in sides.get(axis, (0, 0))]
    if mode == "constant":
        return F.pad(x, around, value=value.item() if isinstance(value, Tensor) else value or 0.0)
    return F.pad(x, around[: 2 * (x.ndim - 2)], mode={"edge": "replicate"}.get(mode, mode))


def _reduce(x: Tensor, axes: Any = None, *, function: str, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
    if not (axes := _whole(axes)) and noop_with_empty_axes:
        return x
    return getattr(torch, function)(x, dim=axes or [*range(x.ndim)], keepdim=bool(keepdims))


def _softmax(x: Tensor, axis: int = -1, function: Any = torch.softmax, is_flat: bool = False) -> Tensor:
    """`is_flat`: before version 13, over all axes from `axis` on, by default the second."""
    return function(x.flatten(axis), -1).view_as(x) if is_flat else function(x, axis)


def _unsqueeze(x: Tensor, axes: Any) -> Tensor:
    for axis in sorted(each % (x.ndim + len(_whole(axes))) for each in _whole(axes)):
        x = x.unsqueeze(axis)
    return x


OPERATORS: dict[str, Any] = {
    **{name: getattr(torch, name.lower()) for name in (
        "Abs", "Add", "Ceil", "Cos", "Erf", "Exp", "Floor", "Log", "Mul", "Neg", "Pow", "Reciprocal", "Round",
        "Sigmoid", "Sign", "Sin", "Sqrt", "Sub", "Tanh", "Where",
    )},
    **{f"Reduce{name}": lambda *inputs, function=function, **options: _reduce(*inputs, function=function, **options)
       for name, function in {"Mean": "mean", "Sum": "sum", "Max": "amax", "Min": "amin"}.items()},
    **{name: function for names, function in {
        ("Equal",): torch.eq, ("Greater",): torch.gt, ("GreaterOrEqual",): torch.ge, ("Less",): torch.lt,
        ("LessOrEqual",): torch.le, ("And",): torch.logical_and, ("Or",): torch.logical_or, ("Not",): torch.logical_not,
        ("IsNaN",): torch.isnan,
        ("Softplus",): F.softplus, ("Identity", "Dropout"): lambda x, *_, **__: x, ("Resize", "Upsample"): _resize,
    }.items() for name in names},
    "ArgMax": lambda x, axis=0, keepdims=1, **_: x.argmax(axis, bool(keepdims)),
    "AveragePool": lambda x, **options: _pool(x, "avg", **options),
    "BatchNormalization": lambda x, scale, bias, mean, variance, epsilon=1e-5, **_: F.batch_norm(
        x, mean, variance, scale, bias, False, 0.0, epsilon
    ),
    "Cast": lambda x, to, **_: x.to(_DTYPES[to]),
    "Clip": lambda x, *ends, **named: x.clamp(
        *(end if end is None else float(end) for end in (ends or (named.get("min"), named.get("max"))))
    ),
    "Concat": _concat,
    "ConstantOfShape": lambda shape, value=(0.0,): torch.full(_whole(shape), value[0], device=shape.device),
    "Conv": _conv,
    "ConvTranspose": _transposed,
    "CumSum": lambda x, axis: x.cumsum(int(axis)),
    "DepthToSpace": lambda x, blocksize, mode="DCR": F.pixel_shuffle(
        x if mode == "CRD" else x.unflatten(1, (blocksize**2, -1)).transpose(1, 2).flatten(1, 2), blocksize
    ),
    "Div": lambda x, y: torch.div(x, y, rounding_mode=None if x.is_floating_point() else "trunc"),
    "Einsum": lambda *parts, equation: torch.einsum(equation, *parts),
    "Expand": lambda x, shape: x.expand(torch.broadcast_shapes(x.shape, _whole(shape))),
    "Flatten": lambda x, axis=1: x.flatten(axis).flatten(0, axis - 1) if axis else x.reshape(1, -1),
    "Gather": _gather,
    "GatherND": _gather_nd,
    "GatherElements": lambda x, places, axis=0: x.gather(axis, torch.where(places < 0, places + x.shape[axis], places)),
    "Gemm": _gemm,
    "GlobalAveragePool": lambda x: x.mean([*range(2, x.ndim)], keepdim=True),
    "GlobalMaxPool": lambda x: x.amax([*range(2, x.ndim)], keepdim=True),
    "GroupNormalization": lambda x, scale, bias, num_groups, epsilon=1e-5, **_: F.group_norm(
        x, num_groups, scale, bias, epsilon
    ),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0, 1),
    "InstanceNormalization": lambda x, scale, bias, epsilon=1e-5: F.instance_norm(
        x, weight=scale, bias=bias, eps=epsilon
    ),
    "LayerNormalization": lambda x, scale, bias=None, axis=-1, epsilon=1e-5, **_: F.layer_norm(
        x, x.shape[axis:], scale, bias, epsilon
    ),
    "LogSoftmax": lambda x, **options: _softmax(x, function=torch.log_softmax, **options),
    "MatMul": lambda x, weight, bias=None: torch.matmul(x, weight) if bias is None else F.linear(
        x, weight.t(), bias.flatten()
    ),
    "Max": lambda *inputs: reduce(torch.maximum, inputs),
    "MaxPool": lambda x, **options: _pool(x, "max", **options),
    "Min": lambda *inputs: reduce(torch.minimum, inputs),
    "Mod": lambda x, y, fmod=0: (torch.fmod if fmod else torch.remainder)(x, y),
    "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),
    "Pad": _pad,
    "ReduceL2": lambda x, axes=None, keepdims=1, **_: torch.linalg.vector_norm(
        x, dim=_whole(axes) or None, keepdim=bool(keepdims)
    ),
    "Range": lambda start, limit, delta: torch.arange(
        start.item(), limit.item(), delta.item(), dtype=start.dtype, device=start.device
    ),
    "Reshape": _reshape,
    "Shape": lambda x, start=0, end=None: torch.tensor(x.shape[start:end], device=x.device),
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": lambda x, split=None, axis=0, outputs=1, **_: x.split(_whole(split) or -(-x.shape[axis] // outputs), axis),
    "Sum": lambda *inputs: reduce(torch.add, inputs),
    "Squeeze": lambda x, axes=None: x.squeeze(_whole(axes) or [*range(x.ndim)]),
    "Tile": lambda x, repeats: x.repeat(_whole(repeats)),
    "TopK": lambda x, count, axis=-1, largest=1, sorted=1: x.topk(int(count), axis, bool(largest), bool(sorted)),
    "Trilu": lambda x, k=0, upper=1: (torch.triu if upper else torch.tril)(x, int(k)),
    "Transpose": lambda x, perm=None: x.permute(perm or [*reversed(range(x.ndim))]),
    "Unsqueeze": _unsqueeze,
}  # fmt: skip


def run_operator(name: str, *inputs: Any, **attributes: Any) -> Any:
    """The output of an operator, or a sequence of its outputs."""
    return OPERATORS[name](*inputs, **attributes)
