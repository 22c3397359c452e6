"""Files, folders and Hub ids as splits of a data set."""

import csv
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_lgelu.cli.named_places import local, require_data_there

_SAVED_TO_DISK = ("dataset_dict.json", "state.json")
_BUILDERS = {
    **{".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}
}


def load_splits(name: str, config: str | None = None) -> dict[str, Any]:
    """{split: datasets.Dataset} of a file, a folder (of data files, images, or what `save_to_disk` wrote) or a Hub id.

    Raises ValueError if it cannot be read, and what `require_data_there` raises.
    """
    import datasets

    require_data_there(name)
    path = local(name)
    if path is not None and path.is_file() and not path.stat().st_size:
        raise ValueError(f"{name} is an empty file; give one with rows")
    try:
        if path is not None and path.is_file():
            found = datasets.load_dataset(_builder(path), data_files={"train": str(path)})
        elif path is not None and any((path / saved).is_file() for saved in _SAVED_TO_DISK):
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path or name), config)
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        if "corresponds to no data" in str(error):  # what datasets says of a file with names alone
            raise ValueError(f"{name} has no rows") from error
        cause = textwrap.shorten(str(error.__cause__ or error), 400, placeholder=" ...")  # columns that did not fit
        raise ValueError(
            f"{name} cannot be read as a data set ({cause}); give a folder or Hub id that "
            f"datasets.load_dataset takes, or a file that ends in {', '.join(_BUILDERS)}"
        ) from error
    splits = dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}
    if path is not None and path.suffix.lower() == ".csv":
        _require_names(name, path)
        columns = splits["train"].column_names
        _require_commas(name, columns, splits["train"][0][columns[0]] if len(splits["train"]) else None)
    return splits


def _builder(file: Path) -> str:
    """The reader of `datasets` for a file, by the end of its name."""
    ending = file.suffix.lower()
    if ending not in _BUILDERS:
        raise ValueError(f"{file.name} ends in {ending or 'nothing'}; files that can be read: {', '.join(_BUILDERS)}")
    return _BUILDERS[ending]


def _require_names(name: str, file: Path) -> None:
    with file.open(newline="", encoding="utf-8-sig") as lines:
        first = next(csv.reader(lines), [])
    try:
        numbers = [float(column) for column in first]
    except ValueError:
        return
    if all(number.is_integer() for number in numbers) and numbers == sorted(set(numbers)):
        return  # years, wavelengths, or numbered by pandas
    raise ValueError(
        f"the first line of {name} would be taken for the names of its columns, and holds numbers: "
        f"{', '.join(first[:4])}. Give the file a line with names"
    )


def _require_commas(name: str, columns: Sequence[str], first: Any) -> None:
    """Raise ValueError for a file of one column whose name, and `first` row, hold what other tables have for commas."""
    separator = next((sign for sign in (";", "\t") if len(columns) == 1 and sign in columns[0]), None)
    if separator is not None and first is not None and columns[0].count(separator) <= str(first).count(separator):
        raise ValueError(
            f"{name} has one column, {columns[0]!r}: its columns seem to stand between {separator!r}, and are read "
            "between commas. Write it so"
        )


def require_outside_data(folder: Path, *names: str | None) -> None:
    """Raise ValueError if the output folder lies in a folder of data: the next time its files would be read as data."""
    for name in filter(None, names):
        path = local(name)
        if path is None or not path.is_dir() or any((path / saved).is_file() for saved in _SAVED_TO_DISK):
            continue  # of what `save_to_disk` wrote, its own files alone are read
        if folder.resolve().is_relative_to(path.resolve()):
            raise ValueError(
                f"{folder} lies in {name}, and would be read as data the next time; give an output folder elsewhere"
            )
