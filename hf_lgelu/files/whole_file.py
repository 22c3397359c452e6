"""A file that is complete or not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_lgelu.files.whole_folder import folder_beside, sweep


@contextmanager
def whole_file(target: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield the path of a file to write, in a new folder beside `target`; it becomes `target` when the block ends well.

    The folder, and whatever else was written into it, is removed in every case; after an error what was at `target`
    is as it was. What killed processes left hidden beside `target` is removed first. A link at `target` is replaced,
    not written through.

    Raises:
        FileExistsError: there is something at `target` and `overwrite` is False.
        IsADirectoryError: `target` is a folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     with whole_file(Path(place, "notes.txt")) as new:
        ...         _ = new.write_text("all of it")
        ...     Path(place, "notes.txt").read_text()
        'all of it'
    """
    target = Path(target)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder; give the path of a file")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} is there already; give another path, or replace it with overwrite=True")
    sweep(target)
    with folder_beside(target) as folder:
        new = folder / "new" / target.name
        new.parent.mkdir()
        yield new
        os.replace(new, target)
