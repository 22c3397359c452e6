"""What a conversion did to each layer and to the whole network: records that become JSON, a page or a few lines."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_lgelu.refit.dials import Effort

REPORT_FILE = "report.json"
"""Beside a converted checkpoint."""

NONE = "–"
"""Where a number does not apply, or was not measured. Never a zero."""

HELD_OUT = "inputs held out of the data"
SECOND_SET = "second set"

ENOUGH_ROWS = 2
"""Rows a feature; a layer that was fitted on fewer is called starved."""

_MOST_NAMED = 3
_DIGITS = {"accuracy": 4, "perplexity": 2}


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
        returns: what of the network's distance to the original returns when this layer alone gives what it gives there,
            on some of the inputs held out: KL in nats, of outputs that are no class scores relative error.
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
    returns: float | None = None
    is_unfit: bool = False

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

    @property
    def distance(self) -> float:
        """KL to the original in nats; of outputs that are no class scores, relative error."""
        return self.relative_error if self.kl is None else self.kl

    @property
    def in_words(self) -> str:
        """ "KL 0.0025 nat", or the relative error of outputs that are no class scores."""
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
        lost: the share of the original's score that it loses, in the caller's metric, where there is one.
    """

    effort: Effort
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
        next_step: the next rung of the ladder, the seconds that it may take, and what it usually gives; None at the
            top, or where no inputs are held out for it.
        zeros: the share of zeros behind the gates, of the direct swap and of the converted network, on some of the
            inputs held out; None where the target has none, or nothing is held out.
        zeros_wanted: the share that kinks were moved up for; None where they were not.
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
    next_step: tuple[str, float, str] | None = None
    zeros: tuple[float, float] | None = None
    zeros_wanted: float | None = None
    repeated: int = 0

    def __str__(self) -> str:
        return summarize(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ConversionReport":
        """The reverse of `as_dict`, of values that went through JSON too. Raises TypeError for what is none."""
        own: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        for key in ("held_out", "evaluation"):
            if own[key] is not None:
                parts = {name: NetChange(**own[key][name]) for name in ("direct", "refitted")}
                own[key] = Evaluation(**{**own[key], **parts})
        own["steps"] = tuple(StepTaken(**step) for step in own["steps"])
        own["layers"] = tuple(map(LayerRefit.from_dict, own["layers"]))
        return cls(**own)


@dataclass(frozen=True)
class Provenance:
    """How a converted network came about.

    Args:
        model: Hub id of the original, or the last part of its folder's path: a card names no local paths.
        model_is_on_hub: whether that is a Hub id.
        data: the data set that was fitted on, in words.
        samples: inputs taken from it (rows, sequences, images).
        seed: of their choice; nothing else in a conversion is random.
        evaluation: the second set, in words; None without one.
        evaluation_source: Hub id of its data set, if it is on the Hub.
        evaluation_is_whole: no row of that split was left out; only then are its scores a result on the data set.
        created: UTC, ISO 8601.
        versions: {package: version}.
        hardware: of `hf_lgelu.environment.hardware`.
        equalized: names of the layers whose units were rescaled for int8 afterwards (`equalize_ranges`).
    """

    model: str
    model_is_on_hub: bool
    data: str
    samples: int
    seed: int
    evaluation: str | None
    evaluation_source: str | None
    created: str
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]
    evaluation_is_whole: bool = False
    equalized: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def how_far(report: ConversionReport) -> str:
    """What matters first: how far the network is from the original, on the second set if there is one."""
    measured = evaluations(report)
    if not measured:
        return "How far it is from the original was not measured: nothing was held out, and no second set given."
    title, evaluation = measured[-1]
    change = evaluation.refitted
    parts = [
        f"{name} {score(name, change.metrics.get(name))}, the original's {score(name, value)}"
        for name, value in evaluation.original_metrics.items()
    ]
    parts.append(f"{change.in_words} from the original")
    if change.kl is not None:
        parts.append(f"{percent(change.agreement)} of the predictions the same")
    return f"On the {title} ({predictions_counted(evaluation)}): {'; '.join(parts)}."


