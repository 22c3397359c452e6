"""What holds: each claim of the paper, judged by the runs that are there, with the number."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import pandas as pd

from lgelu_lab.report.frames import ReportData, evaluations, of_label, paired
from lgelu_lab.report.markup import Cell, Column, Group, TableSpec
from lgelu_lab.report.numbers import LOWER_IS_BETTER, digits_of, number, present, sampled
from lgelu_lab.report.paper import PAPER_RECIPES, Notes, marked
from lgelu_lab.report.run_tables import HARDENED, LEARNED_LABELS, correlation_curves, grid_cells, profile_runs

HOLDS, FAILS, TOO_CLOSE, NOT_MEASURED = "holds", "does not hold", "too close to say", "not measured"
_FREE = 1e-3  # what a swap may change and still be free, of accuracy, or as a share of a perplexity
_SAME_ORDER = 0.5  # Spearman's ρ from which on two profiles are called alike


@dataclass(frozen=True)
class Evidence:
    """What one benchmark says on a claim: whether it holds there (None: too close to say), and the number in words."""

    holds: bool | None
    number: str


@dataclass(frozen=True)
class Claim:
    """One claim of the paper: what it says, from when on it counts as holding, and the judge of one benchmark.

    `benchmarks`: those that it is about; `part`: of the runs that it is judged by.
    """

    says: str
    rule: str
    judge: Callable[[ReportData, str], Evidence | None]
    benchmarks: tuple[str, ...]
    part: str = ""


_ALL = tuple(PAPER_RECIPES)
_GPT2 = "gpt2-wikitext2"
_VISION = ("mlp-fmnist", "resnet18-cifar10", "resnet18-cifar100", "deit-tiny-imagenet")


def _order(data: ReportData, benchmark: str) -> Evidence | None:
    last = [curve.iloc[-1].mean() for curve in correlation_curves(data, benchmark).values()]
    last = present(last)
    if not last:
        return None
    low, high = (number(value, 2, signed=True) for value in (min(last), max(last)))
    return Evidence(min(last) >= _SAME_ORDER, f"ρ_S {low} to {high}" if low != high else f"ρ_S {low}")


def _at_least_gelu(data: ReportData, benchmark: str) -> Evidence | None:
    groups = of_label(profile_runs(data), benchmark)
    if "GELU" not in groups:
        return None
    metric = groups["GELU"]["metric"].iloc[0]
    sign, digits = -1 if metric in LOWER_IS_BETTER else 1, digits_of(metric)
    gains, clear = [], []  # a gain is above 0 where λ-GELU is the better one
    for label in set(LEARNED_LABELS) & groups.keys():
        pairs = paired(groups[label], groups["GELU"])
        differences = list(pairs["best_score"] - pairs["best_score_base"])
        if differences:
            gains.append(sign * statistics.fmean(differences))
            clear.append(abs(gains[-1]) > _noise(differences, pairs))
    if not gains:
        return None
    shown = [number(sign * gain, digits, signed=True) for gain in (min(gains), max(gains))]
    lost = any(sure and gain < 0 for gain, sure in zip(gains, clear, strict=True))
    won = all(sure and gain > 0 for gain, sure in zip(gains, clear, strict=True))
    return Evidence(False if lost else won or None, f"{metric} {' to '.join(dict.fromkeys(shown))}")


def _noise(differences: list[float], pairs: pd.DataFrame) -> float:
    """Below this a mean difference says nothing: its deviation over seeds, or what one seed's samples leave open.

    Infinite for one seed of a score without an interval (perplexity).
    """
    if len(differences) > 1:
        return statistics.stdev(differences)
    first = pairs.iloc[0]
    ends = sampled(first["metric"], [first["best_score"]], first["eval_samples"])
    return (ends[1] - ends[0]) / 2 if ends else math.inf


def _swap_changes(data: ReportData, benchmark: str) -> Mapping[str, float]:
    """{"GELU" or the hardened label: mean change by the swap in the last epoch}; of perplexity its share."""
    runs = evaluations(data, "last")
    found = of_label(runs[(runs["part"] == "") & runs["relu"].notna()], benchmark)
    changes = {}
    for label in {"GELU", HARDENED} & found.keys():
        seeds = found[label]
        scale = 1.0 if seeds["greater_is_better"].iloc[0] else seeds["score"]
        changes[label] = float(((seeds["relu"] - seeds["score"]) / scale).mean())
    return changes


def _change_text(change: float, metric: str) -> str:
    if metric in LOWER_IS_BETTER:
        return f"{metric} {number(100 * change, 2, signed=True)} %"
    return f"{metric} {number(change, digits_of(metric), signed=True)}"


def _saves_the_swap(data: ReportData, benchmark: str) -> Evidence | None:
    changes = _swap_changes(data, benchmark)
    if HARDENED not in changes:
        return None
    first = data.runs[(data.runs["benchmark"] == benchmark) & (data.runs["label"] == HARDENED)].iloc[0]
    metric, free = first["metric"], _FREE
    if metric not in LOWER_IS_BETTER:
        free = max(_FREE, 1 / first["eval_samples"])
    text = f"hardened {_change_text(changes[HARDENED], metric)}"
    is_free = {label: abs(change) <= free * (1 + 1e-9) for label, change in changes.items()}
    if "GELU" in changes:
        text += f", GELU {_change_text(changes['GELU'], metric).removeprefix(metric + ' ')}"
    nothing_to_save = is_free[HARDENED] and is_free.get("GELU", False)
    return Evidence(None if nothing_to_save else is_free[HARDENED], text)


def _cannot_be_swapped(data: ReportData, benchmark: str) -> Evidence | None:
    found = _saves_the_swap(data, benchmark)
    return found and Evidence(found.holds is False, found.number)


def _grid_trend(data: ReportData, benchmark: str) -> Evidence | None:
    cells = {point: runs for point, runs in grid_cells(data, benchmark).items() if len(runs)}
    if len(cells) < 2:
        return None
    drifts = {point: runs["drift"].mean() for point, runs in cells.items()}
    gains = {point: gain for point, runs in cells.items() if present([gain := runs["gain"].mean()])}
    ordered = [
        later - first
        for (one, first), (other, later) in itertools.permutations(drifts.items(), 2)
        if one[0] == other[0] and one[1] < other[1]  # c grows at the same t
    ]
    ordered += [
        first - later
        for (one, first), (other, later) in itertools.permutations(drifts.items(), 2)
        if one[1] == other[1] and one[0] < other[0]  # t grows at the same c
    ]
    held = sum(step >= 0 for step in ordered)
    most = max(drifts, key=drifts.get)
    text = f"{held} of {len(ordered)} pairs of settings; largest drift at t = {most[0]:g}, c = {most[1]:g}"
    if gains:
        best = max(gains, key=lambda point: gains[point])
        text += f", best score at t = {best[0]:g}, c = {best[1]:g}"
    return Evidence(held == len(ordered), text)


def _drift_differs(data: ReportData, benchmark: str) -> Evidence | None:
    """The paper's drift over ours, and how far λ goes beside its net way from the start to the end, there and here."""
    ratios, here, there = [], [], []
    for label, seeds in of_label(profile_runs(data), benchmark).items():
        paper = data.paper.value(benchmark, seeds["key"].iloc[0], "drift")
        ended = data.paper.value(benchmark, seeds["key"].iloc[0], "mean_hardness")
        if label in LEARNED_LABELS and paper:
            ratios.append(paper[0] / seeds["drift"].mean())
        if label == LEARNED_LABELS[0] and paper and ended:
            start = statistics.fmean(next(iter(seeds["record"])).initial_hardness.values())
            here.append(seeds["drift"].mean() / (seeds["mean_hardness"].mean() - start))
            there.append(paper[0] / (ended[0] - start))
    if not ratios:
        return None
    text = f"{' to '.join(dict.fromkeys(number(end, 1) for end in (min(ratios), max(ratios))))} times ours"
    if here:
        text += f"; its way is {number(there[0], 1)} times the net one from a uniform start, ours {number(here[0], 1)}"
    return Evidence(max(abs(ratio - 1) for ratio in ratios) < 0.2, text)


