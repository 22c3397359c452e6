"""One run of a study: from where it was interrupted, if it was."""

import os
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from transformers.utils.logging import disable_progress_bar

from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions, ModelOptions
from lgelu_lab.benchmarks.source import DATA_DIR_VARIABLE
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.studies.arguments import parse_mapping
from lgelu_lab.studies.folder import sole_writer, sweep
from lgelu_lab.studies.records import RECORD_FILE, RunRecord, read_record
from lgelu_lab.studies.run import run_config, train_and_record
from lgelu_lab.studies.settings import SETTINGS_FILE, read_settings, refuse_differing

_CHECKPOINTS = f"{PREFIX_CHECKPOINT_DIR}-*"
_DEFAULTS = {"disable_tqdm": True, "log_level": "error", "save_strategy": "epoch", "save_total_limit": 1}


def train_resumably(arguments: Mapping[str, Any]) -> RunRecord:
    """Train one run, with a checkpoint an epoch; go on from the last whole one that `output_dir` has.

    When the record is written, the checkpoints are removed. Rows are kept for the next run on the same data.

    Raises what `run_benchmark` raises, and ValueError where the checkpoints that are there had other settings or data.
    """
    disable_progress_bar()  # of every model file written; the study has its own
    run, training = parse_mapping({**_DEFAULTS, **arguments})
    folder = Path(training.output_dir).resolve()
    training.output_dir, settings = str(folder), run_config(run, training)
    with sole_writer(folder):
        sweep(folder / RECORD_FILE)
        if not (folder / RECORD_FILE).exists():  # another process may have made it since this one looked
            training.resume_from_checkpoint = _checkpoint_of(folder, settings) or training.resume_from_checkpoint
            directory = os.environ.get(DATA_DIR_VARIABLE)
            train_and_record(run, training, load=lambda *options: _kept_rows(run.benchmark, *options, directory))
        for path in folder.glob(_CHECKPOINTS):
            shutil.rmtree(path)
        (folder / SETTINGS_FILE).unlink(missing_ok=True)
        return read_record(folder)


def check_same_run(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Raise if the record in `folder` is that of other settings, which skipping would pass off as these."""
    refuse_differing(
        folder, "the record of another run", run_config(*parse_mapping(arguments)), read_record(folder).config
    )


def _checkpoint_of(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The last whole checkpoint in `folder`, refused where nothing says that it is of these settings."""
    if not any(folder.glob(_CHECKPOINTS)):
        return None
    refuse_differing(folder, "an interrupted run", settings, read_settings(folder))  # before rows are loaded
    whole = [path for path in sort_checkpoints(str(folder)) if Path(path, TRAINER_STATE_NAME).exists()]
    return whole[-1] if whole else None  # Trainer writes this file last


@lru_cache(maxsize=1)
def _kept_rows(benchmark: str, data: DataOptions, model: ModelOptions, directory: str | None) -> BenchmarkData:
    return BENCHMARKS[benchmark].load(data, model)
