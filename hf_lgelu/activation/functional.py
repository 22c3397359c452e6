"""The λ-gates as functions of x and λ."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_lgelu.activation.gates import check_gate
from hf_lgelu.activation.hardness import is_number
from hf_lgelu.activation.kernels import apply_gate, check_dense
from hf_lgelu.activation.kernels.plain import internal_dtype, is_plain


def lambda_gelu(x: Tensor, hardness: Tensor | float, kernel: str | None = None) -> Tensor:
    """f(x; λ) = x·Φ(λx), the paper's λ-GELU (arXiv:2603.21991), with Φ the Gaussian CDF.

    λ = 1 is the exact (erf) GELU; λ → ∞ is ReLU; the largest distance to ReLU is 0.16997 / λ.

    Args:
        x: any shape, float64, float32, float16 or bfloat16. Arithmetic inside is float32 or wider.
        hardness: λ ≥ 1, a number or a floating tensor with one element.
        kernel: a row of KERNELS, e.g. "eager". The default is the kernel that `use_kernel` or the environment variable
            LGELU_KERNEL names, else the fastest that takes the input (`kernel_report()` lists them).

    Returns:
        A tensor of the shape and dtype of `x`, differentiable in both arguments: ∂f/∂x = Φ(λx) +
        λx·φ(λx) and ∂f/∂λ = x²·φ(λx). Finite for every finite input. Backward keeps `x` and `hardness`.

    Raises:
        TypeError: `x` or `hardness` is not a dense floating tensor of an accepted dtype.
        ValueError: `hardness` has several elements, lies on another device, is below 1 or not finite. Its value is
            read only where this causes no delay: numbers, and tensors on the CPU outside `torch.compile`,
            `torch.func` and tracing.
        RuntimeError: the kernel that was named cannot take this input here.

    >>> import torch, hf_lgelu
    >>> x = torch.tensor([-1.0, 2.0])
    >>> hf_lgelu.lambda_gelu(x, 1.0)  # GELU
    tensor([-0.1587,  1.9545])
    >>> hf_lgelu.lambda_gelu(x, 160.0).tolist()  # all but ReLU
    [-0.0, 2.0]
    """
    return lambda_gate(x, hardness, "lambda_gelu", kernel)


def lambda_silu(x: Tensor, hardness: Tensor | float, kernel: str | None = None) -> Tensor:
    """f(x; λ) = x·σ(λx): SiLU (Swish) at λ = 1, ReLU for λ → ∞, at most 0.27846 / λ away from it.

    Arguments, result and errors are those of `lambda_gelu`; ∂f/∂x = σ(u) + u·σ′(u) with u = λx, ∂f/∂λ = x²·σ′(λx).

    >>> import torch, hf_lgelu
    >>> x = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    >>> torch.equal(hf_lgelu.lambda_silu(x, 1.0), torch.nn.functional.silu(x))
    True
    """
    return lambda_gate(x, hardness, "lambda_silu", kernel)


def lambda_gelu_tanh(x: Tensor, hardness: Tensor | float, kernel: str | None = None) -> Tensor:
    """f(x; λ) = x·G(λx) with the G of the tanh form of GELU, which GPT-2, Gemma and T5 1.1 are pretrained with.

    λ = 1 is `F.gelu(x, approximate="tanh")`, λ → ∞ is ReLU, at most 0.17004 / λ away. Arguments, result and errors are
    those of `lambda_gelu`.
    """
    return lambda_gate(x, hardness, "lambda_gelu_tanh", kernel)


def lambda_gate(x: Tensor, hardness: Tensor | float, gate: str, kernel: str | None = None) -> Tensor:
    """x·G(λx) for the row `gate` of GATES; the rest is as in `lambda_gelu`."""
    check_gate(gate)
    check_dense(x)
    if is_number(hardness):
        _check_number(hardness, internal_dtype(x))
        hardness = torch.tensor(float(hardness), device=x.device, dtype=internal_dtype(x))
        return apply_gate(x, hardness, gate, kernel)
    hardness = check_dense(hardness, "a hardness that is no number")
    if hardness.numel() != 1:
        raise ValueError(f"hardness must be one number, and a layer has one λ; got the shape {tuple(hardness.shape)}")
    if _is_readable(hardness):
        _check_number(hardness.item(), internal_dtype(x))
    return apply_gate(x, hardness, gate, kernel)


def _is_readable(hardness: Tensor) -> bool:
    if torch.compiler.is_compiling() or hardness.device.type != "cpu" or not is_plain(hardness):
        return False
    if torch._C._len_torch_dispatch_stack() > 0:  # a mode such as make_fx's cannot give a number to Python
        return False
    return not (torch._C._functorch.is_functorch_wrapped_tensor(hardness) or isinstance(hardness, FakeTensor))


def _check_number(hardness: float, dtype: torch.dtype) -> None:
    if not 1 <= hardness <= torch.finfo(dtype).max:
        raise ValueError(f"hardness must be at least 1 (1 is GELU) and finite in {dtype}, got {hardness}")
