"""TrainingArguments with the options of λ-GELU."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from hf_lgelu.models.optimizer_groups import DEFAULT_LR_MULTIPLIER
from hf_lgelu.training.adaptive import DEFAULT_RATE_TOLERANCE
from hf_lgelu.training.layer_targets import MEASURED
from hf_lgelu.training.schedules import DEFAULT_PLATEAU_TOLERANCE, DEFAULT_SWITCH_FRACTION, SCHEDULES


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
    target_hardness: float | str | None = field(
        default=None,
        metadata={
            "help": "λ at the end of hardening, or 'measured': for each layer what fits its pre-activations. Default: "
            "from the tolerance, 159.577."
        },
    )
    tolerance: float | None = field(
        default=None,
        metadata={
            "help": "ε of the target 2/(ε√(2π)); 5e-3 if neither this nor target_hardness is given. Of a measured "
            "target, the share of a layer's root mean square by which ReLU may move it; 0.01 if not given."
        },
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
    hardening_switch: str = field(
        default="fixed",
        metadata={
            "help": "Begin to harden after the switch fraction ('fixed', the paper), or as soon as λ has settled and "
            "after the switch fraction at the latest ('plateau')."
        },
    )
    plateau_tolerance: float = field(
        default=DEFAULT_PLATEAU_TOLERANCE,
        metadata={"help": "λ has settled when its mean moves by at most this share of itself in two epochs running."},
    )
    hardening_rate: str = field(
        default="schedule",
        metadata={
            "help": "In each epoch λ goes as far as the schedule says ('schedule', the paper), or as far as the "
            "predictions on the evaluation data move by no more than rate_tolerance ('tolerance')."
        },
    )
    rate_tolerance: float = field(
        default=DEFAULT_RATE_TOLERANCE,
        metadata={"help": "Mean KL of a prediction before and after λ moves, in nats."},
    )
    relufication: bool = field(
        default=False,
        metadata={
            "help": "The rival of hardening: train a smooth network for the switch fraction, put ReLU in, train on."
        },
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

    def __post_init__(self) -> None:
        if isinstance(self.target_hardness, str) and self.target_hardness != MEASURED:  # from a command line
            try:
                self.target_hardness = float(self.target_hardness)
            except ValueError as error:
                raise ValueError(
                    f"target_hardness must be a number or {MEASURED!r}, got {self.target_hardness!r}"
                ) from error
        super().__post_init__()
