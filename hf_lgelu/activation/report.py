"""Which kernels this machine has, and which of them runs where."""

from dataclasses import dataclass

import torch

from hf_lgelu.activation.kernels import DTYPES, KERNEL_VARIABLE, KERNELS, choose_kernel, chosen_kernel


@dataclass(frozen=True)
class KernelReport:
    """What `kernel_report` found; printed, it is a short table.

    Attributes:
        chosen: the kernel that `use_kernel` or LGELU_KERNEL names; None if the choice is automatic.
        unavailable: for each kernel, why it cannot run on this machine; None if it can.
        taken: for each (device, dtype), the kernel that runs in an ordinary forward pass, or why none does.
    """

    chosen: str | None
    unavailable: dict[str, str | None]
    taken: dict[tuple[str, str], str]

    def __str__(self) -> str:
        choice = f"{self.chosen} (use_kernel or {KERNEL_VARIABLE})" if self.chosen else "automatic"
        lines = [f"λ-GELU kernels, choice: {choice}"]
        for name, reason in self.unavailable.items():
            state = "ready" if reason is None else f"not here: {reason}"
            lines.append(f"  {name:<8}{KERNELS[name].description}; {state}")
        lines.append("taken for")
        lines += [f"  {device} {dtype:<10}{kernel}" for (device, dtype), kernel in self.taken.items()]
        return "\n".join(lines)


def kernel_report() -> KernelReport:
    """Which λ-GELU kernels can run here, and which one is taken for each device and dtype.

    It builds the C++ kernel if that has not been built. The answer is for one λ per layer and a dense input;
    an input that a kernel refuses goes to the next.
    """
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    return KernelReport(
        chosen=chosen_kernel(),
        unavailable={name: kernel.unavailable() for name, kernel in KERNELS.items()},
        taken={(d, str(t).removeprefix("torch.")): _taken(d, t) for d in devices for t in DTYPES},
    )


def _taken(device: str, dtype: torch.dtype) -> str:
    try:
        return choose_kernel(torch.zeros(1, dtype=dtype, device=device), torch.ones(1, device=device)).name
    except RuntimeError as error:
        return f"an error: {error}"
