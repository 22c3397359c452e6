"""What the smooth gates may become: gates that transformers knows by name, so that a plain reload builds them.

The solve behind the gates is the same with other features; the reasons differ. ReLU6 and LeakyReLU are what some
accelerators have, HardSwish is the cheaper twin of SiLU, squared ReLU leaves zeros as ReLU does. Nothing here imports
torch.
"""

from dataclasses import dataclass

FITTED = "fitted"
"""In the place of a slope: the one nearest to the gates, which a conversion finds."""


@dataclass(frozen=True)
class TargetGate:
    """A gate by its name in transformers.

    Args:
        name: a key of ACT2FN.
        title: what it is called.
        formula: what it computes.
        can_be_placed: whether slope and kink of each channel can be fitted, and units be added that are always on:
            it must be ReLU up to what is linear, and have no upper end.
        has_zeros: whether it is zero below a kink at 0.
        slope: below 0, of a LeakyReLU that is another than transformers' own; FITTED until it is known.
    """

    name: str
    title: str
    formula: str
    can_be_placed: bool = False
    has_zeros: bool = False
    slope: float | str | None = None


TARGETS = {
    gate.name: gate
    for gate in (
        TargetGate("relu", "ReLU", "max(z, 0)", can_be_placed=True, has_zeros=True),
        TargetGate("relu6", "ReLU6", "min(max(z, 0), 6)", has_zeros=True),
        TargetGate("leaky_relu", "LeakyReLU", "max(z, 0) + 0.01·min(z, 0)"),
        TargetGate("hardswish", "HardSwish", "z·min(max(z + 3, 0), 6)/6"),
        TargetGate("relu2", "squared ReLU", "max(z, 0)²", has_zeros=True),
    )
}


def leaky_relu(slope: float | str) -> TargetGate:
    """LeakyReLU with a slope of its own below 0."""
    shown = slope if isinstance(slope, str) else f"{slope:g}"
    title = f"LeakyReLU({shown})" + ("" if slope else " = ReLU")
    return TargetGate("leaky_relu", title, f"max(z, 0) + {shown}·min(z, 0)", slope=slope)


def read_target(name: str) -> TargetGate:
    """The row of TARGETS, or LeakyReLU with another slope: "leaky_relu:0.1", "leaky_relu:fitted".

    Raises ValueError where there is none of that name.
    """
    if name in TARGETS:
        return TARGETS[name]
    kind, _, slope = str(name).partition(":")
    if kind == "leaky_relu" and slope == FITTED:
        return leaky_relu(FITTED)
    if kind == "leaky_relu" and _is_slope(slope):
        return leaky_relu(float(slope))
    raise ValueError(
        f"target must be one of {', '.join(TARGETS)}, or leaky_relu:SLOPE with a slope from 0 to below 1 or the word "
        f"{FITTED}, got {name!r}"
    )


def _is_slope(text: str) -> bool:
    try:
        return 0 <= float(text) < 1
    except ValueError:
        return False
