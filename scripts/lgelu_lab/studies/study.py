"""Running a study: every run that has no record yet, one after the other, shared out over processes."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_lgelu import HardeningConfig
from lgelu_lab.studies.arguments import check_argument_values
from lgelu_lab.studies.experiments import STUDIES, Experiment, Study
from lgelu_lab.studies.folder import FolderBusyError
from lgelu_lab.studies.records import ERROR_FILE, RECORD_FILE
from lgelu_lab.studies.resume import check_same_run, has_leftovers, train_resumably


@dataclass(frozen=True)
class Worker:
    """One of `count` processes that share a study; it takes every `count`-th run."""

    index: int = 0
    count: int = 1


def leave_process_group(environment: dict[str, str] | None = None) -> Worker:
    """Become a worker of its own: runs of a study are not distributed, the study is.

    Reads RANK and WORLD_SIZE as `torchrun` and `accelerate launch` set them, and removes them so that
    no run joins a process group. Of the GPUs that are visible one stays so: that of LOCAL_RANK, from the start again
    where there are fewer GPUs than workers. Call it before anything of accelerate exists.
    """
    environment = os.environ if environment is None else environment
    worker = Worker(int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1")))
    local_rank = environment.get("LOCAL_RANK")
    if worker.count > 1 and local_rank is not None:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            visible = ",".join(map(str, range(torch.cuda.device_count())))
        devices = [name.strip() for name in visible.split(",") if name.strip()]
        if devices:  # "" hides all of them
            environment["CUDA_VISIBLE_DEVICES"] = devices[int(local_rank) % len(devices)]
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


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """["bf16=true", "max_train_samples=5000", "optim=sgd"] → {argument: value}; values are JSON, or else text.

    Raises ValueError for a pair of another form.
    """
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise ValueError(f"a setting must have the form name=value, got {pair!r}")
        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    return settings


def check_settings(settings: Mapping[str, Any], experiments: Sequence[Experiment]) -> None:
    """Raise ValueError for a setting that is no argument of scripts/train.py, or no value of it, or that the study
    decides itself.

    With the latter, its runs would not be what their folders say.
    """
    decided = {"output_dir", "run_name", "benchmark", "seed", "activation", "init_mode", "harden", "relufication"}
    for experiment in experiments:
        decided |= experiment.arguments.keys() - {"save_final_model"}
    taken = sorted(decided & settings.keys())
    if taken:
        raise ValueError(
            f"{', '.join(taken)} cannot be a setting of every run: it tells the runs of the study apart. Seeds are "
            "--seeds, benchmarks --benchmarks; a single run of another kind is scripts/train.py"
        )
    check_argument_values(settings)


def _overridden(arguments: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a run, without what only other runs of its study read: LambdaGELUTrainer refuses it."""
    chosen = {**arguments, **overrides}
    idle = set() if chosen.get("harden") else {option.name for option in fields(HardeningConfig)}
    if chosen.get("relufication"):
        idle.discard("switch_fraction")
    return {name: value for name, value in chosen.items() if name in arguments or name not in idle}


def run_study(
    experiments: Sequence[Experiment],
    folder: str | os.PathLike,
    *,
    overrides: Mapping[str, Any] | None = None,
    worker: Worker | None = None,
    run: Callable[[Mapping[str, Any]], object] | None = None,
) -> list[str]:
    """Run what has no record below `folder` yet, and return the names of the runs that failed.

    Args:
        experiments: the runs; each writes to `folder`/<its name>.
        folder: where records go. A run whose record.json is there is skipped; one that was interrupted
            goes on from its last checkpoint.
        overrides: arguments that replace those of every run, e.g. {"num_train_epochs": 2}; those that say how to
            harden go to the runs that read them.
        worker: this process's share; all of it by default.
        run: does one run, from its arguments; the default trains.

    A failing run leaves `error.txt` with its traceback and the others go on. One that another process is training
    counts as failed here, with a line on stderr and no file.

    Raises ValueError, before any run, if a record there is that of other settings or another schema.
    """
    worker, folder = worker or Worker(), Path(folder)
    arguments = {
        each.name: {**_overridden(each.arguments, overrides or {}), "output_dir": str(folder / each.name)}
        for each in experiments
    }
    finished = [name for name in arguments if _is_finished(folder / name)]
    for name in finished if run is None else ():
        check_same_run(folder / name, arguments[name])
    failed = []
    share = list(arguments)[worker.index :: worker.count]
    with tqdm(total=len(arguments), initial=len(finished), desc="runs", disable=worker.index > 0) as progress:
        for name in share:
            if _is_finished(folder / name) and not (run is None and has_leftovers(folder / name)):
                continue
            progress.set_postfix_str(name)
            if not _succeeds(run or train_resumably, arguments[name]):
                failed.append(name)
            # The other workers' runs count as well.
            progress.update(sum(_is_finished(folder / name) for name in arguments) - progress.n)
    return failed


def _is_finished(folder: Path) -> bool:
    return (folder / RECORD_FILE).exists()


def _succeeds(run: Callable[[Mapping[str, Any]], object], arguments: Mapping[str, Any]) -> bool:
    """Do one run; its error, if it fails, goes to error.txt."""
    error_file = Path(arguments["output_dir"]) / ERROR_FILE
    try:
        error_file.parent.mkdir(parents=True, exist_ok=True)
        run(arguments)
        error_file.unlink(missing_ok=True)
    except FolderBusyError as error:  # the file would be in the other's way
        print(error, file=sys.stderr)
        return False
    except Exception:  # noqa: BLE001 - one run's failure, whatever it is, must not cost the others
        report = traceback.format_exc()
        try:
            error_file.write_text(report, encoding="utf-8")
        except OSError:  # the disk is full, and that may be why the run failed
            print(report, file=sys.stderr)
        return False
    return True
