"""Running a study: every run that has no record yet, one after the other, shared out over processes."""

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hf_lgelu.studies.arguments import parse_mapping
from hf_lgelu.studies.experiments import STUDIES, Experiment, Study
from hf_lgelu.studies.records import RECORD_FILE, RunRecord, read_record
from hf_lgelu.studies.run import run_benchmark, run_config

ERROR_FILE = "error.txt"


@dataclass(frozen=True)
class Worker:
    """One of `count` processes that share a study; it takes every `count`-th run."""

    index: int = 0
    count: int = 1


def leave_process_group(environment: dict[str, str] | None = None) -> Worker:
    """Become a worker of its own: runs of a study are not distributed, the study is.

    Reads RANK and WORLD_SIZE as `torchrun` and `accelerate launch` set them, and removes them so that
    no run joins a process group. Call it before anything of accelerate exists.
    """
    environment = os.environ if environment is None else environment
    worker = Worker(int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1")))
    local_rank = environment.get("LOCAL_RANK")
    if worker.count > 1 and local_rank is not None and "CUDA_VISIBLE_DEVICES" not in environment:
        environment["CUDA_VISIBLE_DEVICES"] = local_rank
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return worker


def check_study(name: str) -> Study:
    """Return the row of STUDIES, or raise naming the accepted ones."""
    if name not in STUDIES:
        raise ValueError(f"unknown study {name!r}; accepted: {', '.join(STUDIES)}")
    return STUDIES[name]


def choose_benchmarks(study: Study, names: Sequence[str]) -> tuple[str, ...]:
    """Return `names` as a tuple, or all benchmarks of the study if it is empty; raise if the study lacks one."""
    unknown = [name for name in names if name not in study.benchmarks]
    if unknown:
        raise ValueError(
            f"the study {study.name!r} has no benchmark {', '.join(map(repr, unknown))}; accepted: "
            f"{', '.join(study.benchmarks)}"
        )
    return tuple(names) or study.benchmarks


def run_study(
    experiments: Sequence[Experiment],
    folder: str | os.PathLike,
    *,
    overrides: Mapping[str, Any] | None = None,
    worker: Worker | None = None,
    run: Callable[[Mapping[str, Any]], RunRecord] | None = None,
) -> list[str]:
    """Run what has no record below `folder` yet, and return the names of the runs that failed.

    Args:
        experiments: the runs; each writes to `folder`/<its name>.
        folder: where records go. A run whose record.json is there is skipped.
        overrides: arguments that replace those of every run, e.g. {"num_train_epochs": 2}.
        worker: this process's share; all of it by default.
        run: does one run, from its arguments; the default trains.

    A failing run leaves `error.txt` with its traceback and the others go on.

    Raises ValueError, before any run, if a record there is that of other settings.
    """
    worker = worker or Worker()
    share = list(experiments)[worker.index :: worker.count]
    arguments = {
        experiment.name: {
            **experiment.arguments, **(overrides or {}), "output_dir": str(Path(folder) / experiment.name)
        }
        for experiment in share
    }  # fmt: skip
    finished = [name for name in arguments if (Path(folder) / name / RECORD_FILE).exists()]
    if run is None:
        for name in finished:
            _check_same_run(Path(folder) / name, arguments[name])
    failed = []
    for name in tqdm(arguments, desc="runs", disable=not share, position=worker.index):
        if name in finished:
            continue
        target = Path(folder) / name
        target.mkdir(parents=True, exist_ok=True)
        try:
            (run or _train)(arguments[name])
        except Exception:  # noqa: BLE001 - one run's failure, whatever it is, must not cost the others
            (target / ERROR_FILE).write_text(traceback.format_exc(), encoding="utf-8")
            failed.append(name)
        else:
            (target / ERROR_FILE).unlink(missing_ok=True)
    return failed


def _check_same_run(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Raise if the record in `folder` is that of other settings, which skipping would pass off as these."""
    asked, recorded = run_config(*parse_mapping(arguments)), read_record(folder).config
    differing = [name for name in asked if asked[name] != recorded.get(name)]
    if differing:
        raise ValueError(
            f"{folder} has the record of another run: "
            + ", ".join(f"{name} was {recorded.get(name)!r} and is now {asked[name]!r}" for name in differing)
            + ". Give another output folder, or remove that record"
        )


def _train(arguments: Mapping[str, Any]) -> RunRecord:
    return run_benchmark(*parse_mapping({"disable_tqdm": True, "log_level": "error", **arguments}))
