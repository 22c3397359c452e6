"""The study of temperature t and learning-rate multiplier c: Δλ(t, c) and ΔBVS(t, c) (the paper's grid)."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lgelu_lab.report.configurations import is_grid, learns_hardness, paired
from lgelu_lab.studies.experiments import INIT_MODES, SEEDS, STUDIES
from lgelu_lab.studies.records import RunRecord

EXPECTED_RUNS = len(INIT_MODES) * len(SEEDS)
"""Init modes × seeds behind a complete cell."""


@dataclass(frozen=True)
class GridCell:
    """One (t, c): drift V_λ and score minus GELU's, of every run that is there.

    `gains` holds best validation score − that of the GELU baseline with the same seed and recipe; a run
    without such a baseline has a drift and no gain.
    """

    drifts: tuple[float, ...]
    gains: tuple[float, ...]

    @property
    def drift(self) -> float | None:
        """Δλ(t, c): the mean over seeds and init modes; None without a run."""
        return statistics.fmean(self.drifts) if self.drifts else None

    @property
    def gain(self) -> float | None:
        """ΔBVS(t, c): the mean over seeds and init modes; None without a pair."""
        return statistics.fmean(self.gains) if self.gains else None


@dataclass(frozen=True)
class Grid:
    """The cells of one benchmark: {(t, c): cell} for every pair of `temperatures` and `multipliers`."""

    benchmark: str
    metric: str
    greater_is_better: bool
    temperatures: tuple[float, ...]
    multipliers: tuple[float, ...]
    cells: dict[tuple[float, float], GridCell]


def grid_of(records: Sequence[RunRecord], benchmark: str) -> Grid | None:
    """The grid of one benchmark, with every cell that the study asks for or a run has; None without such runs.

    Raises ValueError where a run is there twice.
    """
    runs = [record for record in records if is_grid(record) and record.config["benchmark"] == benchmark]
    learned = [record for record in runs if learns_hardness(record)]
    if not learned:
        return None
    _check_once(runs)
    baselines = [record for record in runs if record.config["activation"] == "gelu"]
    points = {_point(record) for record in learned} | _planned_points(benchmark)
    temperatures, multipliers = (tuple(sorted(set(values))) for values in zip(*points, strict=True))
    cells = {
        (t, c): _cell([record for record in learned if _point(record) == (t, c)], baselines)
        for t in temperatures
        for c in multipliers
    }
    first = learned[0]
    return Grid(benchmark, first.metric, first.greater_is_better, temperatures, multipliers, cells)


def _cell(runs: Sequence[RunRecord], baselines: Sequence[RunRecord]) -> GridCell:
    return GridCell(
        drifts=tuple(run.drift for run in runs if run.drift is not None),
        gains=tuple(run.best.score - baseline.best.score for run, baseline in paired(runs, baselines)),
    )


def _point(record: RunRecord) -> tuple[float, float]:
    return record.config["temperature"], record.config["hardness_lr_multiplier"]


def _planned_points(benchmark: str) -> set[tuple[float, float]]:
    study = STUDIES["grid"]
    if benchmark not in study.benchmarks:
        return set()
    planned = [experiment.arguments for experiment in study.build((benchmark,))]
    return {(run["temperature"], run["hardness_lr_multiplier"]) for run in planned if "temperature" in run}


def _check_once(runs: Sequence[RunRecord]) -> None:
    seen = set()
    for run in runs:
        modes = (run.config["init_mode"], _point(run)) if learns_hardness(run) else ()
        key = (run.config["activation"], run.config["seed"], *modes)
        if key in seen:
            raise ValueError(
                f"{run.name} is there twice, and its mean would count it twice; report on a folder that holds each "
                "run once"
            )
        seen.add(key)
