"""The dials of a conversion: what it is for, how near it is to come, how long it may try. Nothing here imports torch.

| effort | what is changed |
|---|---|
| refit | the maps behind the gates, by ridge |
| place | before that, each ReLU's kink and slope, and in a wider network what the units added are for |
| distill | at last all blocks together, by Adam on the whole network's outputs |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from hf_lgelu.refit.target_gates import TargetGate, read_target

Effort = Literal["refit", "place", "distill"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)

FAR_KL = 0.1
"""Nats of mean KL to the original beyond which a result is called far from it."""

UNITS_TO_RANK = 64
"""Inputs, about, on which gates are ranked by what they cost."""


@dataclass(frozen=True)
class Dials:
    """What `convert_to_relu` is asked for, as far as it needs no model; the words are its arguments'.

    Raises ValueError for values that are none, and for dials that do not go together.
    """

    target: str = "relu"
    effort: str | None = None
    width_budget: float = 1.0
    tolerance: float | None = None
    max_seconds: float | None = None
    max_kl: float | None = FAR_KL
    distill_steps: int | None = None
    bf16: bool = False

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in EFFORTS:
            raise ValueError(f"effort must be one of {', '.join(EFFORTS)}, got {self.effort!r}")
        for name in ("tolerance", "max_seconds", "max_kl"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be a number above 0, or None, got {value!r}")
        if not 1 <= self.width_budget < math.inf:
            raise ValueError(
                f"width_budget is a share of the units there are, 1 or more and finite, got {self.width_budget!r}"
            )
        if self.distill_steps is not None and self.distill_steps < 1:
            raise ValueError(f"distill_steps must be a whole number from 1 on, got {self.distill_steps!r}")
        for name, left_out in (("distill_steps", None), ("bf16", False)):
            if getattr(self, name) != left_out and self.highest != "distill":
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is for effort='distill', and the last rung asked for is "
                    f"{self.highest!r}"
                )
        if not self.can_be_placed and (self.width_budget > 1 or self.effort == "place"):
            raise ValueError(
                f"kinks are placed and blocks widened for ReLU only, not for target={self.gate.name!r}; leave "
                "width_budget out, and take effort='refit' or 'distill'"
            )

    @property
    def gate(self) -> TargetGate:
        """What the gates become."""
        return read_target(self.target)

    @property
    def highest(self) -> Effort:
        """The last rung that may be tried: with a tolerance alone, as far as needed."""
        if self.effort is not None:
            return self.effort  # type: ignore[return-value]
        return EFFORTS[0] if self.tolerance is None else EFFORTS[-1]

    @property
    def can_be_placed(self) -> bool:
        """Whether kinks may move."""
        return self.gate.can_be_placed

    @property
    def rungs(self) -> Sequence[Effort]:
        """What is tried one after the other where there are inputs enough."""
        up_to_highest = EFFORTS[: EFFORTS.index(self.highest) + 1]
        if not self.can_be_placed:
            return [effort for effort in up_to_highest if effort != "place"]
        return EFFORTS[:2] if self.width_budget > 1 and self.highest == "refit" else up_to_highest
