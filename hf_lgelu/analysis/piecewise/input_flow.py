"""Watching one forward pass: does the network depend on its input through affine operations and gates alone?

The check is an allow-list over the ATen operations that really run. Every tensor whose storage was ever written from
the input counts as dependent, and a dependent tensor may only enter an operation of `OPERATIONS` in a way that keeps
the result affine, or a ReLU. So softmax, layer norm, attention, max-pooling, products of activations and branches
on values are refused without being known by name. What runs outside torch is not seen.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Dependent = Callable[[Any], bool]


class NotPiecewiseAffineError(ValueError):
    """A network computes something of its input that is neither affine nor a gate.

    Example:
        >>> import torch
        >>> from hf_lgelu import NotPiecewiseAffineError, local_linear_model
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.LayerNorm(4))
        >>> try:
        ...     local_linear_model(model, torch.randn(2, 3))
        ... except NotPiecewiseAffineError as error:
        ...     print("layer_norm" in str(error))
        True
    """


def _any_argument(args: tuple[Any, ...], dependent: Dependent) -> bool:
    return True


def _one_factor(args: tuple[Any, ...], dependent: Dependent) -> bool:
    return not (dependent(args[0]) and dependent(args[1]))


def _one_matrix(args: tuple[Any, ...], dependent: Dependent) -> bool:
    return not (dependent(args[1]) and dependent(args[2]))


def _first_alone(args: tuple[Any, ...], dependent: Dependent) -> bool:
    return not any(dependent(value) for value in args[1:])


def _norm_in_eval_mode(args: tuple[Any, ...], dependent: Dependent) -> bool:
    # input, weight, bias, running mean, running variance, training, momentum, epsilon
    return _first_alone(args, dependent) and args[3] is not None and args[5] is False


_VIEWS = (
    *("view", "_unsafe_view", "_reshape_alias", "reshape", "t", "transpose", "permute", "expand", "squeeze", "alias"),
    *("unsqueeze", "slice", "select", "split", "split_with_sizes", "unbind", "detach", "flip", "pixel_shuffle"),
)
_AVERAGES = ("mean", "sum", "avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
_COPIES = ("clone", "_to_copy", "cat", "stack", "constant_pad_nd", "roll", "repeat")
_EDGES = tuple(f"{kind}_pad{axes}d" for kind in ("reflection", "replication") for axes in (1, 2, 3))
_LARGER = tuple(f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d"))
_CHOICES = ("index", "index_select")
SHAPE_PRESERVING_SUMS = ("add", "sub")
NONNEGATIVE_LINEAR = frozenset((*_VIEWS, *_AVERAGES, *_COPIES, *_EDGES, *_LARGER, *_CHOICES))
"""Linear operations whose coefficients are all 0 or positive."""

OPERATIONS: Mapping[str, Callable[[tuple[Any, ...], Dependent], bool]] = {
    **dict.fromkeys((*NONNEGATIVE_LINEAR, *SHAPE_PRESERVING_SUMS, "neg"), _any_argument),
    **dict.fromkeys(("mul", "mm", "bmm", "mv"), _one_factor),
    **dict.fromkeys(("addmm", "baddbmm"), _one_matrix),
    **dict.fromkeys((*_CHOICES, "div", "linear", "convolution"), _first_alone),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm"), _norm_in_eval_mode),
}
"""ATen operation without the in-place underscore → whether these arguments leave it affine in the input."""


class InputFlow(TorchDispatchMode):
    """Active during a forward pass on float64 inputs marked by `start`; raises at the first operation that is refused.

    Subclasses take `relu(module name, input)` and `affine(operation, function, args, kwargs, output)`.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in network.named_modules()}
        self._modules: list[nn.Module] = []
        self._kept: list[Tensor] = []  # alive, so that no other storage or object takes their identity
        self._storages: set[int] = set()
        self._paused = False

    def relu(self, name: str, x: Tensor, output: Tensor) -> None:
        """A ReLU ran; `x` is what it was before, also where the ReLU worked in place."""

    def affine(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """An affine operation ran."""

    def start(self, inputs: Tensor) -> Tensor:
        """Mark the network's input."""
        self.mark(inputs)
        return inputs

    def mark(self, tensor: Tensor) -> None:
        """Everything in the storage of `tensor` depends on the input from now on."""
        self._kept.append(tensor)
        self._storages.add(tensor.untyped_storage()._cdata)

    def depends(self, value: Any) -> bool:
        """Whether any tensor in `value` shares its storage with one that depends on the input."""
        return any(tensor.untyped_storage()._cdata in self._storages for tensor in _tensors(value))

    @property
    def module_name(self) -> str:
        """The dotted name of the innermost module running; "" is the network itself."""
        return self._names.get(id(self._modules[-1]), "") if self._modules else ""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are not looked at."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the operations inside, and which module runs them."""
        handles = (
            nn.modules.module.register_module_forward_pre_hook(lambda module, _: self._modules.append(module)),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            with torch.no_grad(), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return function(*args, **kwargs)
        name = function.overloadpacket.__name__.rstrip("_")
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise self._refusal(name, "draws random numbers")
        if not self.depends((args, kwargs)):
            return function(*args, **kwargs)
        if name == "relu":
            return self._run_relu(function, args[0])
        if name not in OPERATIONS:
            raise self._refusal(name, "of the input is not known to be affine, and is no ReLU")
        foreign = "rounding_mode" in kwargs or "out" in kwargs  # `out` holds other values than it is read with here
        if self.depends(kwargs) or foreign or not OPERATIONS[name](args, self.depends):
            raise self._refusal(name, "is not affine in the input as it is called here")
        output = function(*args, **kwargs)
        for tensor in _tensors(output):
            if tensor.numel() and tensor.dtype != torch.float64:
                raise self._refusal(name, f"rounds the input's values to {tensor.dtype}")
            self.mark(tensor)
        self.affine(name, function, args, kwargs, output)
        return output

    def _run_relu(self, function: Any, x: Tensor) -> Tensor:
        before = x.clone()
        output = function(x)
        self.mark(output)
        self.relu(self.module_name, before if output is x else x, output)
        return output

    def _refusal(self, operation: str, why: str) -> NotPiecewiseAffineError:
        where = self.module_name or "the network itself"
        return NotPiecewiseAffineError(
            f"not piecewise linear in a way that can be followed: {operation} in {where} {why}. Accepted are linear "
            "layers, convolutions, batch norm in eval mode, averages, sums, reshaping, padding, resizing and ReLU"
        )


def scores_of(output: Any) -> Tensor:
    """The class scores in a network's output: the tensor itself, or its `logits`, an attribute or by that key.

    Raises TypeError for an output of another kind.
    """
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    scores = output if isinstance(output, Tensor) else named
    if not isinstance(scores, Tensor):
        raise TypeError(f"the network must give a tensor or an output with `logits`, got {type(output).__name__}")
    return scores


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
