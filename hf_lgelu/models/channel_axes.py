"""Which axis of a tensor counts channels, followed from the layer that made it through one forward pass.

A convolution's channels lie on axis 1, a linear layer's on the last. Between a layer and a gate stand sums, slices and
transposes, so every operation that really runs is looked at: those known here carry the axis on, and behind any other
nothing is known.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.pytorch_utils import Conv1D

from hf_lgelu.models.dataflow.operation_names import COPIES, RESHAPES
from hf_lgelu.models.example_run import forward_hooks
from hf_lgelu.models.sites import is_activation

_CHANNELS_FIRST = (nn.modules.batchnorm._NormBase, nn.GroupNorm)
_CHANNELS_LAST = (nn.Linear, Conv1D, nn.Embedding, nn.RNNBase, nn.MultiheadAttention)
_ALONG_A_LENGTH = (nn.Conv1d, nn.ConvTranspose1d)


def axis_not_told(name: str, shape: tuple[int, ...], counted: str) -> str:
    """What is said where the axis that counts `counted` is None; what to do then is the caller's."""
    return (
        f"{name}: which axis of its input, of shape {shape}, counts {counted} cannot be told. Behind a 1-D convolution "
        f"it is axis 1 and behind a linear layer the last, and between such a layer and {name} stands an operation "
        "through which they are not followed"
    )


