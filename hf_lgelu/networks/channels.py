"""The channel axis of tensors, observed in one forward pass.

The channels of a linear layer's output lie on the last axis, the channels of a convolution's or batch norm's on axis 1.
"""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from hf_lgelu.networks.run import forward_hooks

_CHANNELS_FIRST = (_ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_CHANNELS_LAST = (nn.Linear, Conv1D, nn.Embedding, nn.RNNBase, nn.MultiheadAttention)


class ChannelAxes:
    """The channel axes of the tensors in a forward pass that runs inside `watching`."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, _CHANNELS_FIRST + _CHANNELS_LAST)]
        self._in_memory: dict[StorageWeakRef, tuple[tuple[int, ...], int]] = {}  # weak: no activation outlives its use
        self._last: dict[int, tuple[tuple[int, ...], int]] = {}  # rank → (shape, axis) of the layer that ran last

    def of(self, tensor: Tensor) -> int | None:
        """The channel axis of `tensor`, counted from 0: the axis of `followed`, else the last of one or two axes."""
        found = self.followed(tensor)
        return tensor.dim() - 1 if found is None and 0 < tensor.dim() <= 2 else found

    def followed(self, tensor: Tensor) -> int | None:
        """The channel axis of the layer that gave `tensor`, in whole or as a slice; else of the last layer of its rank.

        The last layer counts if its output has as many channels, and with three axes the same shape: sums, norms and
        pooling may stand between. None where neither layer tells, as after a transposition that leaves the shape
        unchanged.
        """
        if (key := StorageWeakRef(tensor.untyped_storage())) in self._in_memory:
            strides, axis = self._in_memory[key]
            if strides == tensor.stride():
                return axis
        shape, axis = self._last.get(tensor.dim(), ((), 0))
        if tensor.dim() == 3:  # tokens and sounds: a transposed tensor has the same rank and size
            return axis if shape == tensor.shape and shape[1] != shape[2] else None
        return axis if shape and shape[axis] == tensor.shape[axis] else None

    def watching(self) -> AbstractContextManager[None]:
        """A block whose forward pass is watched."""
        return forward_hooks(self._layers, self._see)

    def _see(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        output = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(output, Tensor) or not output.dim():
            return
        axis = output.dim() - 1 if isinstance(module, _CHANNELS_LAST) else 1
        if isinstance(module, _ConvNd):
            axis = output.dim() - len(module.kernel_size) - 1  # 0 for one picture without a batch axis
        self._in_memory[StorageWeakRef(output.untyped_storage())] = output.stride(), axis
        self._last[output.dim()] = tuple(output.shape), axis
