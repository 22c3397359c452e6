"""What the arguments of a training ask for: the callbacks that harden, and no option that nothing would read."""

from typing import Any

from transformers import TrainerCallback

from hf_lgelu.models.optimizer_groups import check_rate
from hf_lgelu.training.arguments import LambdaGELUTrainingArguments
from hf_lgelu.training.callbacks import HardeningCallback
from hf_lgelu.training.relufication import RelufyCallback

_OPTIONS = {
    "target_hardness": "target_hardness",
    "tolerance": "tolerance",
    "switch_fraction": "switch_fraction",
    "schedule": "hardening_schedule",
    "strategy": "hardening_strategy",
    "switch": "hardening_switch",
    "plateau_tolerance": "plateau_tolerance",
    "rate": "hardening_rate",
    "rate_tolerance": "rate_tolerance",
}
"""{parameter of HardeningCallback: the argument of training that says it}."""

_TOLERANCES = {
    "plateau_tolerance": ("hardening_switch", "plateau"),
    "rate_tolerance": ("hardening_rate", "tolerance"),
}
"""{argument: (the one that makes it count, with this value)}."""


def check_arguments(args: Any) -> None:
    """Raise where the arguments are of another class, or what they ask for cannot be done."""
    if not isinstance(args, LambdaGELUTrainingArguments):
        raise TypeError(f"args must be LambdaGELUTrainingArguments, got {type(args).__name__}")
    check_rate("hardness_lr_multiplier", args.hardness_lr_multiplier)
    if args.harden and args.relufication:
        raise ValueError("harden moves λ to ReLU and relufication puts ReLU in at once: give one of them")
    if args.harden:
        _hardening_callback(args)  # raises on wrong options now, not at the first epoch


def refuse_idle_options(args: LambdaGELUTrainingArguments) -> None:
    """Raise where an option of hardening is given and nothing would read it.

    Of arguments as a user gives them: a search sets them one by one.
    """
    given = _given(args)
    if not args.harden:
        idle = [name for name in given if not (args.relufication and name == "switch_fraction")]
        if idle:
            raise ValueError(
                f"{', '.join(idle)} would do nothing, since harden is off: give harden=True, or leave them out (a "
                "HardeningCallback of your own has its own options)"
            )
    for name in _idle_tolerances(args):
        if name in given:
            dial, value = _TOLERANCES[name]
            raise ValueError(f"{name} counts with {dial}={value!r} alone: give that too, or leave it out")


def asked_for(args: LambdaGELUTrainingArguments) -> list[Any]:
    """All that decides about the callbacks, to tell whether it has changed."""
    return [getattr(args, name) for name in (*_OPTIONS.values(), "harden", "relufication")]


def callbacks_asked_for(args: LambdaGELUTrainingArguments, beside: HardeningCallback | None) -> list[TrainerCallback]:
    """The callbacks that the arguments ask for, beside the HardeningCallback that a user has passed, if any.

    Raises ValueError where that one has options of its own and the arguments say others.
    """
    callbacks: list[TrainerCallback] = []
    if args.harden and beside is None:
        callbacks.append(_hardening_callback(args))
    elif args.harden and (given := _given(args)):
        raise ValueError(
            f"{', '.join(given)} would do nothing, since a HardeningCallback was passed that has options of its own: "
            "give them to it, or leave the callback out"
        )
    if args.relufication:
        callbacks.append(RelufyCallback(args.switch_fraction))
    return callbacks


def _hardening_callback(args: LambdaGELUTrainingArguments) -> HardeningCallback:
    idle = _idle_tolerances(args)  # a search may set one beside another switch or rate
    return HardeningCallback(**{option: getattr(args, name) for option, name in _OPTIONS.items() if name not in idle})


def _idle_tolerances(args: LambdaGELUTrainingArguments) -> list[str]:
    """The arguments that say nothing under the others, as these are."""
    return [name for name, (dial, value) in _TOLERANCES.items() if getattr(args, dial) != value]


def _given(args: LambdaGELUTrainingArguments) -> list[str]:
    defaults = {name: field.default for name, field in type(args).__dataclass_fields__.items()}
    return [name for name in _OPTIONS.values() if getattr(args, name) != defaults[name]]
