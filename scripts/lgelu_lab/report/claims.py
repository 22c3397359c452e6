"""What holds: each claim of the paper, judged by the runs that are there, with the number."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lgelu_lab.report.frames import ReportData, last_evaluations, of_label, paired
from lgelu_lab.report.markup import Column, Group, TableSpec
from lgelu_lab.report.numbers import LOWER_IS_BETTER, digits_of, number, present
from lgelu_lab.report.paper import PAPER_RECIPES, differences
from lgelu_lab.report.run_tables import (
    HARDENED,
    LEARNED_LABELS,
    best_minus,
    correlation_curves,
    grid_cells,
    profile_runs,
)

HOLDS, PARTLY, FAILS = "holds", "holds so far", "does not hold"
TOO_CLOSE, OTHER_RUNS = "too close", "not comparable"
_FREE = 1e-3  # what a swap may change and still be free, of accuracy, or as a share of a perplexity
_SAME_ORDER = 0.5  # Spearman's ρ from which on two profiles are called alike


@dataclass(frozen=True)
class Evidence:
    """What one benchmark says on a claim: a verdict, and the number in words."""

    verdict: str
    number: str


@dataclass(frozen=True)
class Claim:
    """One claim of the paper: what it says, from when on it counts as holding, and the judge of one benchmark.

    `benchmarks`: those that it is about.
    """

    says: str
    rule: str
    judge: Callable[[ReportData, str], Evidence | None]
    benchmarks: tuple[str, ...]


_ALL = tuple(PAPER_RECIPES)
_GPT2 = "gpt2-wikitext2"
_VISION = ("mlp-fmnist", "resnet18-cifar10", "resnet18-cifar100", "deit-tiny-imagenet")


def _held(found: Sequence[object], wanted: int, holds: bool) -> str:
    """What holds of all that a claim is about; one failure is enough to fail, and what lacks a part holds in part."""
    if not holds:
        return FAILS
    return HOLDS if len(found) >= wanted else PARTLY


def _of(found: Sequence[object], wanted: int, what: str) -> str:
    return "" if len(found) >= wanted else f", {len(found)} of {wanted} {what}"


def _order(data: ReportData, benchmark: str) -> Evidence | None:
    curves = correlation_curves(data, benchmark)
    last = {pair: rhos for pair, curve in curves.items() if (rhos := present(list(curve.iloc[-1])))}
    if not last:
        return None
    means = [statistics.fmean(rhos) for rhos in last.values()]
    low, high = (number(value, 2, signed=True) for value in (min(means), max(means)))
    runs = profile_runs(data)
    of_learned = (runs["benchmark"] == benchmark) & runs["label"].isin(LEARNED_LABELS)
    layers = len(runs.loc[of_learned, "record"].iloc[0].initial_hardness)
    pairs = math.comb(len(LEARNED_LABELS), 2)
    text = f"ρ_S {' to '.join(dict.fromkeys((low, high)))} over {layers} layers{_of(last, pairs, 'pairs')}"
    return Evidence(_held(last, pairs, min(means) >= _SAME_ORDER), text)


def _at_least_gelu(data: ReportData, benchmark: str) -> Evidence | None:
    groups = of_label(profile_runs(data), benchmark)
    found = {
        label: gain
        for label in LEARNED_LABELS
        if label in groups and "GELU" in groups and (gain := best_minus(paired(groups[label], groups["GELU"])))
    }
    if not found:
        return None
    gains = sorted(found.values(), key=lambda gain: gain.mean)
    text = f"{gains[0].metric} {' to '.join(dict.fromkeys(map(str, (gains[0], gains[-1]))))}"
    text += _of(gains, len(LEARNED_LABELS), "starts")
    lost = any(gain.is_told_apart and gain.gain < 0 for gain in gains)
    won = all(gain.is_told_apart and gain.gain > 0 for gain in gains)
    return Evidence(_held(gains, len(LEARNED_LABELS), not lost) if lost or won else TOO_CLOSE, text)


def _swap_changes(data: ReportData, benchmark: str) -> Mapping[str, list[float]]:
    """{"GELU" or the hardened label: [the mean change by the swap in the last epoch, of several the largest too]};
    of perplexity its share."""
    runs = last_evaluations(data)
    found = of_label(runs[(runs["part"] == "") & runs["relu"].notna()], benchmark)
    changes = {}
    for label in {"GELU", HARDENED} & found.keys():
        seeds = found[label]
        gains, scale = seeds["relu"] - seeds["score"], seeds["score"]
        if seeds["greater_is_better"].iloc[0]:
            scale = scale * 0 + 1
        largest = [float(max(gains / scale, key=abs))] if len(gains) > 1 else []
        changes[label] = [float(gains.mean() / scale.mean()), *largest]
    return changes


def _change_text(changes: Sequence[float], metric: str) -> str:
    """ "−0.0443, worst seed −0.0527", or of one seed the first number."""
    digits, factor, unit = (2, 100, " %") if metric in LOWER_IS_BETTER else (digits_of(metric), 1, "")
    return ", worst seed ".join(f"{number(factor * change, digits, signed=True)}{unit}" for change in changes)


def _saves_the_swap(data: ReportData, benchmark: str) -> Evidence | None:
    changes = _swap_changes(data, benchmark)
    if HARDENED not in changes:
        return None
    first = data.runs[(data.runs["benchmark"] == benchmark) & (data.runs["label"] == HARDENED)].iloc[0]
    metric, free = first["metric"], _FREE
    if metric not in LOWER_IS_BETTER:
        free = max(_FREE, 1 / first["eval_samples"])
    text = f"{metric}: hardened {_change_text(changes[HARDENED], metric)}"
    is_free = {label: abs(found[-1]) <= free * (1 + 1e-9) for label, found in changes.items()}
    if "GELU" in changes:
        text += f"; GELU {_change_text(changes['GELU'], metric)}"
    if is_free[HARDENED] and is_free.get("GELU", False):  # nothing to save
        return Evidence(TOO_CLOSE, text)
    return Evidence(HOLDS if is_free[HARDENED] else FAILS, text)


def _cannot_be_swapped(data: ReportData, benchmark: str) -> Evidence | None:
    found = _saves_the_swap(data, benchmark)
    if found is None:
        return None
    runs = profile_runs(data)
    if not all(record.config.get("pretrained") for record in runs.loc[runs["benchmark"] == benchmark, "record"]):
        return Evidence(OTHER_RUNS, f"{found.number}, of a network from scratch")
    return Evidence({HOLDS: FAILS, FAILS: HOLDS}.get(found.verdict, found.verdict), found.number)


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
    return Evidence(HOLDS if held == len(ordered) else FAILS, text)


def _drift_differs(data: ReportData, benchmark: str) -> Evidence | None:
    """The paper's drift over ours; its optimizer and its number of epochs are needed for a verdict."""
    ratios, same = [], True
    for label, seeds in of_label(profile_runs(data), benchmark).items():
        paper = data.paper.value(benchmark, seeds["key"].iloc[0], "drift")
        if label in LEARNED_LABELS and paper:
            ratios.append(paper[0] / seeds["drift"].mean())
            same = same and not any(map(differences, seeds["record"]))
    if not ratios:
        return None
    text = f"{' to '.join(dict.fromkeys(number(end, 1) for end in (min(ratios), max(ratios))))} times ours"
    text += _of(ratios, len(LEARNED_LABELS), "starts")
    near = max(abs(ratio - 1) for ratio in ratios) < 0.2
    return Evidence(_held(ratios, len(LEARNED_LABELS), near) if same else OTHER_RUNS, text)


