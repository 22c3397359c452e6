"""What holds: each claim of the paper, judged by the runs that are there, with the number."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lgelu_lab.report.frames import ReportData, evaluations, of_label, paired
from lgelu_lab.report.markup import Cell, Column, Group, TableSpec
from lgelu_lab.report.numbers import LOWER_IS_BETTER, digits_of, number, present
from lgelu_lab.report.run_tables import HARDENED, LEARNED_LABELS, correlation_curves, grid_cells, profile_runs

HOLDS, FAILS, NOT_MEASURED = "holds", "does not hold", "not measured"
_FREE = {"accuracy": 1e-3, "perplexity": 1e-3}  # what a swap may change and still be free; of perplexity its share
_SAME_ORDER = 0.5  # Spearman's ρ from which on two profiles are called alike


@dataclass(frozen=True)
class Evidence:
    """What one benchmark says on a claim: whether it holds there, and the number, in words."""

    holds: bool
    number: str


@dataclass(frozen=True)
class Claim:
    """One claim of the paper: what it says, from when on it counts as holding, and the judge of one benchmark."""

    says: str
    rule: str
    judge: Callable[[ReportData, str], Evidence | None]
    benchmarks: tuple[str, ...] = ()


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
    gains = {}
    for label in LEARNED_LABELS:
        if label in groups and "GELU" in groups:
            pairs = paired(groups[label], groups["GELU"])
            gains[label] = (pairs["best_score"] - pairs["best_score_base"]).mean()
    gains = {label: gain for label, gain in gains.items() if present([gain])}
    if not gains:
        return None
    metric = groups["GELU"]["metric"].iloc[0]
    sign, digits = -1 if metric in LOWER_IS_BETTER else 1, digits_of(metric)
    shown = [number(gain, digits, signed=True) for gain in sorted(gains.values())]
    holds = all(sign * round(gain, digits) >= 0 for gain in gains.values())
    return Evidence(holds, f"{metric} {' to '.join(dict.fromkeys((shown[0], shown[-1])))}")


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
    metric = data.runs.loc[data.runs["benchmark"] == benchmark, "metric"].iloc[0]
    text = f"hardened {_change_text(changes[HARDENED], metric)}"
    if "GELU" in changes:
        text += f", GELU {_change_text(changes['GELU'], metric).removeprefix(metric + ' ')}"
    return Evidence(abs(changes[HARDENED]) <= _FREE.get(metric, 1e-3), text)


def _cannot_be_swapped(data: ReportData, benchmark: str) -> Evidence | None:
    found = _saves_the_swap(data, benchmark)
    return found and Evidence(not found.holds, found.number)


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
    runs = profile_runs(data)
    ratios, here, there = [], [], []
    for label, seeds in of_label(runs, benchmark).items():
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
    text = f"{number(min(ratios), 1)} to {number(max(ratios), 1)} times ours"
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
        "no init mode's mean best score is below GELU's with the same seeds",
        _at_least_gelu,
    ),
    "swap": Claim(
        "Hardening saves the swap to ReLU",
        "the swap in the last epoch changes accuracy by at most 0.001, perplexity by at most 0.1 %",
        _saves_the_swap,
    ),
    "gpt2": Claim(
        "GPT-2 cannot be swapped, hardened or not", "the same, not met", _cannot_be_swapped, ("gpt2-wikitext2",)
    ),
    "grid": Claim(
        "Smaller t and larger c move the gates more",
        "so for every pair of settings that differ in one of them",
        _grid_trend,
    ),
    "drift": Claim(
        "The drift V_λ of Table I",
        "the paper's is within a fifth of ours; batches of 256 to 1,024 rows and λ₀ from 1.0067 to 1.05 were tried, "
        "and none came closer",
        _drift_differs,
    ),
}
"""{key: one claim and its judge}."""


def _judged(data: ReportData) -> Iterator[Group]:
    for claim in CLAIMS.values():
        names = claim.benchmarks or dict.fromkeys(data.runs["benchmark"])
        found = {name: claim.judge(data, name) for name in names}
        yield (claim.says,), (claim, {name: evidence for name, evidence in found.items() if evidence})


def _verdict(judged: tuple[Claim, Mapping[str, Evidence]], notes: object) -> Cell:
    found = judged[1]
    held = sum(evidence.holds for evidence in found.values())
    if not found:
        return Cell(NOT_MEASURED, "missing")
    if held == len(found):
        return Cell(HOLDS, "better")
    return Cell(FAILS if held == 0 else f"in part: {held} of {len(found)}", "worse" if held == 0 else "warning")


def _evidence(judged: tuple[Claim, Mapping[str, Evidence]], notes: object) -> str:
    return "; ".join(f"{name}: {evidence.number}" for name, evidence in judged[1].items()) or "–"


CLAIMS_TABLE = TableSpec(
    title="What holds of the paper's claims",
    caption=lambda data: (
        f"The claims of {data.paper.citation or 'the paper'}, each judged on the benchmarks that have its runs. Every "
        "number is computed from the records; the rule says from when on a claim counts as holding on a benchmark."
    ),
    rows=_judged,
    head=("Claim",),
    columns=(
        Column("Here", _verdict),
        Column("Numbers", _evidence),
        Column("Rule", lambda judged, notes: judged[0].rule),
    ),
    text_columns=4,
    wide_columns=(0, 2, 3),
    in_groups=False,
)
