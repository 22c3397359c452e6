"""The kernels for one λ and operands that lie alike and without gaps: one run over the memory."""

import triton
import triton.language as tl

from hf_lgelu.activation.kernels.triton.formulas import derivatives, is_frozen, one_hardness, value


@triton.jit
def _elements(block: tl.constexpr, wide: tl.constexpr):
    program = tl.program_id(0)
    if wide:
        program = program.to(tl.int64)
    return program * block + tl.arange(0, block)


@triton.jit
def forward(
    x_ptr,
    y_ptr,
    hardness_ptr,
    temperature_ptr,
    override_ptr,
    n,
    block: tl.constexpr,
    wide: tl.constexpr,
    gate: tl.constexpr,
):
    """y = x·G(λx)."""
    hardness = one_hardness(hardness_ptr, temperature_ptr, override_ptr)
    i = _elements(block, wide)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + i, value(x, hardness, gate).to(y_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def backward(
    x_ptr,
    delta_ptr,
    grad_x_ptr,
    partial_ptr,
    hardness_ptr,
    temperature_ptr,
    override_ptr,
    n,
    block: tl.constexpr,
    wide: tl.constexpr,
    gate: tl.constexpr,
):
    """δ·∂f/∂x, and per program the sum of δ·λ·∂f/∂λ; either pointer may be None."""
    hardness = one_hardness(hardness_ptr, temperature_ptr, override_ptr)
    i = _elements(block, wide)
    # Past the end both are 0, which adds nothing to the sum.
    x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    in_x, in_hardness = derivatives(x, hardness, gate)
    if grad_x_ptr is not None:
        tl.store(grad_x_ptr + i, (delta * in_x).to(grad_x_ptr.dtype.element_ty), mask=i < n)
    if partial_ptr is not None and not is_frozen(override_ptr):
        tl.store(partial_ptr + tl.program_id(0), tl.sum(delta * in_hardness, axis=0))
