"""The options of hardening, and TrainingArguments with these and the other options of λ-GELU."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from transformers import TrainingArguments

from hf_lgelu.activation.hardness import require_known
from hf_lgelu.models.hardening import DEFAULT_SWITCH_FRACTION, SCHEDULES, switch_position, target_hardnesses
from hf_lgelu.models.optimizer_groups import DEFAULT_LR_MULTIPLIER

STRATEGIES = ("epoch", "steps")  # how often λ moves while it hardens, in the words of TrainingArguments


@dataclass(frozen=True)
class HardeningConfig:
    """The options of hardening: where every λ ends, when it begins to move, and how.

    Args:
        target_hardness: λ at the end: a number for all gates, or a mapping by name as in `anneal_hardness`.
        tolerance: ε instead of a target. Each gate's target is then `hardness_for_tolerance(ε, gate)`, for λ-GELU
            2/(ε√(2π)). 5e-3 if neither is given.
        switch_fraction: share of training in which λ is learned, in [0, 1).
        hardening_schedule: a row of SCHEDULES; "linear" is the paper's.
        hardening_strategy: "epoch" (the paper's), or "steps", which counts optimizer steps instead of epochs.

    Raises ValueError for an option out of its range.
    """

    target_hardness: float | Mapping[str, float] | None = None
    tolerance: float | None = None
    switch_fraction: float = DEFAULT_SWITCH_FRACTION
    hardening_schedule: str = "linear"
    hardening_strategy: str = "epoch"

    def __post_init__(self) -> None:
        # Each of these lines raises ValueError if its option is out of range.
        require_known("hardening_strategy", self.hardening_strategy, STRATEGIES)
        switch_position(1, self.switch_fraction)
        require_known("schedule", self.hardening_schedule, SCHEDULES)
        _ = self.targets

    @cached_property
    def targets(self) -> dict[str, float]:
        """{row of GATES or name of a gate: λ at the end}."""
        return target_hardnesses(self.target_hardness, self.tolerance)


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class LambdaGELUTrainingArguments(TrainingArguments):
    """TrainingArguments with options for how λ learns, hardens and is reported."""

    hardness_lr_multiplier: float = _option(
        DEFAULT_LR_MULTIPLIER, "c: the raw hardness learns with c times the learning rate. The paper uses 9."
    )
    harden: bool = _option(
        False, "Harden the gates: learn λ, then freeze s and move every λ to the target (Algorithm 1)."
    )
    # The parser of a command line takes a number. In Python, a mapping as in HardeningConfig is accepted, too.
    target_hardness: float | None = _option(
        None, "λ at the end of hardening. Default: by the tolerance (λ-GELU: 159.577)."
    )
    tolerance: float | None = _option(
        None, "ε of the target, 2/(ε√(2π)) for λ-GELU; 5e-3 if neither this nor target_hardness is given."
    )
    switch_fraction: float = _option(
        HardeningConfig.switch_fraction, "Share of training in which λ is learned before hardening begins."
    )
    hardening_schedule: str = _option(
        HardeningConfig.hardening_schedule, f"Shape of the way to the target: {', '.join(SCHEDULES)}."
    )
    hardening_strategy: str = _option(
        HardeningConfig.hardening_strategy,
        "Move λ once per epoch ('epoch', the paper) or per optimizer step ('steps').",
    )
    log_hardness: bool = _option(True, "Log every layer's λ, their mean and the learning rate of s.")
    report_substitution: bool = _option(True, "Evaluate the model twice: as it is, and with ReLU substituted.")
    require_lambda_gelu: bool = _option(
        True, "Refuse a model without λ-GELU. Turn off to train a baseline with the same trainer."
    )

    def hardening_config(self) -> HardeningConfig:
        """The options of hardening among these arguments. Raises ValueError if an option is out of its range."""
        return HardeningConfig(**{option.name: getattr(self, option.name) for option in fields(HardeningConfig)})

    def given_hardening_options(self) -> list[str]:
        """The names of the options of hardening that differ from their defaults."""
        return [option.name for option in fields(HardeningConfig) if getattr(self, option.name) != option.default]
