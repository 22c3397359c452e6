"""Swish with a learnable slope: a rival with one parameter a layer, for the study `related`."""

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS, ACT2FN

SWISH_NAME = "learnable_swish"


class LearnableSwish(nn.Module):
    """x·σ(βx) with one learned β per layer, 1 at the start (Ramachandran, Zoph and Le, arXiv:1710.05941).

    β = 1 is SiLU, β → ∞ is ReLU. Trainer gives β the learning rate and the weight decay of the weights.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.slope * x)


def register_learnable_swish() -> None:
    """Make "learnable_swish" an activation string of transformers configs. Idempotent."""
    for table in (ACT2CLS, ACT2FN):
        table[SWISH_NAME] = LearnableSwish