CLAIMS: dict[str, Claim] = {
    "order": Claim(
        "The order of the layers by hardness repeats over initializations on vision",
        f"every pair of init modes has ρ_S ≥ {_SAME_ORDER:g} in the last epoch",
        _order,
        _VISION,
    ),
    "at-least-gelu": Claim(
        "λ-GELU is at least as good as GELU",
        "every init mode's mean best score is better than GELU's with the same seeds; too close where the two differ "
        "by less than the deviation over seeds, or than one seed's evaluation samples leave open, and for one seed of "
        "a perplexity",
        _at_least_gelu,
        _ALL,
    ),
    "swap": Claim(
        "Hardening saves the swap to ReLU",
        "the swap in the last epoch changes accuracy by at most 0.001 or one evaluation sample (perplexity by 0.1 %); "
        "too close where GELU's swap does no more",
        _saves_the_swap,
        tuple(name for name in _ALL if name != _GPT2),
    ),
    "gpt2": Claim(
        "GPT-2 cannot be swapped, hardened or not", "the rule above is not met", _cannot_be_swapped, (_GPT2,)
    ),
    "grid": Claim(
        "Smaller t and larger c move the gates more",
        "so for every pair of settings that differ in one of them",
        _grid_trend,
        ("mlp-fmnist", "resnet18-cifar100"),
        part="grid",
    ),
    "drift": Claim(
        "The drift V_λ of Table I",
        "the paper's is within a fifth of ours for every init mode",
        _drift_differs,
        _ALL,
    ),
}
"""{key: one claim and its judge}."""


