"""One run of a study: from where it was interrupted, if it was."""

import json
import os
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils.logging import disable_progress_bar

from lgelu_lab.benchmarks.locate import DATA_DIR_VARIABLE
from lgelu_lab.benchmarks.table import BENCHMARKS, BenchmarkData, DataOptions, ModelOptions
from lgelu_lab.studies.arguments import parse_mapping
from lgelu_lab.studies.records import RunRecord, read_record
from lgelu_lab.studies.run import run_benchmark, run_config

SETTINGS_FILE = "settings.json"
_DEFAULTS = {"disable_tqdm": True, "log_level": "error", "save_strategy": "epoch", "save_total_limit": 1}


def train_resumably(arguments: Mapping[str, Any]) -> RunRecord:
    """Train one run, with a checkpoint an epoch; go on from the last one that `output_dir` has.

    When the record is written, the checkpoints are removed. Rows are kept for the next run on the same data.

    Raises what `run_benchmark` raises, and ValueError where the interrupted run had other settings.
    """
    disable_progress_bar()  # of every model file written; the study has its own
    run, training = parse_mapping({**_DEFAULTS, **arguments})
    folder, settings = Path(training.output_dir), run_config(run, training)
    checkpoint = last_checkpoint(folder)
    if checkpoint is not None:
        begun = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        _refuse_differing(folder, "an interrupted run", settings, begun)
        training.resume_from_checkpoint = str(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    if checkpoint is None:  # else they are there already, and are these
        (folder / SETTINGS_FILE).write_text(json.dumps(settings), encoding="utf-8")
    directory = os.environ.get(DATA_DIR_VARIABLE)
    record = run_benchmark(run, training, load=lambda *options: _kept_rows(run.benchmark, *options, directory))
    for path in checkpoints(folder):
        shutil.rmtree(path)
    (folder / SETTINGS_FILE).unlink()
    return record


def check_same_run(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Raise if the record in `folder` is that of other settings, which skipping would pass off as these."""
    _refuse_differing(
        folder, "the record of another run", run_config(*parse_mapping(arguments)), read_record(folder).config
    )


def checkpoints(folder: Path) -> list[Path]:
    """Trainer's checkpoints in a folder, oldest first; one that was cut off while it was written is among them."""
    found = folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is complete: Trainer writes its state last."""
    complete = [path for path in checkpoints(folder) if (path / TRAINER_STATE_NAME).exists()]
    return complete[-1] if complete else None


def _refuse_differing(folder: Path, what: str, asked: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    # A record from before an option existed was made with what is now its default, None or False;
    # max_eval_samples is older than its place in the record, so where it is absent nothing is known.
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
