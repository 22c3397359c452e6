"""What a conversion did to each layer and to the whole network: records that become JSON."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_lgelu.formats import finite_or_none, significant

REPORT_FILE = "report.json"
"""Beside a converted checkpoint."""

HELD_OUT = "inputs held out of the data"
SECOND_SET = "second set"

ENOUGH_ROWS = 2
"""Rows a feature; a layer that was fitted on fewer is called starved."""

NOT_COUNTED = "no output that counts depends on it"
"""The note of a gate that has no refit for that."""


@dataclass(frozen=True)
class LayerRefit:
    """One refit: a linear map behind swapped gates, or several that feed the same sum and were solved together.

    Args:
        layers: names of the modules whose weights were refitted.
        sites: names of the gates whose outputs reach them.
        choice: "kept" (weights as they were), "bias only", or "refit".
        strength: α of the ridge, relative to the mean variance of the features (a few huge ones apart); None unless
            "refit".
        error_before: ‖ŷ − y‖² / ‖y − ȳ‖² on rows that were not fitted, with the weights kept; y is what the original
            computes there. None without cross-validation.
        error_after: the same with the choice.
        width: features of a row (inputs of the map; of a convolution, of one group, times the kernel's size).
        rows: rows that it was fitted on (tokens, positions of a feature map).
        note: why a layer was not refitted, or what to know about it.
        is_unfit: its gates were exchanged and its weights could not be refitted; `note` says why.

    >>> import torch, hf_lgelu
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))
    >>> (layer,) = hf_lgelu.convert_to_relu(net, torch.randn(200, 4)).report.layers
    >>> layer.sites, layer.choice, layer.error_after < layer.error_before
    (('1',), 'refit', True)
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
    is_unfit: bool = False

    @property
    def is_beside(self) -> bool:
        """Whether it is a gate in a part that no output that counts depends on, exchanged with no refit behind it."""
        return self.note == NOT_COUNTED

    @property
    def maps(self) -> tuple[str, ...]:
        """The linear maps among `layers`; none where it tells of a gate by itself."""
        return tuple(name for name in self.layers if name not in self.sites)

    @property
    def is_starved(self) -> bool:
        """Whether it was fitted on fewer than two rows a feature."""
        return 0 < self.rows < ENOUGH_ROWS * self.width

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LayerRefit":
        """The reverse of `dataclasses.asdict`, of values that went through JSON too."""
        return cls(**{**values, "layers": tuple(values["layers"]), "sites": tuple(values["sites"])})


@dataclass(frozen=True)
class NetChange:
    """How far a network is from the original on the same rows.

    `kl` is the mean KL(original ‖ network) in nats per prediction, None where the outputs are no logits;
    `agreement` the share of predictions, 0 to 1, with the original's argmax, which means something only of logits;
    `max_logit_change` the largest |ŷ − y| of any output; `relative_error` ‖ŷ − y‖² / ‖y − ȳ‖² of the outputs;
    `metrics` ("accuracy", or "perplexity" of causal language models) are empty without labels. All of these are of the
    first of the outputs that count; `relative_errors` has the relative error of each where there are several.

    >>> import torch, hf_lgelu
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))
    >>> change = hf_lgelu.convert_to_relu(net, torch.randn(200, 4)).report.held_out.refitted
    >>> 0 <= change.agreement <= 1, change.metrics
    (True, {})
    """

    kl: float | None
    agreement: float
    max_logit_change: float
    relative_error: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    relative_errors: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "NetChange":
        """The reverse of `dataclasses.asdict`, of values that went through JSON too: null is what was not finite."""
        lost = ("max_logit_change", "relative_error")
        return cls(**{**values, **{name: math.inf for name in lost if values[name] is None}})

    @property
    def distance(self) -> float:
        """KL to the original in nats; of outputs that are no class scores, relative error. Infinite of outputs that
        are not finite, so that any others are nearer."""
        found = self.relative_error if self.kl is None else self.kl
        return math.inf if math.isnan(found) else found

    @property
    def in_words(self) -> str:
        """ "KL 0.0025 nat", or the relative error of outputs that are no class scores; "infinitely far"."""
        if not math.isfinite(self.distance):
            return "infinitely far"
        return (
            f"relative error {significant(self.relative_error)}"
            if self.kl is None
            else f"KL {significant(self.kl)} nat"
        )


