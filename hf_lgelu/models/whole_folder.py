"""A folder that is complete or not there."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(target: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new folder beside `target` to write into; it becomes `target` when the block ends well.

    After an error nothing is left behind, and what was at `target` is as it was.

    Args:
        target: the folder to be. An empty one may be there.
        overwrite: put the new folder in the place of one that is not empty, if it holds a model: a config.json.

    Raises:
        FileExistsError: `target` is not empty, and `overwrite` is False or it holds no model.
        NotADirectoryError: `target` is a file.
        ValueError: the current folder is `target` or inside it, and would be gone.
    """
    target = Path(target)
    if Path.cwd().is_relative_to(target.resolve()):
        raise ValueError(f"{target} is the current folder or has it inside; give a folder of the export's own")
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; give a folder")
    if target.exists() and any(target.iterdir()):
        _require_replaceable(target, overwrite)
    with folder_beside(target) as new:
        yield new
        os.chmod(new, 0o755)  # mkdtemp's 0700 would hide it from the people it is shared with
        _put(new, target)


def _require_replaceable(target: Path, overwrite: bool) -> None:
    if not overwrite:
        raise FileExistsError(
            f"{target} is not empty; give another folder, or replace this one with overwrite=True (--overwrite)"
        )
    if not (target / "config.json").is_file():
        raise FileExistsError(
            f"{target} holds no config.json: it is no model that an export could replace, and would be lost. Give "
            "another folder, or remove this one yourself"
        )


@contextmanager
def folder_beside(target: Path) -> Iterator[Path]:
    """Yield a new hidden folder beside `target`, on the same disk; it is removed in the end, if it is still there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put(new: Path, target: Path) -> None:
    if not target.exists():
        os.replace(new, target)
        return
    old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-old-"))
    os.replace(target, old)
    try:
        os.replace(new, target)
    except OSError:
        os.replace(old, target)
        raise
    shutil.rmtree(old)