def what_was_done(report: ConversionReport) -> str:
    """What the gates became, on what the maps behind them were refitted, and what was tried beside."""
    duplicates = report.units - report.distinct_units
    without = f", {duplicates:,} duplicates left out" if duplicates else ""
    folds = (
        f"a strength chosen on {report.folds} folds"
        if report.folds > 1
        else "a fixed strength, without cross-validation"
    )
    counted = ", ".join(f"`{name}`" for name in report.outputs)
    outputs = f" Of the model's outputs {counted} counted." if report.outputs != ("",) else ""
    return (
        f"{gates_in_words(report)} became {report.target}.{_kept_in_words(report)} "
        f"{choices_in_words(report.layers)}, without labels, on "
        f"{_count(report.distinct_units, 'input')} ({_count(report.rows, 'row')}{without}), by ridge regression "
        f"towards the weights they had, with {folds}.{outputs}{_steps_in_words(report)}{_zeros_in_words(report)} "
        f"It took {report.seconds:.1f} s."
    )


def _kept_in_words(report: ConversionReport) -> str:
    if not report.kept:
        return ""
    stayed = ", ".join(f"`{name}` ({kind})" for name, kind in report.kept.items())
    return f" {_count(len(report.kept), 'gate')} stayed smooth: {stayed}."


def _steps_in_words(report: ConversionReport) -> str:
    """Which rungs were tried, and how near each came; nothing of the refit alone."""
    if len(report.steps) < 2:
        return ""
    kept = [step for step in report.steps if step.is_kept]
    tried = ", ".join(_step_in_words(step, kept) for step in report.steps)
    wider = f" Its blocks have {report.width_share:.4g} times the units." if report.width_share != 1 else ""
    return f" Tried one after the other, with their distance on the inputs held out: {tried}.{wider}"


def _zeros_in_words(report: ConversionReport) -> str:
    if report.zeros is None:
        return ""
    before, after = (percent(share) for share in report.zeros)
    wanted = "" if report.zeros_wanted is None else f" ({report.zeros_wanted:g} wanted)"
    return f" Behind its gates {after} are zeros{wanted}, {before} after the direct swap."


def _step_in_words(step: StepTaken, kept: Sequence[StepTaken]) -> str:
    lost = "" if step.lost is None else f" with {step.lost:.2%} of the score lost".replace("%", " %")
    return f"{step.effort} {significant(step.distance)}{lost}{'' if step.is_kept else _why_not_kept(step, kept)}"


def _why_not_kept(step: StepTaken, kept: Sequence[StepTaken]) -> str:
    if step.gap is None:
        return " (out of time)"
    # What was kept behind it is nearer than what was before.
    is_near = all(step.gap < other.gap for other in kept if other.gap is not None)
    return " (not kept: nearer on too few)" if is_near else " (not kept)"


def gates_in_words(report: ConversionReport) -> str:
    """ "12 gates (GELUActivation)", or "3 gates (2 GELUActivation, 1 SiLUActivation)"."""
    kinds = Counter(report.gates.values())
    names = [kind if len(kinds) == 1 else f"{count} {kind}" for kind, count in kinds.items()]
    return f"{_count(len(report.gates), 'gate')} ({', '.join(names)})"


def choices_in_words(layers: tuple[LayerRefit, ...]) -> str:
    """ "Of 5 linear maps behind them, 3 were refitted, 1 got another bias and 1 was kept"."""
    counts = Counter(layer.choice for layer in layers)
    words = [f"{counts['refit']} {'was' if counts['refit'] == 1 else 'were'} refitted"]
    if counts["bias only"]:
        words.append(f"{counts['bias only']} got another bias")
    if counts["kept"]:
        words.append(f"{counts['kept']} {'was' if counts['kept'] == 1 else 'were'} kept")
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"Of {len(layers)} linear map{'' if len(layers) == 1 else 's'} behind them, {listed}"


