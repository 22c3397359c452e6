"""Records of a conversion's changes to each layer and to the whole network: as JSON, and as a few lines of text."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hf_lgelu.comparing.distance import Distance, networks_table
from hf_lgelu.formats import counted, finite_or_none, percent, quoted, significant, text_table
from hf_lgelu.networks.rewrite import GATES_OF_CALLS

REPORT_FILE = "report.json"
"""The report's file in the folder of a converted checkpoint."""

ENOUGH_ROWS = 4
"""Rows for each feature; a layer that was fitted on fewer is called starved."""

_NEAR = 1e-4  # distance below which the report gives no further advice


@dataclass(frozen=True)
class LayerRefit:
    """The refit of a linear map after swapped gates, or of several maps that feed one sum and were solved together.

    Args:
        layers: names of the modules whose weights were refitted.
        sites: names of the gates whose outputs reach these modules.
        choice: "unchanged" (the original's weights), "bias only", or "refit".
        strength: α of the ridge, relative to the mean variance of the features (without a few huge features); None
            unless "refit".
        error_before: ‖ŷ − y‖² / ‖y − ȳ‖² on rows that were not fitted, with the weights kept; y are the original's
            values. None without cross-validation.
        error_after: the same error with the choice.
        width: features of a row (inputs of the map; of a convolution, of one group, times the kernel's size).
        rows: number of rows that were fitted (tokens, positions of a feature map).
        live: the share of its gates' outputs that are not exactly zero, on the inputs held out.
        note: the reason why a layer was not refitted, or a remark on its fit.
        is_unfit: its gates were exchanged and its weights could not be refitted; `note` says why.
        is_unread: a gate that no counted output depends on; it was exchanged without a refit.
    """

    layers: tuple[str, ...]
    sites: tuple[str, ...]
    choice: str
    strength: float | None = None
    error_before: float | None = None
    error_after: float | None = None
    width: int = 0
    rows: int = 0
    live: float | None = None
    note: str | None = None
    is_unfit: bool = False
    is_unread: bool = False

    @property
    def maps(self) -> tuple[str, ...]:
        """The linear maps among `layers`; none where the entry is about a gate by itself."""
        return tuple(name for name in self.layers if name not in self.sites)

    @property
    def is_starved(self) -> bool:
        """Whether the layer was fitted on fewer than `ENOUGH_ROWS` rows for each feature."""
        return 0 < self.rows < ENOUGH_ROWS * self.width


@dataclass(frozen=True)
class Evaluation:
    """Original, plain swap and refitted network, compared on rows that were not fitted.

    `rows` is the number of predictions, and `samples` the number of rows, sequences or images that they come from.
    `live_units` is {gate: the share of its outputs in the refitted network that are not exactly zero}.
    """

    rows: int
    samples: int
    original_metrics: Mapping[str, float]
    direct: Distance
    refitted: Distance
    live_units: Mapping[str, float] = field(default_factory=dict)

    @property
    def networks(self) -> dict[str, Distance]:
        """{name: distance} of the networks that were compared with the original."""
        return {"plain swap": self.direct, "converted": self.refitted}

    @property
    def size_in_words(self) -> str:
        """ "12,288 predictions on 96 inputs", "96 predictions" if each input has one, "96 inputs" for embeddings.

        An output without classes has rows of values, and no predictions.
        """
        if self.refitted.embedding:
            return counted(self.samples, "input")
        rows = counted(self.rows, "row" if self.refitted.kl is None else "prediction")
        return rows if self.rows == self.samples else f"{rows} on {counted(self.samples, 'input')}"


@dataclass(frozen=True)
class StepTaken:
    """One rung of the ladder that a conversion climbed."""

    effort: str
    distance: float | None  # `Distance.value` on the held-out inputs that chose, if any
    is_kept: bool  # whether its network was the best so far (`climb`)
    seconds: float