@dataclass(frozen=True)
class Evaluation:
    """The swap without and with the refit, beside the original, on rows that were not fitted.

    `rows` counts predictions, `units` the rows, sequences or images that they come from.

    >>> import torch, hf_lgelu
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))
    >>> held_out = hf_lgelu.convert_to_relu(net, torch.randn(200, 4)).report.held_out
    >>> held_out.refitted.relative_error < held_out.direct.relative_error
    True
    """

    rows: int
    units: int
    original_metrics: Mapping[str, float]
    direct: NetChange
    refitted: NetChange


@dataclass(frozen=True)
class StepTaken:
    """One rung of the ladder that a conversion climbed.

    Args:
        effort: its name.
        distance: KL in nats, or relative error, to the original on the inputs held out; None where there were none.
        is_kept: whether it was nearer than all before it; of "distill", by more than two standard errors.
        seconds: wall time.
        lost: the share of the original's score that it loses, in the caller's metric, where there is one; below 0 of
            one that scores better.
    """

    effort: str
    distance: float | None
    is_kept: bool
    seconds: float
    lost: float | None = None

    @property
    def gap(self) -> float | None:
        """What `tolerance` bounds: the share lost, without a metric the distance."""
        return self.distance if self.lost is None else self.lost


@dataclass(frozen=True)
class ConversionReport:
    """What `convert_to_relu` did.

    Args:
        model: the model's class.
        gates: {name of a gate: what it was}.
        layers: one entry per refit, in forward order.
        held_out: the evaluation on the part of the data that was kept apart; None under 64 rows.
        evaluation: the same on a second set, if one was given.
        units: rows, sequences or images given; `distinct_units` without duplicates.
        rows: distinct rows (of sequences, their tokens), held out or not.
        folds: of the cross-validation; 1 where there was none.
        seconds: wall time.
        outputs: names of the outputs that counted, the one compared closest first; "" is the name of a bare tensor.
        config_changes: config keys rewritten, as text.
        smooth_calls: what the ReLU network still computes smoothly, as text.
        warnings: what the user should know before trusting it.
        steps: the rungs that were tried; the network is that of the last one kept.
        width_share: units of each block, as a share of the original's.
        target: what the gates became.
        kept: {name of a gate that stayed: what it is}.
        next_step: the next rung of the ladder, and the seconds that it may take; None at the top, or where no inputs
            are held out for it.
        repeated: units of the second set whose inputs are also among those given to fit on.

    >>> import torch, hf_lgelu
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))
    >>> report = hf_lgelu.convert_to_relu(net, torch.randn(200, 4)).report
    >>> report.gates, [layer.layers for layer in report.layers]
    ({'1': 'GELU'}, [('2',)])
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
    outputs: tuple[str, ...] = ("",)
    config_changes: tuple[str, ...] = ()
    smooth_calls: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    steps: tuple[StepTaken, ...] = ()
    width_share: float = 1.0
    target: str = "ReLU"
    kept: Mapping[str, str] = field(default_factory=dict)
    next_step: tuple[str, float] | None = None
    repeated: int = 0

    def __str__(self) -> str:
        from hf_lgelu.refit.wording import summarize  # which reads these records

        return summarize(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; None also for numbers that are not finite, which JSON does not have."""
        return finite_or_none(asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ConversionReport":
        """The reverse of `as_dict`, of values that went through JSON too. Raises TypeError for what is none."""
        own: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        try:
            for key in ("held_out", "evaluation"):
                if own[key] is not None:
                    parts = {name: NetChange.from_dict(own[key][name]) for name in ("direct", "refitted")}
                    own[key] = Evaluation(**{**own[key], **parts})
            own["steps"] = tuple(StepTaken(**step) for step in own["steps"])
            own["layers"] = tuple(map(LayerRefit.from_dict, own["layers"]))
        except KeyError as missing:
            raise TypeError(f"no report of a conversion: it has no {missing}") from missing
        return cls(**own)


def evaluations(report: ConversionReport) -> list[tuple[str, Evaluation]]:
    """[(on what, evaluation)] of those that were made."""
    both = ((HELD_OUT, report.held_out), (SECOND_SET, report.evaluation))
    return [(title, evaluation) for title, evaluation in both if evaluation is not None]
