"""A folder that a run or a measurement writes: one writer at a time, whole files, nothing left behind.

No torch here: records are written and read with it.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FolderBusyError(RuntimeError):
    """Another process writes to the folder."""


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process, making it where it is not there.

    The system lets go of it however the process ends, so no lock is ever stale.

    Raises FolderBusyError if another process, or another part of this one, holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderBusyError(
                f"another process is writing to {folder}; wait for it, or give another output folder"
            ) from error
        yield
    finally:
        os.close(handle)


def write_whole(target: Path, text: str) -> Path:
    """Write a file that is complete or not there. Returns `target`."""
    from hf_lgelu.files import whole_file  # records are read without the library

    with whole_file(target, overwrite=True) as new:
        new.write_text(text, encoding="utf-8")
    return target


def sweep(target: Path) -> None:
    """Remove what a killed writer of `target` left beside it. Only for who is its sole writer."""
    for leftover in target.parent.glob(f".{target.name}-*.hf_lgelu"):
        shutil.rmtree(leftover, ignore_errors=True)
