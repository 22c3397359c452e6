"""The second stage of ∂λ: the programs' sums, added in a fixed order."""

import triton
import triton.language as tl

from hf_lgelu.activation.kernels.triton.formulas import is_frozen, one_hardness, rate


@triton.jit
def finish(
    partial_ptr,
    out_ptr,
    hardness_ptr,
    temperature_ptr,
    override_ptr,
    programs,
    channels,
    block: tl.constexpr,
    block_c: tl.constexpr,
):
    """out[c] = Σ_p partial[p, c] / λ_c, the gradient of λ; times ∂λ/∂s where s is given.

    While an override rules there are no sums, and the gradient of s is exactly 0.
    """
    c = tl.program_id(0) * block_c + tl.arange(0, block_c)
    sums = tl.zeros((block, block_c), dtype=tl.float32)
    start = 0
    # Not `for`: with numpy 2.4, the interpreter of Triton 3.6 has no range over an argument.
    while start < programs:
        p = start + tl.arange(0, block)
        inside = (p < programs)[:, None] & (c < channels)[None, :]
        sums += tl.load(partial_ptr + p[:, None] * channels + c[None, :], mask=inside, other=0.0)
        start += block
    total = tl.sum(sums, axis=0)
    if temperature_ptr is None:
        hardness = tl.load(hardness_ptr + c, mask=c < channels, other=1.0).to(tl.float32)
        gradient = total / hardness
    else:
        gradient = total / one_hardness(hardness_ptr, temperature_ptr, override_ptr)
        gradient = tl.where(is_frozen(override_ptr), 0.0, gradient * rate(hardness_ptr, temperature_ptr))
    tl.store(out_ptr + c, gradient.to(out_ptr.dtype.element_ty), mask=c < channels)