@dataclass(frozen=True)
class ConversionReport:
    """The report of `convert_to_relu`; `str` gives a short table and a few lines of plain text.

    Args:
        gates: {name of a gate: its class in the original}.
        layers: one entry per refit, in forward order.
        held_out: the evaluation on the part of the data that was kept apart; None where too few were given.
        evaluation: the evaluation on a second set, if one was given.
        samples: rows, sequences, images or graphs given.
        distinct_samples: the same without duplicates.
        rows: number of distinct rows, held out or not. Tokens of sequences are rows, else samples. Below 64 samples,
            and where a batch is one sample, rows are counted at the map that sees most of them.
        folds: number of folds of the cross-validation; 1 without cross-validation.
        outputs: names of the outputs that counted. "" is the name of a bare tensor.
        left_out: names of the outputs that the option `outputs` does not name.
        smooth_calls: the smooth operations that the ReLU network still runs, as text.
        warnings: facts to know before the network is used.
        steps: the rungs that were tried; the network is that of the last rung kept.
        width_share: hidden units of each block, as a share of the original's.
        live_units: the mean of `live` over the layers; None where nothing was held out.
        kept: {name of a gate that stayed: its class}.
        next_step: the next rung of the ladder; None at the top, or where no inputs are held out for it.
        repeated: number of samples of the second set whose inputs the data hold as well.
        choosing_samples: number of held-out samples that chose the network and are not part of `held_out`. It is 0
            where nothing was chosen, or where the samples of `held_out` chose.
        can_be_wider: whether `width` was 1 and the blocks can have more units.
        config: the options, as `ConversionConfig.to_dict` gives them; empty in records from before 0.3.0.

    >>> import torch, hf_lgelu
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))
    >>> report = hf_lgelu.convert_to_relu(net, torch.randn(200, 4)).report
    >>> report.gates, [(layer.layers, layer.choice) for layer in report.layers]
    ({'1': 'GELU'}, [(('2',), 'refit')])
    >>> report.held_out.refitted.relative_error < report.held_out.direct.relative_error
    True
    """

    model: str
    gates: Mapping[str, str]
    layers: tuple[LayerRefit, ...]
    held_out: Evaluation | None
    evaluation: Evaluation | None
    samples: int
    distinct_samples: int
    rows: int
    folds: int
    seconds: float = 0.0
    outputs: tuple[str, ...] = ("",)
    left_out: tuple[str, ...] = ()
    config_changes: tuple[str, ...] = ()
    smooth_calls: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    steps: tuple[StepTaken, ...] = ()
    width_share: float = 1.0
    live_units: float | None = None
    kept: Mapping[str, str] = field(default_factory=dict)
    next_step: str | None = None
    repeated: int = 0
    choosing_samples: int = 0
    can_be_wider: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for title, measured in evaluations(self):
            table = networks_table(measured.original_metrics, measured.networks, main=True)
            lines.append(f"On the {title} ({measured.size_in_words}):")
            lines += [f"  {line}" for line in text_table(*table, text_columns=1)]
        lines += [f"{what}: {how}" for what, how in what_was_done(self).items()]
        if self.held_out is not None and _NEAR <= self.held_out.refitted.value < math.inf:
            if self.next_step is not None:
                lines.append(f"The next rung, `effort` {self.next_step!r}, may bring the network nearer.")
            if self.can_be_wider:
                more = "`width` 1.25 adds a quarter, in about three times this time"
                lines.append(f"More hidden units usually help most: {more}.")
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += [f"still smooth: {call}" for call in self.smooth_calls]
        modules = [name for name in self.gates if GATES_OF_CALLS not in name.split(".")]
        if modules and not self.config_changes:  # a bare module has no config that says its gates
            others = "" if len(modules) == len(self.gates) else f" but those of calls (`{GATES_OF_CALLS}`)"
            lines.append(
                "To load the state dict elsewhere, first put ReLU into the fresh network at each name in "
                f"`report.gates`{others} (`network.set_submodule(name, gate)`, of a function `setattr`); other code "
                "computes another network"
            )
        return "\n  ".join([f"{self.model}: {gates_in_words(self)} became ReLU", *lines])

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; None also for numbers that are not finite, which JSON does not have."""
        return finite_or_none(asdict(self))


def with_live_units(
    layers: Sequence[LayerRefit], evaluation: Evaluation | None
) -> tuple[tuple[LayerRefit, ...], float | None]:
    """(the layers with their shares of live units, the mean of these shares)."""
    found = {} if evaluation is None else evaluation.live_units
    shares = [[found[site] for site in layer.sites if site in found] for layer in layers]
    layers = tuple(
        replace(layer, live=sum(each) / len(each)) if each else layer
        for layer, each in zip(layers, shares, strict=True)
    )
    live = [layer.live for layer in layers if layer.live is not None]
    return layers, sum(live) / len(live) if live else None


def evaluations(report: ConversionReport) -> list[tuple[str, Evaluation]]:
    """[(name of the data, evaluation)] of the evaluations that were made."""
    both = (("inputs held out of the data", report.held_out), ("second set", report.evaluation))
    return [(title, evaluation) for title, evaluation in both if evaluation is not None]


def what_was_done(report: ConversionReport) -> dict[str, str]:
    """{what: how}, in words, of the gates, the refit, the data and the rungs."""
    counts = Counter(layer.choice for layer in report.layers for _ in layer.maps)
    words = {"refit": "refitted", "bias only": "with only another bias", "unchanged": "unchanged"}
    unchanged = [name for layer in report.layers if layer.choice == "unchanged" for name in layer.maps]
    maps = ", ".join(f"{counts[choice]:,} {word}" for choice, word in words.items() if counts[choice])
    chose, apart = report.choosing_samples, report.held_out.samples if report.held_out is not None else 0
    inputs = f"{report.distinct_samples:,} ({counted(report.rows, 'row')})"
    inputs += f", {chose + apart:,} of them held out" * bool(apart)
    inputs += f": {chose:,} to choose the rung, {apart:,} to measure the distance" * bool(chose)
    duplicates = report.samples - report.distinct_samples
    inputs += f"; {counted(duplicates, 'duplicate')} left out" * bool(duplicates)
    where = "inputs that choose" if chose else "inputs held out"
    means = any(found.refitted.embedding and found.rows != found.samples for _, found in evaluations(report))
    live, width = report.live_units, report.width_share
    is_wider = width != 1
    found = {
        "gates that stayed smooth": ", ".join(f"`{name}` ({kind})" for name, kind in report.kept.items()),
        "linear maps": (maps or "none") + f" ({quoted(unchanged)})" * bool(unchanged),
        "inputs": inputs,
        "ridge": f"strength chosen on {report.folds} folds" if report.folds > 1 else "fixed strength, not validated",
        "outputs that counted": "" if report.outputs == ("",) else quoted(report.outputs),
        "outputs that did not count": quoted(report.left_out),
        "embedding": f"mean of `{report.outputs[0]}` over all that is no padding" if means else "",
        f"rungs, distance on the {where}": rungs_in_words(report) if len(report.steps) > 1 else "",
        "hidden units": f"{width:.4g} times the original's" if is_wider else "",
        "units that are not zero": "" if live is None else percent(live),
        "the same, of the original's number": "" if live is None or not is_wider else percent(live * width),
        "time": f"{report.seconds:.1f} s",
    }
    return {what: how for what, how in found.items() if how}


def gates_in_words(report: ConversionReport) -> str:
    """ "12 gates (GELUActivation)", or "3 gates (2 GELUActivation, 1 SiLUActivation)"."""
    kinds = Counter(report.gates.values())
    names = [kind if len(kinds) == 1 else f"{count} {kind}" for kind, count in kinds.items()]
    return f"{counted(len(report.gates), 'gate')} ({', '.join(names)})"


def rungs_in_words(report: ConversionReport) -> str:
    """ "refit 0.21, place 0.13, distill 0.14 (not kept)"."""
    kept = [step.distance for step in report.steps if step.is_kept and step.distance is not None]
    words = []
    for step in report.steps:
        why = ""
        if not step.is_kept:
            # Compared with all kept rungs: a later one is nearer than an earlier one.
            is_nearer = step.distance is not None and all(step.distance < distance for distance in kept)
            why = f" (not kept{': nearer on too few' * is_nearer})"
        words.append(f"{step.effort} {significant(step.distance)}{why}")
    return ", ".join(words)
