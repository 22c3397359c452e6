"""λ-GELU as a module with a learnable hardness."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hf_lgelu.activation.functional import apply_learned_lambda_gelu
from hf_lgelu.activation.hardness import (
    DEFAULT_INIT_HARDNESS,
    DEFAULT_TEMPERATURE,
    check_granularity,
    check_init_hardness,
    check_temperature,
    effective_hardness,
    raw_from_hardness,
)

# torch.fx.symbolic_trace records one call, as it does for nn.GELU: what is chosen inside depends on the input.
torch.fx.wrap("apply_learned_lambda_gelu")


class LambdaGELU(nn.Module):
    """f(x; λ) = x·Φ(λx) with λ = 1 + softplus(s/t) learned through `raw_hardness` (s).

    State dict: `raw_hardness` (s, the only parameter), `temperature` (t) and `hardness_override`
    (0 while s rules; otherwise the λ that hardening has set), all float32 whatever the model's dtype
    and of the same shape, so that a checkpoint evaluates the same after a reload in the middle of
    hardening.

    Args:
        inplace: accepted, because timm passes it first, and ignored.
        init_hardness: λ at the start, above 1.
        temperature: t > 0; the paper uses 0.1.
        granularity: a row of `GRANULARITIES`. `replace_activations` gives "channel", "neuron" and
            "network" their shapes; a module built by hand needs `raw_shape` for the first two.
        raw_shape: shape of s, broadcastable to the input. (1,) for "layer" and "network".

    Shape: input any, float; output the same shape and dtype.
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        init_hardness: float = DEFAULT_INIT_HARDNESS,
        temperature: float = DEFAULT_TEMPERATURE,
        granularity: str = "layer",
        raw_shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.init_hardness = check_init_hardness(init_hardness)
        self.init_temperature = check_temperature(temperature)
        self.granularity = check_granularity(granularity).name
        shape = _checked_raw_shape(self.granularity, raw_shape)
        # (1,), never 0-dim: FSDP cannot shard a scalar. float32: a step of s in bfloat16 would round away.
        self.raw_hardness = nn.Parameter(torch.empty(shape, dtype=torch.float32))
        self.register_buffer("temperature", torch.empty(1, dtype=torch.float32))
        self.register_buffer("hardness_override", torch.empty(shape, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set s to the initial hardness, t to its constructor value, and lift the override.

        Only `torch.nn.init` functions are used, and through their module: transformers guards those
        while it loads a checkpoint, so that a tensor that was loaded is left alone.
        """
        raw_hardness = raw_from_hardness(self.init_hardness, self.init_temperature)
        torch.nn.init.constant_(self.raw_hardness, raw_hardness)
        torch.nn.init.constant_(self.temperature, self.init_temperature)
        torch.nn.init.zeros_(self.hardness_override)

    @property
    def hardness(self) -> Tensor:
        """λ, float32, of the shape of s: the override where hardening has set one, else λ(s)."""
        return effective_hardness(self.raw_hardness, self.temperature, self.hardness_override)

    def forward(self, x: Tensor) -> Tensor:
        return apply_learned_lambda_gelu(x, self.raw_hardness, self.temperature, self.hardness_override)

    def extra_repr(self) -> str:
        shape = tuple(self.raw_hardness.shape)
        return f"granularity={self.granularity!r}, raw_shape={shape}, init_hardness={self.init_hardness}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LambdaGELU":
        # model.to(torch.bfloat16), .half() and .double() move the state but do not cast it.
        def move_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(device=moved.device)

        return super()._apply(move_only, recurse)


class SharedLambdaGELU(nn.Module):
    """A site that uses the hardness of another: all but the first under granularity "network".

    It holds no tensors, so a state dict names the shared s once and safetensors can write it.
    """

    granularity = "network"

    def __init__(self, owner: LambdaGELU) -> None:
        super().__init__()
        if not isinstance(owner, LambdaGELU):
            raise TypeError(f"owner must be the LambdaGELU that holds the shared hardness, got {type(owner).__name__}")
        # In a tuple, nn.Module does not register the owner a second time; deepcopy keeps the link.
        self._owner = (owner,)

    @property
    def owner(self) -> LambdaGELU:
        """The site that holds s."""
        return self._owner[0]

    @property
    def raw_hardness(self) -> Tensor:
        """The owner's s."""
        return self.owner.raw_hardness

    @property
    def hardness(self) -> Tensor:
        """The owner's λ."""
        return self.owner.hardness

    def forward(self, x: Tensor) -> Tensor:
        # Not through the owner's call, which would run its hooks.
        owner = self.owner
        return apply_learned_lambda_gelu(x, owner.raw_hardness, owner.temperature, owner.hardness_override)


def _checked_raw_shape(granularity: str, raw_shape: Sequence[int] | None) -> tuple[int, ...]:
    if raw_shape is not None and not isinstance(raw_shape, Sequence):
        raise TypeError(f"raw_shape must be a sequence of integers, e.g. (256,), got {raw_shape!r}")
    if granularity in ("layer", "network"):
        if raw_shape is not None and tuple(raw_shape) != (1,):
            raise ValueError(f"granularity {granularity!r} has one λ of shape (1,), got raw_shape={tuple(raw_shape)}")
        return (1,)
    if raw_shape is None:
        raise ValueError(
            f"granularity {granularity!r} needs raw_shape, the shape of s broadcastable to the input, e.g. (256,) for "
            "256 hidden units or (64, 1, 1) for 64 channels; replace_activations(model, granularity=..., "
            "inputs=...) finds it"
        )
    shape = tuple(raw_shape)
    if not shape or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):
        raise ValueError(f"raw_shape must be a non-empty sequence of positive integers, got {raw_shape!r}")
    return shape
