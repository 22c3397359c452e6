"""One run of a study: from where it was interrupted, if it was."""

import json
import os
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions, ModelOptions
from lgelu_lab.benchmarks.source import DATA_DIR_VARIABLE
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.studies.arguments import parse_mapping
from lgelu_lab.studies.folder import checkpoints, last_whole_checkpoint, sole_writer, sweep, write_whole
from lgelu_lab.studies.records import RECORD_FILE, RunRecord, read_record
from lgelu_lab.studies.run import run_config, train_and_record

SETTINGS_FILE = "settings.json"
_DEFAULTS = {"disable_tqdm": True, "log_level": "error", "save_strategy": "epoch", "save_total_limit": 1}
# What a record from before an option existed was made with, where that is neither None nor False.
_EARLIER = {
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "granularity": "layer", "hardening_switch": "fixed", "hardening_rate": "schedule",
    "label_smoothing_factor": 0.0,
}  # fmt: skip


def train_resumably(arguments: Mapping[str, Any]) -> RunRecord:
    """Train one run, with a checkpoint an epoch; go on from the last whole one that `output_dir` has.

    When the record is written, the checkpoints are removed; a record that is there already, of the same settings, is
    returned. Rows are kept for the next run on the same data.

    Raises what `run_benchmark` raises, and ValueError where the run that is there had other settings.
    """
    disable_progress_bar()  # of every model file written; the study has its own
    run, training = parse_mapping({**_DEFAULTS, **arguments})
    folder = Path(training.output_dir).resolve()
    training.output_dir, settings = str(folder), run_config(run, training)
    with sole_writer(folder):
        sweep(folder / RECORD_FILE)
        if (folder / RECORD_FILE).exists():  # made while this process waited for its turn
            _refuse_differing(folder, "the record of another run", settings, read_record(folder).config)
        else:
            _go_on_from_checkpoint(folder, training, settings)
            directory = os.environ.get(DATA_DIR_VARIABLE)
            train_and_record(run, training, load=lambda *options: _kept_rows(run.benchmark, *options, directory))
        _remove_steps_on_the_way(folder)
        return read_record(folder)


def check_same_run(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Raise if the record in `folder` is that of other settings, which skipping would pass off as these."""
    _refuse_differing(
        folder, "the record of another run", run_config(*parse_mapping(arguments)), read_record(folder).config
    )


def has_leftovers(folder: Path) -> bool:
    """Whether a finished run was killed before it had tidied up."""
    return (folder / SETTINGS_FILE).exists() or bool(checkpoints(folder))


def _go_on_from_checkpoint(folder: Path, training: Any, settings: Mapping[str, Any]) -> None:
    checkpoint = last_whole_checkpoint(folder)
    if checkpoint is None:
        write_whole(folder / SETTINGS_FILE, json.dumps(settings))
        return
    try:
        begun = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not there, cut off, or no text
        raise ValueError(
            f"{folder} has checkpoints, and what run they are of cannot be read from its {SETTINGS_FILE} ({error}); "
            "remove them to train from the start"
        ) from error
    _refuse_differing(folder, "an interrupted run", settings, begun)
    training.resume_from_checkpoint = str(checkpoint)


def _remove_steps_on_the_way(folder: Path) -> None:
    for path in checkpoints(folder):
        shutil.rmtree(path)
    (folder / SETTINGS_FILE).unlink(missing_ok=True)


def _refuse_differing(folder: Path, what: str, asked: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    there = {**_EARLIER, **there}
    # What else an older record lacks was None or False; max_eval_samples is older than its place in the record, so
    # where it is absent nothing is known.
    compared = asked.keys() - ({"max_eval_samples"} - there.keys())
    differing = [
        name for name in asked if name in compared and asked[name] != there.get(name) and (name in there or asked[name])
    ]
    if differing:
        raise ValueError(
            f"{folder} has {what}: "
            + ", ".join(f"{name} was {there.get(name)!r} and is now {asked[name]!r}" for name in differing)
            + ". Give another output folder, or remove what is there"
        )


@lru_cache(maxsize=1)
def _kept_rows(benchmark: str, data: DataOptions, model: ModelOptions, directory: str | None) -> BenchmarkData:
    return BENCHMARKS[benchmark].load(data, model)