CLAIMS: dict[str, Claim] = {
    "order": Claim(
        "The order of the layers by hardness repeats over initializations on vision",
        f"every pair of init modes has ρ_S ≥ {_SAME_ORDER:g} in the last epoch, mean over the seeds; of four layers "
        "5 of the 24 orders have that by chance",
        _order,
        _VISION,
    ),
    "at-least-gelu": Claim(
        "λ-GELU is at least as good as GELU",
        "every init mode's best score is better than GELU's with the same seeds; too close where a 95 % interval of "
        "the difference, in brackets, holds zero (Student's over the seeds, Newcombe's for one seed), and for one seed "
        "of a perplexity",
        _at_least_gelu,
        _ALL,
    ),
    "swap": Claim(
        "Hardening saves the swap to ReLU",
        "the swap in the last epoch changes accuracy on every seed by at most 0.001 or one evaluation sample "
        "(perplexity by 0.1 %); shown are the mean and the seed that changes most; too close where GELU's swap does no "
        "more",
        _saves_the_swap,
        tuple(name for name in _ALL if name != _GPT2),
    ),
    "gpt2": Claim(
        "GPT-2 cannot be swapped, hardened or not",
        "the rule above is not met; comparable are pretrained networks alone",
        _cannot_be_swapped,
        (_GPT2,),
    ),
    "grid": Claim(
        "Smaller t and larger c move the gates more",
        "so for every pair of settings that differ in one of them",
        _grid_trend,
        ("mlp-fmnist", "resnet18-cifar100"),
    ),
    "drift": Claim(
        "The drift V_λ of Table I",
        "the paper's is within a fifth of ours for every init mode; comparable are runs with its optimizer, its data "
        "and as many epochs alone",
        _drift_differs,
        _ALL,
    ),
}
"""{key: one claim and its judge}."""


def _judged(data: ReportData) -> Iterator[Group]:
    for claim in CLAIMS.values():
        found = {name: evidence for name in claim.benchmarks if (evidence := claim.judge(data, name))}
        comparable = {name: evidence for name, evidence in found.items() if evidence.verdict != OTHER_RUNS}
        for place, (name, evidence) in enumerate((comparable or found).items()):
            yield ("" if place else claim.says, name), evidence


CLAIMS_TABLE = TableSpec(
    title="What holds of the paper's claims, network by network",
    caption="Rules, shortened runs and what is missing: tables.md.",
    rows=_judged,
    head=("Claim of the paper", "Network"),
    columns=(
        Column("Ours (95 % interval in brackets)", lambda evidence, notes: evidence.number),
        Column("Verdict", lambda evidence, notes: evidence.verdict),
    ),
    text_columns=4,
)

RULES_TABLE = TableSpec(
    title="From when on a claim counts as holding",
    caption=lambda data: f"The claims of {data.paper.citation or 'the paper'}.",
    rows=lambda data: [((claim.says,), claim) for claim in CLAIMS.values() if list(_judged(data))],
    head=("Claim of the paper",),
    columns=(Column("Rule", lambda claim, notes: claim.rule),),
    text_columns=2,
)
