"""What a conversion did to each layer and to the whole network, as records that become JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class LayerRefit:
    """One refit: a linear map behind swapped gates, or several that feed the same sum and were solved together.

    Args:
        layers: names of the modules whose weights were refitted.
        sites: names of the gates whose outputs reach them.
        choice: "kept" (weights as they were), "bias only", or "refit".
        strength: α of the ridge, relative to the mean eigenvalue of the features' covariance; None unless "refit".
        error_before: ‖ŷ − y‖² / ‖y − ȳ‖² on rows that were not fitted, with the weights kept; y is what the original
            computes there. None without cross-validation.
        error_after: the same with the choice.
        width: features of a row (inputs of the map; of a convolution, of one group, times the kernel's size).
        rows: rows that it was fitted on (tokens, positions of a feature map).
        note: why a layer was not refitted, or what to know about it.
    """

    layers: tuple[str, ...]
    sites: tuple[str, ...]
    choice: str
    strength: float | None
    error_before: float | None
    error_after: float | None
    width: int
    rows: int
    note: str | None = None


@dataclass(frozen=True)
class NetChange:
    """How far a network is from the original on the same rows.

    `kl` is the mean KL(original ‖ network) in nats per prediction, None where the outputs are no logits;
    `agreement` the share of predictions, 0 to 1, with the original's argmax, which means something only of logits;
    `max_logit_change` the largest |ŷ − y| of any output; `relative_error` ‖ŷ − y‖² / ‖y − ȳ‖² of the outputs;
    `metrics` ("accuracy", or "perplexity" of causal language models) are empty without labels.
    """

    kl: float | None
    agreement: float
    max_logit_change: float
    relative_error: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """The swap without and with the refit, beside the original, on rows that were not fitted.

    `rows` counts predictions, `units` the rows, sequences or images that they come from.
    """

    rows: int
    units: int
    original_metrics: Mapping[str, float]
    direct: NetChange
    refitted: NetChange


@dataclass(frozen=True)
class ConversionReport:
    """What `convert_to_relu` did.

    Args:
        model: the model's class.
        gates: {name of a gate: what it was}.
        layers: one entry per refit, in forward order.
        held_out: the evaluation on the part of the calibration inputs that was kept apart; None under 64 rows.
        evaluation: the same on a second set, if one was given.
        units: rows, sequences or images given; `distinct_units` without duplicates.
        rows: distinct rows (of sequences, their tokens), held out or not.
        folds: of the cross-validation; 1 where there was none.
        seconds: wall time.
        config_changes: config keys rewritten, as text.
        smooth_calls: what the ReLU network still computes smoothly, as text.
        warnings: what the user should know before trusting it.
    """

    model: str
    gates: Mapping[str, str]
    layers: tuple[LayerRefit, ...]
    held_out: Evaluation | None
    evaluation: Evaluation | None
    units: int
    distinct_units: int
    rows: int
    folds: int
    seconds: float
    config_changes: tuple[str, ...] = ()
    smooth_calls: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        from hf_lgelu.refit.markdown import summarize  # which reads this file

        return summarize(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)
