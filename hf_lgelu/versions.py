"""Every place where the installed version of a host library decides what is done, and when the older way may go."""

from typing import Any

import torch

# torch 2.8 has no Muon and sets the precision of float32 products for all backends at once. Both may go with torch 2.8.
MATRIX_OPTIMIZERS: tuple[type, ...] = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()


def matmul_backends() -> tuple[Any, ...]:
    """The backends that have a precision of their own, `fp32_precision`, for products in float32."""
    if not hasattr(torch.backends.mkldnn, "matmul"):
        return ()
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
