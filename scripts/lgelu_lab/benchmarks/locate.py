"""Where a benchmark's data comes from: a folder the user names, or the Hugging Face Hub."""

import importlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

DATA_DIR_VARIABLE = "LGELU_DATA_DIR"


def load_splits(
    folder: str | Sequence[str],
    hub_id: str,
    data_dir: str | os.PathLike[str] | None,
    *,
    splits: Sequence[str],
    columns: Sequence[str],
    optional_splits: Sequence[str] = (),
    hub_config: str | None = None,
) -> dict[str, Any]:
    """The splits of one data set, {name: datasets.Dataset}, each with the columns asked for.

    Args:
        folder: name of the data set's folder inside the data directory, or several, of which the first that
            is there counts.
        hub_id: what is loaded from the Hub when there is no data directory.
        data_dir: the data directory; None takes the environment variable LGELU_DATA_DIR. Where either
            is set the Hub is never asked.
        splits: splits that must be there.
        columns: columns that each split must have; others may be.
        optional_splits: splits that are returned if they are there.
        hub_config: which of the data sets under `hub_id`, where there are several.

    Raises:
        ImportError: `datasets` is not installed.
        ValueError: the folder, a split or a column is missing, or the files cannot be read.
        RuntimeError: the Hub has no such data set or cannot be reached.
    """
    datasets = require_package("datasets")
    directory = data_dir if data_dir is not None else os.environ.get(DATA_DIR_VARIABLE) or None
    if directory is None:
        found, source = _load_from_hub(datasets, hub_id, hub_config), f"{hub_id} on the Hub"
    else:
        path = _first_folder(Path(directory).expanduser(), (folder,) if isinstance(folder, str) else folder)
        found, source = _load_from_folder(datasets, path, hub_id), str(path)
    absent = [split for split in splits if split not in found]
    if absent:
        raise ValueError(f"{source} has no split {_listed(absent)}; it has {_listed(found)}")
    wanted = {split: found[split] for split in (*splits, *optional_splits) if split in found}
    for split, rows in wanted.items():
        missing = [column for column in columns if column not in rows.column_names]
        if missing:
            raise ValueError(
                f"split {split!r} of {source} has no column {_listed(missing)}; it has {_listed(rows.column_names)}"
            )
    return wanted


def require_package(name: str) -> ModuleType:
    """Import one of the packages that only benchmarks need, or say how to install them."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"the benchmarks need {name.partition('.')[0]}, which cannot be imported ({error}). "
            "Install it with: pip install hf-lgelu[benchmarks]"
        ) from error


def _first_folder(directory: Path, names: Sequence[str]) -> Path:
    """The first of the folders that is there; the first of all if none is, for the message to name."""
    return next((directory / name for name in names if (directory / name).is_dir()), directory / names[0])


def _load_from_folder(datasets: ModuleType, path: Path, hub_id: str) -> Any:
    if not path.is_dir():
        raise ValueError(
            f"there is no folder {path}, which should hold a copy of {hub_id}. Put one there, point data_dir or "
            f"{DATA_DIR_VARIABLE} elsewhere, or set neither to load it from the Hub"
        )
    try:
        return datasets.load_dataset(str(path))
    except FileNotFoundError as error:  # datasets' own "no data files" errors are of this kind
        raise ValueError(f"{path} holds no data files that datasets can load: {error}") from error
    except datasets.exceptions.DatasetGenerationError as error:  # e.g. splits whose columns differ
        raise ValueError(f"{path} cannot be read by datasets: {error.__cause__ or error}") from error


def _load_from_hub(datasets: ModuleType, hub_id: str, config: str | None) -> Any:
    try:
        return datasets.load_dataset(hub_id, *((config,) if config else ()))
    except (ConnectionError, FileNotFoundError) as error:
        raise RuntimeError(
            f"{hub_id} could not be loaded from the Hub ({error}). Without network, set data_dir or "
            f"{DATA_DIR_VARIABLE} to a folder that holds a local copy"
        ) from error


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
