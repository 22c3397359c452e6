"""A folder that a run or a measurement writes: one writer at a time, whole files, nothing left behind.

No torch here: records are written and read with it.
"""

import errno
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

if sys.platform == "win32":
    fcntl = None
else:
    import fcntl


class FolderBusyError(RuntimeError):
    """Another process writes to the folder."""


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process, making it where it is not there.

    The system lets go of it however the process ends, so no lock is ever stale. Where a file system knows no locks,
    none is held.

    Raises FolderBusyError if another process, or another part of this one, holds it, and NotADirectoryError for a file.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise FolderBusyError(
                    f"another process is writing to {folder}; wait for it, or give another output folder"
                ) from error
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.EBADF, errno.EINVAL):
                raise
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


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, by an exception: every `finally` runs.

    Behind the block they end the process as they always do: an exception in what Python does last is printed as a
    traceback, and changes nothing.
    """
    before = {
        number: signal.signal(number, _stop) for number in (signal.SIGTERM, getattr(signal, "SIGHUP", None)) if number
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
