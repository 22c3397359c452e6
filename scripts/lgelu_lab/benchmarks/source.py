"""Where a benchmark's data comes from: a folder the user names, or the Hugging Face Hub."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DATA_DIR_VARIABLE = "LGELU_DATA_DIR"
_README, _README_CHARACTERS = "README.md", 2000


@dataclass(frozen=True)
class Origin:
    """What was read, for the record of a run: a copy in a folder need not be what the Hub has.

    Args:
        source: the Hub id where the Hub's data was read, else the folder or the package in words.
        copy_of: of a folder, the Hub id in whose place it was read; None elsewhere, and of data that the Hub lacks.
        folder: the folder's name, without the path to it.
        files: {file of the folder: its size in bytes}.
        readme: what the folder's README.md says, its front matter left out; None without one.
    """

    source: str
    copy_of: str | None = None
    folder: str | None = None
    files: dict[str, int] = field(default_factory=dict)
    readme: str | None = None

    @classmethod
    def of_folder(cls, path: Path, hub_id: str | None) -> "Origin":
        """Of a local copy."""
        files = {file.relative_to(path).as_posix(): file.stat().st_size for file in path.rglob("*") if file.is_file()}
        return cls(f"local folder {path.name}", hub_id, path.name, dict(sorted(files.items())), _read_readme(path))

    def require_same(self, recorded: Mapping[str, Any], whose: str) -> None:
        """Raise ValueError where what was read now is not what was `recorded`, the `data` of a run's record.

        A record from before copies were told from the Hub says nothing, and passes.
        """
        if "copy_of" in recorded and (was := _identity(recorded)) != (now := _identity(asdict(self))):
            there = f"Point data_dir or {DATA_DIR_VARIABLE} at what was read then"
            raise ValueError(f"{whose} read other data: {was}, and now {now}. {there}")


def _identity(origin: Mapping[str, Any]) -> str:
    """A copy by its files' names and sizes, wherever it lies and whatever its folder is called; else the source."""
    if origin["copy_of"] is None:
        return origin["source"]
    files = {name: size for name, size in origin["files"].items() if name != _README}
    return f"a copy of {origin['copy_of']} with {files}"


@dataclass(frozen=True)
class Found:
    """The splits of a data set, {name: datasets.Dataset}, and where they are from."""

    splits: dict[str, Any]
    origin: Origin


def load_splits(
    folder: str | Sequence[str],
    hub_id: str | None,
    data_dir: str | os.PathLike[str] | None,
    *,
    splits: Sequence[str],
    columns: Sequence[str],
    optional_splits: Sequence[str] = (),
    hub_config: str | None = None,
    off_hub: str = "",
) -> Found:
    """The splits of one data set, each with the columns asked for.

    Args:
        folder: name of the data set's folder inside the data directory, or several, of which the first that
            is there counts.
        hub_id: what is loaded from the Hub when there is no data directory; None where the Hub has no such data set.
        data_dir: the data directory; None takes the environment variable LGELU_DATA_DIR. Where either
            is set the Hub is never asked.
        splits: splits that must be there.
        columns: columns that each split must have; others may be.
        optional_splits: splits that are returned if they are there.
        hub_config: which of the data sets under `hub_id`, where there are several.
        off_hub: of a data set that the Hub lacks, what its folder holds and where that is from: ends an error.

    Raises ValueError where the folder, a split or a column is missing, or where there is no data directory for a data
    set that the Hub lacks; and what `datasets.load_dataset` raises.
    """
    import datasets  # takes a second, and many who import this file read no data

    directory = data_dir if data_dir is not None else os.environ.get(DATA_DIR_VARIABLE) or None
    names = (folder,) if isinstance(folder, str) else folder
    if directory is not None:
        places = [Path(directory).expanduser() / name for name in names]
        path = next((place for place in places if place.is_dir()), None)
        if path is None:
            holds = f"a copy of {hub_id}" if hub_id else off_hub
            raise ValueError(
                f"there is no folder {places[0]}, which should hold {holds}. Put one there, or point data_dir or "
                f"{DATA_DIR_VARIABLE} elsewhere"
            )
        found, source, origin = datasets.load_dataset(str(path)), str(path), Origin.of_folder(path, hub_id)
    elif hub_id is None:
        raise ValueError(
            f"the Hub has no data set {names[0]}: point data_dir or {DATA_DIR_VARIABLE} to a directory with a folder "
            f"{names[0]}, which holds {off_hub}"
        )
    else:
        found, source, origin = datasets.load_dataset(hub_id, hub_config), f"{hub_id} on the Hub", Origin(hub_id)
    wanted = {split: found[split] for split in (*splits, *optional_splits) if split in found}
    absent = [split for split in splits if split not in found]
    absent += sorted({column for rows in wanted.values() for column in columns if column not in rows.column_names})
    if absent:
        there = {split: rows.column_names for split, rows in found.items()}
        raise ValueError(f"{source} has no split or column {', '.join(map(repr, absent))}; it has {there}")
    return Found(wanted, origin)


def _read_readme(path: Path) -> str | None:
    readme = path / _README
    if not readme.is_file():
        return None
    text = readme.read_text(encoding="utf-8", errors="replace")
    if text.startswith("---\n"):
        text = text[3:].partition("\n---")[2]
    text = text.strip()
    return text if len(text) <= _README_CHARACTERS else text[:_README_CHARACTERS] + " …"
