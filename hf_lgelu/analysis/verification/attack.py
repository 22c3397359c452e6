"""Projected gradient descent (Madry et al., arXiv:1706.06083): a cheap search for an input that changes the class."""

import torch
from torch import Tensor, nn

STEP_FRACTION = 0.25
"""Of the box's half width; it falls to 0 over the steps."""


def find_adversarial(
    scores: nn.Module, lower: Tensor, upper: Tensor, start: Tensor, label: int, *, steps: int, restarts: int, seed: int
) -> Tensor | None:
    """An input in the box whose class is not `label`, or None if none was found, which proves nothing.

    Args:
        scores: (batch, ...) → (batch, classes).
        lower: of the box, of one input's shape; on the model's device, as the next two.
        upper: likewise.
        start: the input itself. The first descent begins there, the others at random points of the box.
        label: the class to leave.
        steps: of each descent, along the sign of the gradient of the leading wrong class's score minus the label's.
        restarts: descents, side by side as one batch.
        seed: of the random points.
    """
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand((restarts, *start.shape), generator=generator, dtype=start.dtype).to(start.device)
    points = lower + (upper - lower) * shares
    points[0] = start
    step_size = STEP_FRACTION * (upper - lower) / 2
    for step in range(steps + 1):
        points = torch.minimum(torch.maximum(points, lower), upper).detach().requires_grad_(True)
        lead = _lead(scores(points), label)
        if (lead > 0).any():
            return points[int(lead.argmax())].detach()
        (gradient,) = torch.autograd.grad(lead.sum(), points)
        points = points.detach() + gradient.sign() * step_size * (1 - step / (steps + 1))
    return None


def _lead(scores: Tensor, label: int) -> Tensor:
    others = torch.arange(scores.shape[-1], device=scores.device) != label
    return scores[:, others].amax(-1) - scores[:, label]
