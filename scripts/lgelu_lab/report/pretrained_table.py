"""Networks that others trained, after as many training steps in each way, and the figure of learned profiles."""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lgelu_lab.report.difference import student
from lgelu_lab.report.drawing import PALETTE, head, new_figure, style
from lgelu_lab.report.frames import ReportData, of_label, seed_count
from lgelu_lab.report.markup import Column, Group, TableSpec
from lgelu_lab.report.numbers import NONE, listed, mean_and_deviation, number, score_text
from lgelu_lab.report.paper import Notes
from lgelu_lab.report.results import SHORT_NAMES
from lgelu_lab.report.run_tables import LEARNED_LABELS, profile_runs
from lgelu_lab.studies.records import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SMOOTH, _RIVAL = "fine-tuned, smooth", "ReLU swapped in at 25 %"
_ORDER = (
    *(_SMOOTH, "fine-tuned, plain swap", "hardened (linear), swapped", "hardened (geometric), swapped"),
    *(_RIVAL, "ReLU from the first step"),
)

Way = tuple[str, list[RunRecord], list[RunRecord]]


def _ways(record: RunRecord) -> tuple[str, ...]:
    """What a run shows: of the fine-tuned network also its plain swap."""
    if record.config.get("relufication"):
        return (_RIVAL,)
    if record.config["harden"]:
        return (f"hardened ({record.config['hardening_schedule']}), swapped",)
    return _ORDER[-1:] if record.config["activation"] == "relu" else _ORDER[:2]


def _records(data: ReportData, benchmark: str) -> dict[str, list[RunRecord]]:
    """{way: its seeds}."""
    runs = data.part("pretrained")
    records = runs.loc[runs["benchmark"] == benchmark].sort_values("seed")["record"]
    found = {way: [record for record in records if way in _ways(record)] for way in _ORDER}
    return {way: seeds for way, seeds in found.items() if seeds}


def _rows(data: ReportData) -> Iterator[Group]:
    for benchmark in dict.fromkeys(data.part("pretrained")["benchmark"]):
        found = _records(data, benchmark)
        for way, records in found.items():
            yield (SHORT_NAMES.get(benchmark, benchmark), way), (way, records, found.get(_RIVAL, []))


def _score(row: Way, notes: Notes) -> str:
    way, records, _ = row
    scores = [record.last.relu_score if _is_swap(way) else record.last.score for record in records]
    return score_text(records[0].metric, scores, records[0].data["eval_samples"])


def _losses(record: RunRecord, way: str) -> list[float]:
    return record.rows["relu_loss" if _is_swap(way) else "loss"]


def _is_swap(way: str) -> bool:
    """Whether the scores count that were taken with ReLU in the gates' place."""
    return way in _ORDER[1:4]


def _loss(row: Way, notes: Notes) -> str:
    way, records, _ = row
    return mean_and_deviation([statistics.fmean(_losses(record, way)) for record in records], 3)


def _against_rival(row: Way, notes: Notes) -> str:
    """Over the seeds that both have; of one seed over its rows, which are the same."""
    way, records, rivals = row
    seeds = {rival.config["seed"]: rival for rival in rivals}
    pairs = [(record, seeds[record.config["seed"]]) for record in records if record.config["seed"] in seeds]
    if way == _RIVAL or not pairs:
        return NONE
    values = [
        tuple(a - b for a, b in zip(_losses(record, way), _losses(rival, _RIVAL), strict=True))
        for record, rival in pairs
    ]
    means = tuple(map(statistics.fmean, values))
    ends = student(means if len(means) > 1 else values[0])
    return f"{number(statistics.fmean(means), 3, signed=True)} ({' to '.join(number(e, 3, signed=True) for e in ends)})"


PRETRAINED_TABLE = TableSpec(
    title="Networks that others trained, after as many training steps in each way",
    caption="Trained from the published weights, with labels, on the same rows in the same order. The difference is "
    "of the loss (of a prediction, nats) against ReLU swapped in at a quarter of the steps, with its 95 % interval: "
    "Student's over the seeds, of one seed over the rows judged. Seconds: by the clock of a shared machine.",
    rows=_rows,
    head=("Network", "Way"),
    columns=(
        Column("Score", _score),
        Column("Loss", _loss),
        Column("Loss minus swapped at 25 %", _against_rival),
        Column("Steps", lambda row, notes: listed(sorted({steps_of(record) for record in row[1]}))),
        Column("Seconds", lambda row, notes: mean_and_deviation([r.whole_seconds for r in row[1]], 0)),
        Column("Seeds", lambda row, notes: seed_count(record.config["seed"] for record in row[1])),
    ),
)


def steps_of(record: RunRecord) -> int:
    """Optimizer steps of a run."""
    config = record.config
    if config["max_steps"] > 0:
        return config["max_steps"]
    return math.ceil(record.data["train_samples"] / config["train_batch_size"]) * math.ceil(config["num_train_epochs"])


_PANELS = {
    "mlp-fmnist": "MLP, Fashion-MNIST",
    "resnet18-cifar10": "ResNet-18, CIFAR-10",
    "deit-tiny-imagenet": "DeiT-Tiny",
    "gpt2-wikitext2": "GPT-2 4 × 128",
}


def draw_profiles(data: ReportData) -> "Figure | None":
    """λ of every layer in the last epoch, a panel a network, a line a start: mean and range over the seeds.

    Of more than four networks those of `_PANELS` come first, and the others have none.
    """
    found: dict[str, dict[str, Sequence[Sequence[float]]]] = {}
    for benchmark in dict.fromkeys([*_PANELS, *profile_runs(data)["benchmark"]]):
        title, runs = _PANELS.get(benchmark, benchmark), of_label(profile_runs(data), benchmark)
        lines = {
            label: [list(record.last.hardness.values()) for record in runs[label]["record"]]
            for label in LEARNED_LABELS
            if label in runs
        }
        found |= {title: lines} if lines and len(found) < len(_PANELS) else {}
    if not found:
        return None
    figure = new_figure(1 + 2.7 * len(found), 3.4)
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (title, lines) in zip(axes, found.items(), strict=True):
        for label, seeds in lines.items():
            layers = range(1, len(seeds[0]) + 1)
            columns = list(zip(*seeds, strict=True))
            axis.plot(layers, [statistics.fmean(column) for column in columns], color=PALETTE[label], label=label)
            axis.fill_between(layers, list(map(min, columns)), list(map(max, columns)), color=PALETTE[label], alpha=0.2)
        style(axis, title=title, x="layer, input to output", y="hardness λ" if axis is axes[0] else "")
        axis.set_ylim(bottom=1)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(fontsize=8)
    head(figure, "Learned hardness over depth, nothing driving it but the loss", fontsize=12)
    return figure
