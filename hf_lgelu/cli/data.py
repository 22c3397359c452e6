"""The rows of a data set that a command's arguments name, before a model reads them.

Nothing here imports torch, so that a wrong name is refused before libraries load for seconds.
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_lgelu.cli.arguments import ConvertArguments, OutputArguments, RowArguments
from hf_lgelu.files import is_onnx, local

_SECOND_SPLITS = ("validation", "valid", "test")
_SAVED_TO_DISK = ("dataset_dict.json", "state.json")
_BUILDERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}


@dataclass(frozen=True)
class Rows:
    """The rows and columns of a data set that a command asks for.

    `rows` is a `datasets.Dataset` of the folder, file or Hub id `name`. `config` and `split` are for the description.
    `asked` has the options for columns and sequences. `wanted` is the number of rows, or of blocks of a running text.
    """

    name: str
    rows: Any
    asked: RowArguments
    config: str | None = None
    split: str | None = None
    wanted: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if there are no rows, or a column that is asked for is missing."""
        for column in (self.asked.column, self.asked.pair_column, self.asked.label_column):
            if column is not None and column not in self.rows.column_names:
                raise ValueError(f"{self.description} has no column {column!r}; {self.columns_in_words}")
        if not len(self.rows):
            raise ValueError(f"{self.description} has no rows")

    @property
    def description(self) -> str:
        """The data set in words, without the path of a local one."""
        path = local(self.name)
        name = self.name if path is None else path.resolve().name
        has_splits = self.split and not (path is not None and path.is_file())  # the split of a file has no own name
        return ", ".join(filter(None, (name, self.config, f"split {self.split}" if has_splits else None)))

    def columns_of(self, kind: str) -> list[str]:
        """The names of the columns of a kind (`kind_of_column`)."""
        return [column for column, feature in self.rows.features.items() if kind_of_column(feature) == kind]

    @property
    def columns_in_words(self) -> str:
        """ "its columns are text (text), label (number)"."""
        kinds = {
            column: kind_of_column(feature) or type(feature).__name__ for column, feature in self.rows.features.items()
        }
        shown = [f"{column} ({kind})" for column, kind in kinds.items()][:16]
        return f"its columns are {', '.join(shown)}{', …' * (len(kinds) > 16)}"


def open_sets(arguments: Any) -> dict[str, Rows | None]:
    """{"data": rows, "evaluation": rows}, of the options that a command has. Raises the errors of both functions.

    The rows of an ONNX file are read later, as its inputs take them.
    """
    sets: dict[str, Callable[[Any], Rows | None]] = {"data": data_set, "evaluation": evaluation_set}
    is_file = is_onnx(getattr(arguments, "model", ""))
    return {name: None if is_file else rows(arguments) for name, rows in sets.items() if hasattr(arguments, name)}


def data_set(arguments: Any) -> Rows | None:
    """The rows that --data names; None without --data.

    Raises ValueError if the set cannot be read, has no rows, or lacks a column that is asked for.
    """
    name, config = arguments.data, arguments.data_config
    if name is None:
        return None
    splits = load_splits(name, config, progress=arguments.progress)
    split = arguments.data_split or _second_split(list(splits))
    if split is None:
        raise ValueError(f"{name} has several splits; give --data_split, one of {', '.join(splits)}")
    return _rows(arguments, name, config, split, splits, arguments.max_samples)


def evaluation_set(arguments: OutputArguments) -> Rows | None:
    """The rows that --evaluation names. Without it, `hf-lgelu convert` takes another split of --data.

    Raises the errors of `data_set`, and ValueError for the same rows as --data.
    """
    of_data = arguments if isinstance(arguments, ConvertArguments) and arguments.data is not None else None
    name, config = arguments.evaluation, arguments.evaluation_config
    if name is None and of_data is not None:
        name, config = of_data.data, config or of_data.data_config
    if name is None or name == "none":
        return None
    splits = load_splits(name, config, progress=arguments.progress)
    taken = None
    if of_data is not None and (_place(name), config) == (_place(str(of_data.data)), of_data.data_config):
        taken = of_data.data_split
    split = arguments.evaluation_split or _second_split(list(splits), taken)
    options = (arguments.evaluation, arguments.evaluation_config, arguments.max_eval_samples)
    if split is None and options == (None, None, None):
        return None
    if split is None or split == taken:
        reason = "has several splits" if taken is None else f"must be other rows than --data, split {taken!r}"
        others = [each for each in splits if each != taken]
        other_split = f"--evaluation_split, one of {', '.join(others)}, or " if others else ""
        raise ValueError(f"the second set {reason}; give {other_split}another --evaluation")
    return _rows(arguments, name, config, split, splits, arguments.max_eval_samples)


def _place(name: str) -> str | Path:
    """The same value for every way to name one file or folder; a Hub id as it is."""
    path = local(name)
    return name if path is None else path.resolve()


def _second_split(splits: Sequence[str], taken: str | None = None) -> str | None:
    """The split on which networks are compared if none is named: validation or test, else the only split."""
    usual = [split for split in (*_SECOND_SPLITS, *(splits if len(splits) == 1 else ())) if split in splits]
    return next((split for split in usual if split != taken), None)


def _rows(
    asked: RowArguments, name: str, config: str | None, split: str, splits: dict[str, Any], wanted: int | None
) -> Rows:
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}; it has {', '.join(splits)}")
    return Rows(name, splits[split], asked, config, split, wanted)


def load_splits(name: str, config: str | None = None, *, progress: bool = True) -> dict[str, Any]:
    """{split: datasets.Dataset} of a file, a folder (data files, images, or a folder of `save_to_disk`) or a Hub id.

    Raises ValueError if the set cannot be read.
    """
    import datasets

    if not progress:
        datasets.disable_progress_bars()
    path = local(name)
    try:
        if path is not None and any((path / saved).is_file() for saved in _SAVED_TO_DISK):
            found = datasets.load_from_disk(str(path))
        else:
            given: dict[str, Any] = {"path": str(path or name), "name": config}
            if path is not None and path.is_file():
                if path.suffix.lower() not in _BUILDERS:
                    raise ValueError(f"the file ends in {path.suffix or 'nothing'}")
                given = {"path": _BUILDERS[path.suffix.lower()], "data_files": {"train": str(path)}}
            builder = datasets.load_dataset_builder(**given)
            # utf-8-sig drops the byte order mark, which would become part of the first word.
            found = datasets.load_dataset(**given, **({"encoding": "utf-8-sig"} if builder.name == "text" else {}))
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        cause = textwrap.shorten(str(error.__cause__ or error), 400, placeholder=" ...")  # columns that did not fit
        if path is not None and path.is_file() and len(path.read_bytes().split()) < 2:  # empty, or column names
            cause = "it has no rows"
        raise ValueError(
            f"{name} cannot be read as a data set ({cause}); give a folder or Hub id that datasets.load_dataset takes, "
            f"or a file with rows that ends in {', '.join(_BUILDERS)}"
        ) from error
    return dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}


def kind_of_column(feature: Any) -> str | None:
    """ "text", "image", "number", "list" (of numbers), "nested" (lists or mappings of others), or None."""
    import datasets

    if isinstance(feature, datasets.Image):
        return "image"
    if isinstance(feature, datasets.Value):
        if feature.dtype in ("string", "large_string", "string_view"):
            return "text"
        return "number" if feature.dtype.startswith(("float", "int", "uint", "bool")) else None
    if isinstance(feature, dict | list) or hasattr(feature, "feature"):
        return "list" if kind_of_column(getattr(feature, "feature", None)) == "number" else "nested"
    return None
