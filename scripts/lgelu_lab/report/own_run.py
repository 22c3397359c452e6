"""A run of one's own beside the committed records of the same configuration: what differs, and by how much."""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lgelu_lab.report.frames import configuration_key, recipe_of
from lgelu_lab.report.numbers import NONE, digits_of, listed, number, present
from lgelu_lab.report.run_tables import machine_of
from lgelu_lab.studies.records import EARLIER_DEFAULTS, UNTOLD, RunRecord

_TOLD_ELSEWHERE = frozenset({"benchmark", "seed", "saved_epoch"})
_SOFTWARE = ("torch", "transformers", "accelerate", "timm", "hf-lgelu")

_QUANTITIES: dict[str, Callable[[RunRecord], float | None]] = {
    "best score": lambda record: record.best.score,
    "last score": lambda record: record.last.score,
    "last score, with ReLU swapped in": lambda record: record.last.relu_score,
    "mean λ, before training": lambda record: (
        statistics.fmean(record.initial_hardness.values()) if record.initial_hardness else None
    ),
    "mean λ, last epoch": lambda record: record.last.mean_hardness,
    "drift V_λ": lambda record: record.drift,
}


def compare_run(run: RunRecord, committed: Sequence[RunRecord]) -> str:
    """How `run` differs from the committed seeds of its configuration: settings, scores and λ, against their spread.

    Of several groups of seeds, from studies of their own, the group with the fewest other settings is taken.

    Raises ValueError where no committed record is of the configuration.
    """
    key = configuration_key(run)
    of_benchmark = [record for record in committed if record.config["benchmark"] == run.config["benchmark"]]
    groups: dict[str, list[RunRecord]] = {}
    for record in of_benchmark:
        if configuration_key(record) == key:
            groups.setdefault(json.dumps(_settings(record), default=str, sort_keys=True), []).append(record)
    if not groups:
        there = listed(sorted({configuration_key(record) for record in of_benchmark})) or "no record"
        raise ValueError(f"no committed record of {run.config['benchmark']} is of {key}; there is {there}")
    seeds = min(groups.values(), key=lambda group: len(_differing(run, group[0])))
    lines = [f"{run.name} beside {listed(record.name for record in seeds)}", "", "Settings that differ:"]
    lines += [f"  {line}" for line in _differing(run, seeds[0])] or ["  none"]
    lines += ["", f"{'':34}{'this run':>10}{'committed':>20}{'difference':>12}"]
    lines += [f"  {line}" for line in _quantities(run, seeds)]
    lines += ["", *_elsewhere(run, seeds[0])]
    return "\n".join(lines)


def _settings(record: RunRecord) -> dict[str, Any]:
    config = {name: value for name, value in record.config.items() if name not in _TOLD_ELSEWHERE}
    return {**EARLIER_DEFAULTS, **config, **recipe_of(record)}


def _differing(run: RunRecord, record: RunRecord) -> list[str]:
    """A line for each setting that differs; what an earlier record lacks was None or False."""
    mine, theirs = _settings(run), _settings(record)
    names = [name for name in {**mine, **theirs} if name in theirs or name not in UNTOLD]
    return [
        f"{name}: {mine.get(name)!r}, committed {theirs.get(name)!r}"
        for name in names
        if mine.get(name) != theirs.get(name) and (mine.get(name) or theirs.get(name))
    ]


def _quantities(run: RunRecord, seeds: Sequence[RunRecord]) -> Iterator[str]:
    for name, read in _QUANTITIES.items():
        mine, theirs = read(run), present([read(record) for record in seeds])
        if mine is None and not theirs:
            continue
        digits = digits_of(run.metric) if "score" in name else 2
        mean = statistics.fmean(theirs) if theirs else None
        deviation = statistics.stdev(theirs) if len(theirs) > 1 else None
        there = NONE if mean is None else number(mean, digits)
        there += "" if deviation is None else f" ± {number(deviation, digits)}"
        line = f"{name:32}{NONE if mine is None else number(mine, digits):>10}{there:>20}"
        if mine is not None and mean is not None:
            line += f"{number(mine - mean, digits, signed=True):>12}  {_judged(mine - mean, deviation, len(theirs))}"
        yield line.rstrip()


def _judged(difference: float, deviation: float | None, seeds: int) -> str:
    if deviation is None:
        return "one seed: no spread is known"
    if deviation == 0:
        return "as the seeds" if difference == 0 else "the seeds do not differ"
    # A further run of the same kind lies within Student's interval of the mean of these, widened by its own spread.
    from scipy.stats import t

    reach = float(t.ppf(0.975, seeds - 1)) * deviation * (1 + 1 / seeds) ** 0.5
    within = "as another seed may be" if abs(difference) <= reach else "more than another seed"
    return f"{abs(difference) / deviation:.1f} deviations of {seeds} seeds: {within}"


def _elsewhere(run: RunRecord, record: RunRecord) -> Iterator[str]:
    """Lines on the software and the machine of both."""
    software = [f"{name} {run.versions.get(name)} ({record.versions.get(name)})" for name in _SOFTWARE]
    yield f"Software, committed in brackets: {listed(software)}."
    yield f"Machine: {machine_of(run.hardware)}; committed: {machine_of(record.hardware)}."
