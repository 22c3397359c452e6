"""A folder that is complete or not there, whenever the process is killed."""

import ctypes
import errno
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.constants import CONFIG_NAME

try:
    import fcntl
except ImportError:  # Windows, where nothing is swept: who is alive cannot be seen there
    fcntl = None  # type: ignore[assignment]

_SUFFIX = ".hf_lgelu"
_CHECKPOINTS = "checkpoint-*"  # folders that transformers' Trainer writes
_RANDOM = "?" * 8  # as many letters as mkdtemp draws: "*" would take what belongs to `name-2` for that of `name`
_LOCK, _NEW, _OLD = "lock", "new", "old"
_SECONDS_TO_LOCK = 60.0
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


@contextmanager
def whole_folder(target: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new folder to write into; it becomes `target` when the block ends well.

    After an error nothing is left behind, and what was at `target` is as it was. Only where the system does not let the
    finished folder take its place, that stays beside it, and the error names it. A process that is killed leaves the
    old folder or the new one at `target`, and perhaps a hidden one beside it, which the next call for the same
    `target` removes. Where the system cannot exchange two folders in one step, a process killed between two steps
    leaves the old one hidden; the next call puts it back.

    Args:
        target: the folder to be. An empty one may be there. Of a link, what it leads to.
        overwrite: put the new folder in the place of one that is not empty, if it holds a model: a config.json.

    Raises:
        FileExistsError: `target` is not empty, and `overwrite` is False, or it holds no model, or a Trainer's
            checkpoints or a repository of git beside it.
        NotADirectoryError: `target` is a file.
        ValueError: the current folder is `target` or inside it, and would be gone; or `target` is where a disk is
            mounted, and can be neither moved nor replaced.
        OSError: the finished folder could not take its place; the message says where it is.

    Example:
        >>> with tempfile.TemporaryDirectory() as place:
        ...     with whole_folder(Path(place, "model")) as new:
        ...         _ = (new / "config.json").write_text("{}")
        ...     os.listdir(place)
        ['model']
    """
    named, target = Path(target), Path(os.path.realpath(target))
    if Path.cwd().is_relative_to(target):
        raise ValueError(f"{named} is the current folder or has it inside; give a folder of the export's own")
    if os.path.ismount(target):
        raise ValueError(f"{named} is a mount point and cannot be replaced as a whole; give a folder inside it")
    sweep(target)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{named} is a file; give a folder")
    if target.exists() and any(target.iterdir()):
        _require_replaceable(named, overwrite)
    with folder_beside(target) as folder:
        new = folder / _NEW
        new.mkdir()
        yield new
        if target.exists() and any(target.iterdir()):
            _require_replaceable(named, overwrite)  # it may have been filled in the meantime
        try:
            _put(new, target, folder / _OLD)
        except OSError as error:
            kept = _kept_beside(new, target)
            raise OSError(
                error.errno, f"{error.strerror}: what was made could not take the place of {named}, and is in {kept}"
            ) from error


def _kept_beside(new: Path, target: Path) -> Path:
    """`new` under a visible name beside the target, where nothing removes it."""
    kept = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}-"))
    os.replace(new, kept)
    return kept


def _require_replaceable(target: Path, overwrite: bool) -> None:
    if not overwrite:
        raise FileExistsError(
            f"{target} is not empty; give another folder, or replace this one with overwrite=True (--overwrite)"
        )
    # sentence-transformers may keep its encoder, with the config, in a folder of its own.
    if not any((target / name).is_file() for name in (CONFIG_NAME, "modules.json")):
        raise FileExistsError(
            f"{target} holds no config.json: it is no model that an export could replace, and would be lost. Give "
            "another folder, or remove this one yourself"
        )
    if (target / ".git").exists():
        raise FileExistsError(
            f"{target} is a repository of git, whose history would be lost with what is replaced. Give another folder, "
            "and copy its files into the repository"
        )
    checkpoints = sorted(path.name for path in target.glob(_CHECKPOINTS) if path.is_dir())
    if checkpoints:
        raise FileExistsError(
            f"{target} holds the checkpoints of a training ({', '.join(checkpoints[:3])}"
            f"{', ...' if len(checkpoints) > 3 else ''}), which would be lost with what is replaced. Give another "
            "folder, or remove them yourself"
        )


@contextmanager
def folder_beside(target: Path) -> Iterator[Path]:
    """Yield a new hidden folder beside `target`, on the same disk; it is removed in the end.

    Raises NotADirectoryError where a file stands in the way to it, and OSError where nothing can be written.
    """
    above = next((parent for parent in target.parents if parent.exists()), None)
    if above is not None and not above.is_dir():
        raise NotADirectoryError(f"{above} is a file, and nothing can be written below it; give another place")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-", suffix=_SUFFIX))
    except OSError as error:  # it names the hidden folder, which nobody gave
        raise OSError(
            error.errno, f"{error.strerror}: nothing can be written to {target.parent}; give another place", str(target)
        ) from error
    lock = None
    try:
        lock = _locked(folder / _LOCK)  # as long as this process lives
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def sweep(target: Path) -> None:
    """Remove what killed processes left hidden beside `target`, and put back a folder that one was about to replace."""
    pattern = f".{glob.escape(target.name)}-{_RANDOM}{_SUFFIX}"
    for folder in sorted(target.parent.glob(pattern)):
        lock = _lock_of_the_dead(folder)
        if lock is None:
            continue
        try:
            if (folder / _OLD).exists() and not target.exists():
                os.replace(folder / _OLD, target)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _flocked(path: Path) -> int:
    """A file of that name, locked until it is closed or the process ends. Raises OSError where that cannot be."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _locked(path: Path) -> int | None:
    """`_flocked`, or None without such locks: nobody will take this folder for a dead one, nor sweep it."""
    if fcntl is None:
        return None
    try:
        return _flocked(path)
    except OSError:
        path.unlink(missing_ok=True)
        return None


def hold(path: Path) -> int | None:
    """`_flocked`, or None where the system has no such locks. Raises BlockingIOError where another process holds it."""
    if fcntl is None:
        return None
    try:
        return _flocked(path)
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, f"another process works in {path.parent}") from error
    except OSError:
        return None


def _lock_of_the_dead(folder: Path) -> int | None:
    """The lock of a hidden folder whose process has ended, now held by this one; None if it lives, or nobody knows."""
    if fcntl is None:
        return None
    path = folder / _LOCK
    try:
        if not path.exists() and time.time() - folder.stat().st_mtime < _SECONDS_TO_LOCK:
            return None  # just made, perhaps, by a process that is about to lock it
        return _flocked(path)
    except OSError:
        return None  # gone in the meantime, another user's, or held


def _put(new: Path, target: Path, old: Path) -> None:
    """`new` to `target`; what was there goes to where `new` was, or to `old`, to be removed with it."""
    if not target.exists():
        os.replace(new, target)
    elif not any(target.iterdir()):
        target.rmdir()
        os.replace(new, target)
    elif not _exchanged(new, target):
        try:
            os.replace(target, old)
            os.replace(new, target)
        finally:  # also when it is interrupted between the two
            if not target.exists():
                os.replace(old, target)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))
