"""A run of one's own beside the committed records of the same configuration: what differs, and by how much."""

from collections.abc import Callable, Sequence
from typing import Any

from lgelu_lab.report.frames import configuration_key, recipe_of
from lgelu_lab.report.numbers import NONE, digits_of, listed, mean_and_deviation, number, present
from lgelu_lab.report.run_tables import machine_of
from lgelu_lab.studies.records import RunRecord

_HARDNESS = (
    *("init_hardness", "temperature", "hardness_lr_multiplier", "target_hardness", "switch_fraction"),
    *("hardening_schedule", "hardening_strategy"),
)
_QUANTITIES: dict[str, Callable[[RunRecord], float | None]] = {
    "best score": lambda record: record.best.score,
    "last score": lambda record: record.last.score,
    "last score, with ReLU swapped in": lambda record: record.last.relu_score,
    "mean λ, last epoch": lambda record: record.last.mean_hardness,
    "drift V_λ": lambda record: record.drift,
}


def compare_run(run: RunRecord, committed: Sequence[RunRecord]) -> str:
    """How `run` differs from the committed seeds of its configuration: settings, scores and λ, machines.

    Of several groups of seeds, from studies of their own, the group with the fewest other settings is taken.

    Raises ValueError where no committed record is of the configuration.
    """
    key, benchmark, mine = configuration_key(run), run.config["benchmark"], _settings(run)
    same = [each for each in committed if (configuration_key(each), each.config["benchmark"]) == (key, benchmark)]
    if not same:
        raise ValueError(f"no committed record of {benchmark} is of {key}")
    theirs = min(map(_settings, same), key=lambda settings: sum(mine[name] != settings[name] for name in mine))
    seeds = [record for record in same if _settings(record) == theirs]
    lines = [f"{run.name} beside {listed(record.name for record in seeds)}"]
    lines += [f"{name}: {mine[name]!r}, committed {theirs[name]!r}" for name in mine if mine[name] != theirs[name]]
    for name, read in _QUANTITIES.items():
        found, digits = read(run), digits_of(run.metric) if "score" in name else 2
        if found is not None or present(list(map(read, seeds))):
            own = NONE if found is None else number(found, digits)
            lines.append(f"{name}: {own}, committed {mean_and_deviation(list(map(read, seeds)), digits)}")
    return "\n".join([*lines, f"machine: {machine_of(run.hardware)}, committed {machine_of(seeds[0].hardware)}"])


def _settings(record: RunRecord) -> dict[str, Any]:
    return recipe_of(record) | {name: record.config.get(name) for name in _HARDNESS}
