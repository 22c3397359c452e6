"""A report on the kernels of this machine, and on the kernel for each device and dtype."""

import torch

from hf_lgelu.activation.kernels import DTYPES, KERNEL_VARIABLE, KERNELS, choose_kernel, chosen_kernel


def kernel_report() -> str:
    """A short table to print: the λ-GELU kernels that can run here, and the kernel taken for each device and dtype.

    It builds the C++ kernel if necessary. The answer is for one λ per layer and a dense input;
    an input that a kernel refuses goes to the next.
    """
    chosen = chosen_kernel()
    choice = "automatic" if chosen is None else f"{chosen} (use_kernel or {KERNEL_VARIABLE})"
    lines = [f"λ-GELU kernels, choice: {choice}"]
    for name, kernel in KERNELS.items():
        reason = kernel.unavailable()
        lines.append(f"  {name:<8}{kernel.description}; {'ready' if reason is None else f'not here: {reason}'}")
    lines.append("taken for")
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for dtype in DTYPES:
            try:
                taken = choose_kernel(torch.zeros(1, dtype=dtype, device=device), torch.ones(1, device=device)).name
            except RuntimeError as error:
                taken = f"an error: {error}"
            lines.append(f"  {device} {str(dtype).removeprefix('torch.'):<10}{taken}")
    return "\n".join(lines)
