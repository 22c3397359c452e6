"""A folder that a run or a measurement writes: one writer at a time, whole files, nothing left behind.

No torch here: records are written and read with it.
"""

import errno
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

if sys.platform == "win32":
    fcntl = None
else:
    import fcntl

CHECKPOINT_PREFIX, CHECKPOINT_STATE = "checkpoint-", "trainer_state.json"
"""Trainer's names; the second is the file of a checkpoint that it writes last."""


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
    """Write a file that is complete or not there: beside its place, then renamed. Returns `target`.

    Raises OSError that names it, e.g. where the disk is full; what was there is then as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's 0600 would hide it from the people it is shared with.
        os.chmod(temporary, target.stat().st_mode & 0o777 if target.exists() else 0o644)
        os.replace(temporary, target)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            raise OSError(error.errno, f"{error.strerror}; the file was not written", str(target)) from error
        raise
    return target


def sweep(target: Path) -> None:
    """Remove what a killed writer of `target` left beside it. Only for who is its sole writer."""
    for leftover in target.parent.glob(f".{target.name}-*.tmp"):
        leftover.unlink(missing_ok=True)


def checkpoints(folder: Path) -> list[Path]:
    """Trainer's checkpoints in a folder, oldest first; one that was cut off while it was written is among them."""
    found = folder.glob(f"{CHECKPOINT_PREFIX}*")
    return sorted((path for path in found if path.name.rpartition("-")[2].isdecimal()), key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def last_whole_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is whole; says on stderr which newer ones are cut off."""
    for checkpoint in reversed(checkpoints(folder)):
        if _is_whole(checkpoint):
            return checkpoint
        print(f"{checkpoint} is cut off and is not used: its {CHECKPOINT_STATE} cannot be read", file=sys.stderr)
    return None


def whole_checkpoint(path: str | os.PathLike) -> Path:
    """That checkpoint, or where it is cut off the newest whole one before it, saying so; of a run's folder its last.

    Raises ValueError if there is none.
    """
    path = Path(path)
    if _is_whole(path):
        return path
    if path in checkpoints(path.parent):
        print(f"{path} is cut off; going on from the one before it", file=sys.stderr)
        earlier = [other for other in checkpoints(path.parent) if _step(other) < _step(path)]
        found = next((other for other in reversed(earlier) if _is_whole(other)), None)
    else:
        found = last_whole_checkpoint(path)
    if found is None:
        raise ValueError(f"there is no whole checkpoint at {path}, nor one before it; train from the start")
    return found


def _is_whole(checkpoint: Path) -> bool:
    try:
        state = json.loads((checkpoint / CHECKPOINT_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there; empty, cut off, or no text
        return False
    return isinstance(state, dict) and isinstance(state.get("global_step"), int)


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
