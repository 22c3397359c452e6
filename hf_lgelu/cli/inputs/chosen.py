"""The inputs that a command's arguments name: those that something is fitted on, and those that it is judged by."""

import textwrap
from typing import Any

from hf_lgelu.cli.arguments import ConvertArguments, InputArguments
from hf_lgelu.cli.given_checkpoint import GivenCheckpoint
from hf_lgelu.cli.inputs.dataset_inputs import DatasetName, dataset_rows
from hf_lgelu.cli.inputs.input_set import InputSet
from hf_lgelu.cli.inputs.texts import context_length
from hf_lgelu.cli.named_places import local, require_there

_SECOND_SPLITS = ("validation", "valid", "test")
_SAVED_TO_DISK = ("dataset_dict.json", "state.json")
_BUILDERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}


def data_set(arguments: ConvertArguments, given: GivenCheckpoint) -> InputSet:
    """What --data names, as the checkpoint's model takes it, by the tokenizer or image processor beside it.

    Raises ValueError that says what is accepted where a set is not to be had or does not fit the model, OSError where
    there is none.
    """
    splits = load_splits(arguments.data, arguments.data_config, progress=not arguments.disable_tqdm)
    name = _named(arguments, arguments.data, arguments.data_config, arguments.data_split)
    return _rows(arguments, name, splits, given, arguments.max_samples)


def evaluation_set(arguments: InputArguments, given: GivenCheckpoint) -> InputSet | None:
    """What --evaluation names; left out, another split of --data, where a command has one.

    Raises as `data_set`, and ValueError where it would be the rows of --data once more.
    """
    of_data = arguments if isinstance(arguments, ConvertArguments) else None
    name, config = arguments.evaluation, arguments.evaluation_config
    if name is None and of_data is not None:
        name, config = of_data.data, config or of_data.data_config
    if name is None or name == "none":
        return None
    splits = load_splits(name, config, progress=not arguments.disable_tqdm)
    is_data = of_data is not None and config == of_data.data_config and _is_one_place(name, of_data.data)
    taken = of_data.data_split if of_data is not None and is_data else None
    usual = [split for split in (*_SECOND_SPLITS, *(splits if len(splits) == 1 else ())) if split in splits]
    split = arguments.evaluation_split or next((split for split in usual if split != taken), None)
    if split is None and arguments.evaluation is None:
        unused = [
            option for option in ("evaluation_config", "max_eval_samples") if getattr(arguments, option) is not None
        ]
        if unused:
            raise ValueError(f"--{unused[0]} is of a second set, and {name} has no split for one; give --evaluation")
        return None
    if split is None or split == taken:
        beside = f" must be other rows than --data, split {taken!r}" if is_data else " has several splits"
        raise ValueError(
            f"the second set{beside}; give --evaluation_split, of {', '.join(splits)}, or --evaluation another data set"
        )
    return _rows(arguments, _named(arguments, name, config, split), splits, given, arguments.max_eval_samples)


def _is_one_place(name: str, other: str) -> bool:
    """Whether two names are of one file or folder, however they are spelled, or of one data set of the Hub."""
    here, there = local(name), local(other)
    return name == other if here is None or there is None else here.samefile(there)


def _named(arguments: InputArguments, name: str, config: str | None, split: str) -> DatasetName:
    return DatasetName(name, config, split, arguments.column, arguments.label_column, arguments.pair_column)


def _rows(
    arguments: InputArguments, name: DatasetName, splits: dict[str, Any], given: GivenCheckpoint, wanted: int | None
) -> InputSet:
    if name.split not in splits:
        raise ValueError(f"{name.name} has no split {name.split!r}; it has {', '.join(splits)}")
    length = arguments.sequence_length
    if length is None and given.longest is not None:
        length = min(given.longest, context_length(given.model, None))
    return dataset_rows(
        name, splits[name.split], given.model, given.processors, wanted=wanted, seed=arguments.seed,
        sequence_length=length, prompt=given.prompt,
    )  # fmt: skip


def load_splits(name: str, config: str | None = None, *, progress: bool = True) -> dict[str, Any]:
    """{split: datasets.Dataset} of a file, a folder (of data files, images, or what `save_to_disk` wrote) or a Hub id.

    Raises ValueError if it cannot be read, and FileNotFoundError where nothing is.
    """
    import datasets

    if not progress:
        datasets.disable_progress_bars()
    require_there(name, "dataset")
    path = local(name)
    try:
        if path is not None and path.is_file():
            if path.suffix.lower() not in _BUILDERS:
                raise ValueError(f"the file ends in {path.suffix or 'nothing'}")
            found = datasets.load_dataset(_BUILDERS[path.suffix.lower()], data_files={"train": str(path)})
        elif path is not None and any((path / saved).is_file() for saved in _SAVED_TO_DISK):
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path or name), config)
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        cause = textwrap.shorten(str(error.__cause__ or error), 400, placeholder=" ...")  # columns that did not fit
        raise ValueError(
            f"{name} cannot be read as a data set ({cause}); give a folder or Hub id that datasets.load_dataset takes, "
            f"or a file with rows that ends in {', '.join(_BUILDERS)}"
        ) from error
    return dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}
