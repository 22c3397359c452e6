"""Where a kernel that torch cannot look into must not run."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Whether it is torch's own class of tensor, none that somebody derived from it."""
    return type(tensor) in _PLAIN


def opaque_refusal(x: Tensor, hardness: Tensor) -> str | None:
    """Why torch has to see the operations inside, or None if a kernel may read and write the memory itself."""
    if torch.compiler.is_compiling():
        return "torch.compile and torch.export need operations that they can trace"
    if not (is_plain(x) and is_plain(hardness)):
        return f"it takes plain tensors, not {type(x).__name__} and {type(hardness).__name__}"
    if x.layout is not torch.strided or x.is_neg() or hardness.is_neg():
        return "it takes tensors that lie in memory as they are: strided, and with no sign still to be flipped"
    if x._is_zerotensor() or hardness._is_zerotensor():
        return "it takes tensors that have memory, not implied zeros"
    if torch._C._are_functorch_transforms_active():
        return "torch.func needs operations that it can transform"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives need differentiable operations"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a TorchDispatchMode is watching the operations"
    if torch.jit.is_tracing():
        return "torch.jit.trace needs operations that it can record"
    return None


def is_followed(delta: Tensor) -> bool:
    """Whether autograd (create_graph) or a batch of incoming gradients follows the operations of a backward pass.

    Then they must be differentiable and overwrite nothing, and no kernel may read memory.
    """
    # Of the two vmaps, is_grads_batched and gradcheck use the older.
    return (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._functorch.is_legacy_batchedtensor(delta)
    )


def is_visible_backward(x: Tensor, delta: Tensor) -> bool:
    """Whether a backward pass has to consist of operations that torch can see."""
    return is_followed(delta) or opaque_refusal(x, delta) is not None
