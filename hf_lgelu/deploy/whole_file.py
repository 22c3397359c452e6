"""A file that is complete or not there."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(target: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield the path of a file to write, in a new folder beside `target`; it becomes `target` when the block ends well.

    The folder, and whatever else was written into it, is removed in every case; after an error what was at `target`
    is as it was.

    Raises:
        FileExistsError: there is something at `target` and `overwrite` is False.
        IsADirectoryError: `target` is a folder.
    """
    target = Path(target)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder; give the path of a file")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} is there already; give another path, or replace it with overwrite=True")
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        new = folder / target.name
        yield new
        os.replace(new, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
