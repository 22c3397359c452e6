"""Running a study: every run that has no record yet, one after the other."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hf_lgelu import HardeningConfig
from lgelu_lab.studies.arguments import check_argument_values
from lgelu_lab.studies.experiments import Experiment
from lgelu_lab.studies.folder import FolderBusyError, write_whole
from lgelu_lab.studies.records import ERROR_FILE, RECORD_FILE
from lgelu_lab.studies.resume import check_same_run, train_resumably


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
    run: Callable[[Mapping[str, Any]], object] | None = None,
) -> list[str]:
    """Run what has no record below `folder` yet, and return the names of the runs that failed.

    Args:
        experiments: the runs; each writes to `folder`/<its name>.
        folder: where records go. A run whose record.json is there is skipped; one that was interrupted
            goes on from its last checkpoint.
        overrides: arguments that replace those of every run, e.g. {"num_train_epochs": 2}; those that say how to
            harden go to the runs that read them.
        run: does one run, from its arguments; the default trains.

    A failing run leaves `error.txt` with its traceback and the others go on. One that another process is training
    counts as failed here, with a line on stderr and no file.

    Raises ValueError, before any run, if a record there is that of other settings or another schema.
    """
    folder = Path(folder)
    arguments = {
        each.name: {**_overridden(each.arguments, overrides or {}), "output_dir": str(folder / each.name)}
        for each in experiments
    }
    finished = [name for name in arguments if (folder / name / RECORD_FILE).exists()]
    for name in finished if run is None else ():
        check_same_run(folder / name, arguments[name])
    left = [name for name in arguments if name not in finished]
    with tqdm(left, total=len(arguments), initial=len(finished), desc="runs") as progress:
        return [name for name in progress if not _succeeds(run or train_resumably, arguments[name])]


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
        write_whole(error_file, traceback.format_exc())
        return False
    return True
