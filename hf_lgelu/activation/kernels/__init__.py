"""The table of backends: one row per implementation of the λ-gates."""

from torch import Tensor

from hf_lgelu.activation.gates import DEFAULT_GATE
from hf_lgelu.activation.kernels import aten, eager, traced
from hf_lgelu.activation.kernels.cpu import function as cpu
from hf_lgelu.activation.kernels.kernel import Kernel
from hf_lgelu.activation.kernels.triton import availability as triton_availability
from hf_lgelu.activation.kernels.triton import function as triton_function


def _never(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> str | None:
    return None


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "cpu",
            "one fused C++ pass each way, compiled on first use; float32 and bfloat16 on the CPU; saves only x",
            cpu.lambda_gate,
            cpu.refusal,
            learned=cpu.learned_lambda_gate,
            unavailable=cpu.unavailable,
        ),
        Kernel(
            "triton",
            "one fused Triton pass each way on CUDA and ROCm devices; saves only x; not yet measured on a GPU",
            triton_function.lambda_gate,
            triton_availability.refusal,
            learned=triton_function.learned_lambda_gate,
            unavailable=triton_availability.unavailable,
        ),
        Kernel(
            "traced",
            "hand-written derivatives on operations that torch.compile fuses into one pass each way; saves only x",
            traced.lambda_gate,
            traced.refusal,
        ),
        Kernel(
            "aten",
            "hand-written derivatives on torch operations, any device; saves only x",
            aten.lambda_gate,
            aten.refusal,
            learned=aten.learned_lambda_gate,
        ),
        Kernel(
            "eager",
            "plain operations: the reference, and what an exported graph consists of",
            eager.lambda_gate,
            refusal=_never,
        ),
    )
}
"""In order of preference: without a choice of the user's, the first that does not refuse is taken."""
