"""λ-GELU as a function of x and λ."""

import torch
from torch import Tensor

from hf_lgelu.activation.kernels import choose_kernel

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_ACCEPTED_DTYPES = "float64, float32, float16 or bfloat16"


def lambda_gelu(x: Tensor, hardness: Tensor | float) -> Tensor:
    """f(x; λ) = x·Φ(λx), the paper's λ-GELU (arXiv:2603.21991), with Φ the Gaussian CDF.

    λ = 1 is the exact (erf) GELU; λ → ∞ is ReLU; the largest distance to ReLU is 0.16997 / λ.

    Args:
        x: any shape, float64, float32, float16 or bfloat16. Arithmetic inside is float32 or wider.
        hardness: λ ≥ 1, a number or a floating tensor that broadcasts to the shape of `x`.

    Returns:
        A tensor of the shape and dtype of `x`, differentiable in both arguments: ∂f/∂x = Φ(λx) +
        λx·φ(λx) and ∂f/∂λ = x²·φ(λx). Finite for every finite input. Backward keeps `x` and `hardness`.

    Raises:
        TypeError: `x` or `hardness` is not a floating tensor of an accepted dtype.
        ValueError: `hardness` does not broadcast to `x`, or holds a value that is NaN, infinite or
            below 1. Values are read only where that does not stall an accelerator: numbers always,
            tensors on the CPU outside `torch.compile` and `torch.func`.
    """
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES:
        raise TypeError(f"x must be a {_ACCEPTED_DTYPES} tensor, got {_kind(x)}")
    if isinstance(hardness, int | float) and not isinstance(hardness, bool):
        hardness = torch.tensor(float(hardness), device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        _check_values(hardness)
    elif not isinstance(hardness, Tensor) or hardness.dtype not in _DTYPES:
        raise TypeError(f"hardness must be a number or a {_ACCEPTED_DTYPES} tensor, got {_kind(hardness)}")
    elif _is_readable(hardness):
        _check_values(hardness)
    return apply_lambda_gelu(x, hardness)


def apply_lambda_gelu(x: Tensor, hardness: Tensor) -> Tensor:
    """`lambda_gelu` for a hardness whose values are known to be right; checks dtype and shape only."""
    if x.dtype not in _DTYPES:
        raise TypeError(f"x must be a {_ACCEPTED_DTYPES} tensor, got {_kind(x)}")
    if not _broadcasts_to(hardness.shape, x.shape):
        raise ValueError(
            f"hardness of shape {tuple(hardness.shape)} does not broadcast to x of shape {tuple(x.shape)}: "
            "aligned at the last axis, each of its sizes must be 1 or that of x"
        )
    return choose_kernel(x, hardness).function(x, hardness)


def _broadcasts_to(shape: torch.Size, target: torch.Size) -> bool:
    if len(shape) > len(target):
        return False
    return all(size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target), strict=False))


def _is_readable(hardness: Tensor) -> bool:
    if torch.compiler.is_compiling() or hardness.device.type != "cpu":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(hardness)


def _check_values(hardness: Tensor) -> None:
    values = hardness.detach()
    valid = (values >= 1) & torch.isfinite(values)
    if not bool(valid.all()):
        worst = values[~valid].flatten()[0].item()
        raise ValueError(f"hardness must be finite and at least 1 (1 is GELU), got {worst}")


def _kind(value: object) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