Judged = tuple[Claim, Mapping[str, Evidence]]


def _judged(data: ReportData) -> Iterator[Group]:
    for claim in CLAIMS.values() if PAPER_RECIPES.keys() & set(data.runs["benchmark"]) else ():
        found = {name: claim.judge(data, name) for name in claim.benchmarks}
        yield (claim.says,), (claim, {name: evidence for name, evidence in found.items() if evidence})


def _verdict(judged: Judged, notes: Notes) -> Cell:
    claim, found = judged
    held = [evidence.holds for evidence in found.values()]
    counts = {
        HOLDS: held.count(True),
        FAILS: held.count(False),
        TOO_CLOSE: held.count(None),
        NOT_MEASURED: len(claim.benchmarks) - len(held),
    }
    counts = {words: times for words, times in counts.items() if times}
    text = (
        ", ".join(f"{words} on {times}" for words, times in counts.items()) if len(counts) > 1 else next(iter(counts))
    )
    measured = counts.keys() - {NOT_MEASURED}
    marks = {frozenset(): "missing", frozenset({HOLDS}): "better", frozenset({FAILS}): "worse"}
    return Cell(text, marks.get(frozenset(measured), "warning"))


def _evidence(data: ReportData, judged: Judged, notes: Notes) -> str:
    claim, found = judged
    runs = data.part(claim.part)
    letters = {name: marked(runs[runs["benchmark"] == name], notes) for name in found}
    parts = [f"{name}{letters[name]}: {evidence.number}" for name, evidence in found.items()]
    missing = [name for name in claim.benchmarks if name not in found]
    return "; ".join([*parts, f"no runs: {', '.join(missing)}"] if missing else parts)


CLAIMS_TABLE = TableSpec(
    title="What holds of the paper's claims",
    caption=lambda data: (
        f"The claims of {data.paper.citation or 'the paper'}, each judged on those of its benchmarks that have the "
        "runs. Every number is computed from the records, shortened runs among them, as their letters tell; the rule "
        "says from when on a claim counts as holding on a benchmark."
    ),
    rows=_judged,
    head=("Claim",),
    columns=lambda data: (
        Column("Here", _verdict),
        Column("Numbers", partial(_evidence, data)),
        Column("Rule", lambda judged, notes: judged[0].rule),
    ),
    text_columns=4,
    wide_columns=(0, 2, 3),
    in_groups=False,
)
