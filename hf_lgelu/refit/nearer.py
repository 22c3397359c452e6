"""Whether one network is nearer to the original than another, by what each is off on the same units held out.

A mean over few units that falls may have fallen on one of them. So the units are compared in pairs: what counts is the
mean of the differences against its standard error. With differences of -1 on m of n units and 0 on the others it is
√(m(n - 1)/(n - m)) of them, 1 for one unit however far it falls: above 2, at least four of nine or more have come
nearer. That is also what the best of eight looks at the same units takes: of 4,000 random walks without an effect (19
to 256 units, steps normal or with lognormal scales) the mean of the nearest look had fallen in 80 %, by one standard
error in 34 to 40 %, by two in 4 to 8 %. A sign test is no help: where most units come a little nearer and a tenth moves
far away it says yes, and what is reported and bounded is the mean.
"""

from collections.abc import Sequence

import torch

STANDARD_ERRORS = 2


def is_nearer(gaps: Sequence[float], than: Sequence[float]) -> bool:
    """Whether the mean difference is below zero by more than two standard errors; of one unit nothing is known.

    Args:
        gaps: how far a network is from the original, a number a unit.
        than: how far another one is on the same units.

    >>> is_nearer([1.0, 1.1, 0.9, 1.0, 1.0], than=[1.1, 1.3, 1.0, 1.1, 1.2])
    True
    >>> is_nearer([1.0, 1.1, 0.9, 1.0, 0.0], than=[1.0, 1.1, 0.9, 1.0, 99.0])
    False
    """
    if len(gaps) < 2:
        return False
    changes = torch.tensor(gaps, dtype=torch.float64) - torch.tensor(than, dtype=torch.float64)
    return bool(changes.mean() < -STANDARD_ERRORS * changes.std() / len(changes) ** 0.5)
