"""The dials of a conversion: what it is for, how near it is to come, how long it may try. Nothing here imports torch.

| effort | what is changed |
|---|---|
| refit | the maps behind the gates, by ridge |
| place | before that, each ReLU's kink and slope, and in a wider network what the units added are for |
| blocks | after that, layer by layer, both maps of each block, by Adam on the block's own inputs |
| distill | at last all blocks together, by Adam on the whole network's outputs |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hf_lgelu.refit.target_gates import TargetGate, read_target

Effort = Literal["refit", "place", "blocks", "distill"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)

FAR_KL = 0.1
"""Nats of mean KL to the original beyond which a result is called far from it."""

UNITS_TO_RANK = 64
"""Inputs, about, on which gates are ranked by what they cost."""

KEPT_COUNTS = (0, 1, 2, 4, 8)
"""Points of a curve of kept gates."""


@dataclass(frozen=True)
class Dials:
    """What `convert_to_relu` is asked for, as far as it needs no model; the words are its arguments'.

    Raises ValueError for values that are none, and for dials that do not go together.
    """

    target: str = "relu"
    zeros: float | None = None
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
            if value is not None and not (_is_number(value) and value > 0):
                raise ValueError(f"{name} must be a number above 0, or None, got {value!r}")
        if not (_is_number(self.width_budget) and 1 <= self.width_budget < math.inf):
            raise ValueError(
                f"width_budget is a share of the units there are, 1 or more and finite, got {self.width_budget!r}"
            )
        if not isinstance(self.bf16, bool):
            raise ValueError(f"bf16 must be True or False, got {self.bf16!r}")
        steps = self.distill_steps
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ValueError(f"distill_steps must be a whole number from 1 on, got {steps!r}")
        for name, left_out in (("distill_steps", None), ("bf16", False)):
            if getattr(self, name) != left_out and self.highest != "distill":
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is for effort='distill', and the last rung asked for is "
                    f"{self.highest!r}"
                )
        self._check_zeros(self.gate)
        self._check_placement(self.gate)

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
        """Whether kinks may move: where zeros are wanted, they are where these want them."""
        return self.gate.can_be_placed and self.zeros is None

    @property
    def rungs(self) -> Sequence[Effort]:
        """What is tried one after the other where there are inputs enough."""
        if self.zeros is not None:
            return EFFORTS[:1]
        if not self.can_be_placed:
            return [effort for effort in self._up_to_highest if effort != "place"]
        return EFFORTS[:2] if self.width_budget > 1 and self.highest == "refit" else self._up_to_highest

    @property
    def _up_to_highest(self) -> Sequence[Effort]:
        return EFFORTS[: EFFORTS.index(self.highest) + 1]

    def _check_zeros(self, gate: TargetGate) -> None:
        if self.zeros is None:
            return
        if not (gate.has_zeros and isinstance(self.zeros, float) and 0 < self.zeros < 1):
            raise ValueError(
                f"zeros must be a share between 0 and 1, of a target that has some, got {self.zeros!r}, {self.target!r}"
            )
        if self.width_budget > 1 or self.effort not in (None, "refit"):
            raise ValueError(
                f"zeros={self.zeros:g} goes with effort='refit' and no width_budget: steps on the maps before the "
                "gates would take the zeros back, and units that are always on have none"
            )

    def _check_placement(self, gate: TargetGate) -> None:
        if not gate.can_be_placed and (self.width_budget > 1 or self.effort == "place"):
            raise ValueError(
                f"kinks are placed and blocks widened for ReLU only, not for target={gate.name!r}; leave "
                "width_budget out, and take effort='refit', 'blocks' or 'distill'"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