class ChannelAxes(TorchDispatchMode):
    """Knows the channel axis of the tensors of a forward pass inside `watching`."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._known = WeakTensorKeyDictionary()  # weak: no activation outlives its use
        self._has_lengths = any(isinstance(module, _ALONG_A_LENGTH) for module in model.modules())

    def of(self, tensor: Tensor) -> int | None:
        """The axis of `tensor` that counts channels, from 0.

        Where it cannot be followed to a layer it is 1 from four axes on, else the last; but None with three axes in a
        model with 1-D convolutions, where it may be either, and of a single number.
        """
        known = self._known.get(tensor)
        if known is not None:
            return known
        if not tensor.dim() or (tensor.dim() == 3 and self._has_lengths):
            return None
        return 1 if tensor.dim() >= 4 else tensor.dim() - 1

    def followed(self, tensor: Any) -> int | None:
        """The same where it was followed to a layer, else None."""
        return self._known.get(tensor) if isinstance(tensor, Tensor) else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forward pass that is made inside."""
        layers = [
            module
            for module in self._model.modules()
            if isinstance(module, (*_CHANNELS_FIRST, *_CHANNELS_LAST)) or is_activation(module)
        ]
        # torch.compile refuses a mode like this one, also where a model calls it inside (flex attention).
        with forward_hooks(layers, self._see_module), torch.compiler.set_stance("force_eager"), self:
            yield

    def _see_module(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        output = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(output, Tensor) or not output.dim():
            return
        if isinstance(module, _CHANNELS_LAST):
            self._known[output] = output.dim() - 1
        elif isinstance(module, _CHANNELS_FIRST):
            self._known[output] = 1
        elif args and self.followed(args[0]) is not None and args[0].shape == output.shape:
            self._known[output] = self.followed(args[0])  # an activation, whatever it computes with

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        rule = _rule(func) if isinstance(func, OpOverload) else None
        if rule is None:
            return output
        outputs = output if isinstance(output, list) else [output[0] if isinstance(output, tuple) else output]
        for tensor in outputs:
            if isinstance(tensor, Tensor):
                self._note(tensor, rule, args)
        return output

    def _note(self, tensor: Tensor, rule: "_Rule", args: tuple[Any, ...]) -> None:
        # Of an input that was reshaped in place nothing is left in which to count axes.
        lost = tensor is args[0] and rule not in (_elementwise, _kept)
        axis = None if lost else rule(self, args, tensor)
        if axis is not None and 0 <= axis < tensor.dim():
            self._known[tensor] = axis
        else:
            self._known.pop(tensor, None)


_Rule = Callable[[ChannelAxes, tuple[Any, ...], Tensor], int | None]
"""(what is known, an operation's arguments, its output) → the output's channel axis, from 0, or None."""


def _rule(operation: OpOverload) -> _Rule | None:
    name = operation.overloadpacket.__name__.rstrip("_")
    if name in _RULES:
        return _RULES[name]
    if torch.Tag.pointwise in operation.tags:
        return _elementwise
    if "batch_norm" in name:
        return _first
    return _kept if name.startswith(_POOLS_AND_PADS) else None


def _elementwise(axes: ChannelAxes, args: tuple[Any, ...], output: Tensor) -> int | None:
    """That of the operands of which it is known, aligned at the right, as broadcasting does it.

    One that is as long there as the output counts before those that are repeated along it.
    """
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for operand in pytree.tree_leaves(args):
        axis = axes.followed(operand)
        if axis is not None:
            place = axis + output.dim() - operand.dim()
            found[operand.shape[axis] == output.shape[place]].add(place)
    candidates = found[True] or found[False]
    return candidates.pop() if len(candidates) == 1 else None


def _kept(axes: ChannelAxes, args: tuple[Any, ...], output: Tensor) -> int | None:
    return axes.followed(args[0])


def _repeated(axes: ChannelAxes, args: tuple[Any, ...], output: Tensor) -> int | None:
    axis = axes.followed(args[0])
    return None if axis is None else axis + output.dim() - args[0].dim()  # new axes stand at the left


def _first(axes: ChannelAxes, args: tuple[Any, ...], output: Tensor) -> int | None:
    return 1


def _last(axes: ChannelAxes, args: tuple[Any, ...], output: Tensor) -> int | None:
    return output.dim() - 1


def _matrix_product(axes: ChannelAxes, args: tuple[Any, ...], output: Tensor) -> int | None:
    factor = args[-1] if args[-1]._base is None else args[-1]._base
    return output.dim() - 1 if isinstance(factor, nn.Parameter) else None  # else one of activations, as in attention


def _layer_norm(axes: ChannelAxes, args: tuple[Any, ...], output: Tensor) -> int | None:
    axis = axes.followed(args[0])
    return output.dim() - 1 if axis is None and len(args[1]) == 1 else axis


def _joined(axes: ChannelAxes, args: tuple[Any, ...], output: Tensor) -> int | None:
    found = {axes.followed(tensor) for tensor in args[0]} - {None}
    return found.pop() if len(found) == 1 else None


def _stacked(axes: ChannelAxes, args: tuple[Any, ...], output: Tensor) -> int | None:
    axis = _joined(axes, args, output)
    new = args[1] % output.dim() if len(args) > 1 else 0
    return None if axis is None else axis + (new <= axis)


def _taken_out(axes: ChannelAxes, args: tuple[Any, ...], output: Tensor) -> int | None:
    """Of `select` and `unbind`, after which an axis is gone."""
    axis = axes.followed(args[0])
    gone = args[1] % args[0].dim() if len(args) > 1 else 0
    return None if axis is None or axis == gone else axis - (gone < axis)


def _summed(axes: ChannelAxes, args: tuple[Any, ...], output: Tensor) -> int | None:
    axis = axes.followed(args[0])
    if axis is None or len(args) < 2 or args[1] is None:
        return None
    over = {each % args[0].dim() for each in ([args[1]] if isinstance(args[1], int) else args[1])}
    if axis in over:
        return None
    return axis if output.dim() == args[0].dim() else axis - sum(each < axis for each in over)


def _transposed(axes: ChannelAxes, args: tuple[Any, ...], output: Tensor) -> int | None:
    first, second = (each % output.dim() for each in (args[1:] or (0, -1)))
    return {first: second, second: first}.get(axis := axes.followed(args[0]), axis)


def _permuted(axes: ChannelAxes, args: tuple[Any, ...], output: Tensor) -> int | None:
    axis = axes.followed(args[0])
    return None if axis is None else [each % output.dim() for each in args[1]].index(axis)


def _reshaped(axes: ChannelAxes, args: tuple[Any, ...], output: Tensor) -> int | None:
    """The axis of the same length that has as many elements before it, since the elements keep their order."""
    axis, shape = axes.followed(args[0]), args[0].shape
    if axis is None:
        return None
    places = (
        place
        for place, size in enumerate(output.shape)
        if size == shape[axis] and prod(output.shape[:place]) == prod(shape[:axis])
    )
    return next(places, None)


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(COPIES, _kept),
    **dict.fromkeys(RESHAPES, _reshaped),
    **dict.fromkeys(("slice", "split", "split_with_sizes", "unsafe_split", "index_select", "flip", "roll"), _kept),
    **dict.fromkeys(("glu", "_softmax", "_log_softmax", "cumsum", "native_dropout", "log_sigmoid_forward"), _kept),
    **dict.fromkeys(("gelu", "mish", "hardswish", "masked_fill", "prelu", "_prelu_kernel", "copy"), _elementwise),
    **dict.fromkeys(("expand", "repeat"), _repeated),
    **dict.fromkeys(("convolution", "native_group_norm"), _first),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _layer_norm),
    **dict.fromkeys(("mm", "addmm"), _matrix_product),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "max", "min", "var", "std", "logsumexp"), _summed),
    **dict.fromkeys(("select", "unbind"), _taken_out),
    **dict.fromkeys(("transpose", "t"), _transposed),
    "embedding": _last,
    "permute": _permuted,
    "cat": _joined,
    "stack": _stacked,
}
"""ATen operation without the in-place underscore → where its output has the channels."""

_POOLS_AND_PADS = (
    *("avg_pool", "max_pool", "adaptive_", "_adaptive_", "upsample_", "_upsample_"),
    *("constant_pad", "reflection_pad", "replication_pad"),
)
