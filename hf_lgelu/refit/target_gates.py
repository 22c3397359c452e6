"""What the smooth gates may become: gates that transformers knows by name, so that a plain reload builds them.

The solve behind the gates is the same with other features; the reasons differ. ReLU6 and LeakyReLU are what some
accelerators have, HardSwish is the cheaper twin of SiLU, squared ReLU leaves zeros as ReLU does. Nothing here imports
torch.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TargetGate:
    """A gate by its name in transformers.

    Args:
        name: a key of ACT2FN.
        title: what it is called.
        formula: what it computes.
        can_be_placed: whether slope and kink of each channel can be fitted, and units be added that are always on:
            it must be ReLU up to what is linear, and have no upper end.
        slope: below 0, of a LeakyReLU that is another than transformers' own.
    """

    name: str
    title: str
    formula: str
    can_be_placed: bool = False
    slope: float | None = None


TARGETS = {
    gate.name: gate
    for gate in (
        TargetGate("relu", "ReLU", "max(z, 0)", can_be_placed=True),
        TargetGate("relu6", "ReLU6", "min(max(z, 0), 6)"),
        TargetGate("leaky_relu", "LeakyReLU", "max(z, 0) + 0.01·min(z, 0)"),
        TargetGate("hardswish", "HardSwish", "z·min(max(z + 3, 0), 6)/6"),
        TargetGate("relu2", "squared ReLU", "max(z, 0)²"),
    )
}


def read_target(name: str) -> TargetGate:
    """The row of TARGETS, or LeakyReLU with another slope: "leaky_relu:0.1".

    Raises ValueError where there is none of that name.
    """
    if name in TARGETS:
        return TARGETS[name]
    kind, _, given = str(name).partition(":")
    try:
        slope = float(given)
    except ValueError:
        slope = math.nan
    if kind == "leaky_relu" and 0 <= slope < 1:
        title = f"LeakyReLU({slope:g})" + ("" if slope else " = ReLU")
        return TargetGate("leaky_relu", title, f"max(z, 0) + {slope:g}·min(z, 0)", slope=slope)
    raise ValueError(
        f"target must be one of {', '.join(TARGETS)}, or leaky_relu:SLOPE with a slope from 0 to below 1, got {name!r}"
    )
