"""TrainingArguments with the options of λ-GELU, and the HardeningCallback that they ask for."""

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from hf_lgelu.models.optimizer_groups import DEFAULT_LR_MULTIPLIER, check_rate
from hf_lgelu.models.schedules import DEFAULT_SWITCH_FRACTION, SCHEDULES
from hf_lgelu.training.callbacks import HardeningCallback


@dataclass
class LambdaGELUTrainingArguments(TrainingArguments):
    """All of TrainingArguments, and how the hardness learns, hardens and is reported.

    >>> import hf_lgelu
    >>> args = hf_lgelu.LambdaGELUTrainingArguments(
    ...     output_dir="run", harden=True, hardening_schedule="geometric", hardening_strategy="steps"
    ... )
    >>> args.hardness_lr_multiplier, args.switch_fraction, args.report_substitution
    (9.0, 0.25, True)
    """

    hardness_lr_multiplier: float = field(
        default=DEFAULT_LR_MULTIPLIER,
        metadata={"help": "c: the raw hardness learns with c times the learning rate. The paper uses 9."},
    )
    harden: bool = field(
        default=False,
        metadata={"help": "Harden the gates: learn λ, then freeze s and move every λ to the target (Algorithm 1)."},
    )
    target_hardness: float | None = field(
        default=None,
        metadata={"help": "λ at the end of hardening. Default: from the tolerance, 159.577."},
    )
    tolerance: float | None = field(
        default=None,
        metadata={"help": "ε of the target 2/(ε√(2π)); 5e-3 if neither this nor target_hardness is given."},
    )
    switch_fraction: float = field(
        default=DEFAULT_SWITCH_FRACTION,
        metadata={"help": "Share of training in which λ is learned before hardening begins."},
    )
    hardening_schedule: str = field(
        default="linear",
        metadata={"help": f"Shape of the way to the target: {', '.join(SCHEDULES)}."},
    )
    hardening_strategy: str = field(
        default="epoch",
        metadata={"help": "Move λ once per epoch ('epoch', the paper) or per optimizer step ('steps')."},
    )
    log_hardness: bool = field(
        default=True,
        metadata={"help": "Add every layer's λ, their mean and the learning rate of s to the training logs."},
    )
    report_substitution: bool = field(
        default=True,
        metadata={"help": "Evaluate twice: as it is, and with ReLU substituted."},
    )
    require_lambda_gelu: bool = field(
        default=True,
        metadata={"help": "Refuse a model without λ-GELU. Turn off to train a baseline with the same trainer."},
    )


_OPTIONS = {
    "target_hardness": "target_hardness",
    "tolerance": "tolerance",
    "switch_fraction": "switch_fraction",
    "schedule": "hardening_schedule",
    "strategy": "hardening_strategy",
}
"""{parameter of HardeningCallback: the argument of training that says it}."""


def check_arguments(args: Any) -> None:
    """Raise where the arguments are of another class, or what they ask for cannot be done."""
    if not isinstance(args, LambdaGELUTrainingArguments):
        raise TypeError(f"args must be LambdaGELUTrainingArguments, got {type(args).__name__}")
    check_rate("hardness_lr_multiplier", args.hardness_lr_multiplier)
    if args.harden:
        _hardening_callback(args)  # raises on wrong options now, not at the first epoch


def refuse_idle_options(args: LambdaGELUTrainingArguments) -> None:
    """Raise where an option of hardening is given and harden is off. Of arguments as a user gives them."""
    if not args.harden and (given := _given(args)):
        raise ValueError(
            f"{', '.join(given)} would do nothing, since harden is off: give harden=True, or leave them out (a "
            "HardeningCallback of your own has its own options)"
        )


def hardening_asked_for(
    args: LambdaGELUTrainingArguments, passed: HardeningCallback | None
) -> HardeningCallback | None:
    """The callback that the arguments ask for; None where they do not, or where a user has `passed` one.

    Raises ValueError where a passed callback has options of its own and the arguments say others.
    """
    if not args.harden:
        return None
    if passed is None:
        return _hardening_callback(args)
    if given := _given(args):
        raise ValueError(
            f"{', '.join(given)} would do nothing, since a HardeningCallback was passed that has options of its own: "
            "give them to it, or leave the callback out"
        )
    return None


def _hardening_callback(args: LambdaGELUTrainingArguments) -> HardeningCallback:
    return HardeningCallback(**{option: getattr(args, name) for option, name in _OPTIONS.items()})


def _given(args: LambdaGELUTrainingArguments) -> list[str]:
    defaults = {name: field.default for name, field in type(args).__dataclass_fields__.items()}
    return [name for name in _OPTIONS.values() if getattr(args, name) != defaults[name]]