def evaluations(report: ConversionReport) -> list[tuple[str, Evaluation]]:
    """[(on what, evaluation)] of those that were made."""
    both = ((HELD_OUT, report.held_out), (SECOND_SET, report.evaluation))
    return [(title, evaluation) for title, evaluation in both if evaluation is not None]


def rest_of_the_gap(report: ConversionReport) -> tuple[str, ...]:
    """Which layers it comes from, and what would take some of it away; () where nothing was held out."""
    if report.held_out is None:
        return ()
    lines = []
    measured = [(layer.returns, layer) for layer in report.layers if layer.returns is not None]
    measured.sort(key=lambda entry: -entry[0])
    largest = [
        f"{quoted(layer.layers)} {significant(returns)}" for returns, layer in measured[:_MOST_NAMED] if returns > 0
    ]
    if len(measured) > 1 and largest:
        lines.append(
            f"What returns of the {report.held_out.refitted.in_words} when a layer alone gives what it gives in the "
            f"original: most for {', '.join(largest)}."
        )
    if report.next_step is not None:
        effort, seconds, gain = report.next_step
        lines.append(
            f"The next rung, `{effort}`, may take about {seconds:.0f} s; on the networks it was tried on it took away "
            f"{gain}."
        )
    return tuple(lines)


def summarize(report: ConversionReport) -> str:
    """The report in a few lines of plain text."""
    lines = [f"{report.model}: {how_far(report)}", f"  {what_was_done(report)}"]
    lines += [f"  {_in_one_line(title, evaluation)}" for title, evaluation in evaluations(report)]
    kept = [name for layer in report.layers if layer.choice == "kept" for name in layer.layers]
    if kept:
        lines.append(f"  weights kept: {', '.join(kept)}")
    lines += [f"  {line}" for line in rest_of_the_gap(report)]
    lines += [f"  warning: {warning}" for warning in report.warnings]
    lines += [f"  still smooth: {call}" for call in report.smooth_calls]
    return "\n".join(lines)


def _in_one_line(title: str, evaluation: Evaluation) -> str:
    direct, refitted = evaluation.direct, evaluation.refitted
    parts = [] if direct.kl is None else [f"KL {significant(direct.kl)} → {significant(refitted.kl)}"]
    if direct.kl is None:
        parts.append(f"relative error {significant(direct.relative_error)} → {significant(refitted.relative_error)}")
    else:
        parts.append(f"same prediction {percent(direct.agreement)} → {percent(refitted.agreement)}")
    what = "output" if direct.kl is None else "logit"
    parts.append(
        f"largest {what} change {significant(direct.max_logit_change)} → {significant(refitted.max_logit_change)}"
    )
    for name, value in evaluation.original_metrics.items():
        swapped, fitted = (score(name, change.metrics.get(name)) for change in (direct, refitted))
        parts.append(f"{name} {swapped} → {fitted}, {score(name, value)} as it was")
    return f"{title} ({predictions_counted(evaluation)}), direct swap → refitted: {'; '.join(parts)}"


def predictions_counted(evaluation: Evaluation) -> str:
    """On how many predictions it was measured, in words."""
    rows = _count(evaluation.rows, "prediction")
    return rows if evaluation.rows == evaluation.units else f"{rows} on {_count(evaluation.units, 'input')}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def score(metric: str, value: float | None) -> str:
    """A score with the digits that fit the metric."""
    return NONE if value is None else f"{value:.{_DIGITS.get(metric, 4)}f}"


def significant(value: float | None) -> str:
    """Three significant digits."""
    return NONE if value is None else f"{value:.3g}"


def percent(fraction: float) -> str:
    """A share of predictions; 99.996 % must not be read as all of them."""
    return "100 %" if fraction == 1 else f"{min(fraction, 0.9999):.2%}".replace("%", " %")


def quoted(names: Sequence[str]) -> str:
    """Names as code, with commas."""
    return ", ".join(f"`{name}`" for name in names)
