"""Names of files, folders and Hub repositories, and files and folders that are written whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FILE_ENDINGS = (
    *(".csv", ".tsv", ".json", ".jsonl", ".parquet", ".arrow", ".txt"),
    *(".safetensors", ".bin", ".onnx", ".npz", ".npy"),
)


def could_be_hub_id(name: str) -> bool:
    """Whether the Hub could have a repository of that name: it is no path, and not named like a file."""
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.endswith(_FILE_ENDINGS):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_hub_id(name: str | None) -> bool:
    """Whether a name stands for a repository on the Hub: it could be one, and no file or folder has that name."""
    return name is not None and could_be_hub_id(name) and not Path(name).exists()


def is_onnx(name: str) -> bool:
    """Whether a name is that of an ONNX file."""
    return name.endswith(".onnx")


def local(name: str) -> Path | None:
    """The path of the folder or file `name`; None where there is none."""
    path = Path(name).expanduser()
    return path if path.exists() else None


def require_there(name: str, kind: str = "model") -> None:
    """Raise FileNotFoundError unless `name` is a folder or file, a "model" or "dataset" of the Hub, or a cached one.

    The libraries that load it would first try the Hub for half a minute.
    """
    if local(name) is not None:
        return
    what = "the folder of a checkpoint" if kind == "model" else "a folder or file of data"
    missing = f"there is no folder or file {name}"
    if not could_be_hub_id(name):
        raise FileNotFoundError(f"{missing}; give {what}, or a Hub id such as user/{kind}")
    if kind == "model":
        is_cached = isinstance(try_to_load_from_cache(name, constants.CONFIG_NAME), str)
    else:  # the package datasets finds its cache like this, but takes seconds to load
        cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
        is_cached = (cache / name.replace("/", "___").lower()).is_dir()
    if is_cached:
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=10.0)
    except (HTTPError, OSError) as error:  # there is none, or none that may be read, or no Hub
        raise FileNotFoundError(f"{missing}; give {what}, or a Hub id. The Hub says: {error}") from error


@contextmanager
def whole_file(target: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield the path of a file to write, in a new folder next to `target`; it becomes `target` if the block succeeds.

    The new folder, with all other files in it, is removed in every case. After an error `target` is as it was. A link
    at `target` is replaced, not written through.
    """
    target = Path(target)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder; give the path of a file")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} is there already; give another path, or replace it with `overwrite`")
    with _folder_beside(target) as folder:
        yield folder / target.name
        os.replace(folder / target.name, target)


@contextmanager
def whole_folder(target: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new folder to write into; it becomes `target` if the block succeeds.

    After an error no new folder is left, and `target` is as it was. A process that is killed may leave a hidden folder
    next to `target`. Killed between the two renames, it leaves the old folder there, as `target`-….hf_lgelu.

    Args:
        target: the folder to write. An empty folder may be there. If it is a link, the folder that it leads to.
        overwrite: replace a folder that is not empty, if it holds a model: a config.json, model.onnx or
            model-int8.onnx.

    Raises the errors of `require_replaceable`, and OSError where nothing can be written.
    """
    named, target = Path(target), Path(os.path.realpath(target))
    require_replaceable(named, overwrite=overwrite)
    with _folder_beside(target) as folder:
        new, old = folder / "new", folder.with_name(folder.name.removeprefix("."))
        new.mkdir()
        yield new
        mode = new.stat().st_mode & 0o666  # as the umask has it; safetensors gives its files 0600
        for file in new.rglob("*"):
            if file.is_file():
                file.chmod(mode)
        require_replaceable(named, overwrite=overwrite)  # the folder may have been filled in the meantime
        try:
            if target.exists():
                os.replace(target, old)
            os.replace(new, target)
        finally:  # also after an interrupt between the two steps
            if old.exists() and not target.exists():
                os.replace(old, target)
            shutil.rmtree(old, ignore_errors=True)


def require_replaceable(target: str | os.PathLike, *, overwrite: bool | None = False) -> None:
    """Raise OSError or ValueError unless `whole_folder` could put its new folder at `target`.

    `overwrite` is None where the user cannot ask for that.
    """
    target, whole = Path(target), os.path.realpath(target)
    if Path.cwd().is_relative_to(whole) or os.path.ismount(whole):
        raise ValueError(f"{target} is a mount point or the current folder, or has it inside; give a folder inside it")
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; give a folder")
    if not target.exists() or not any(target.iterdir()):
        return
    if not overwrite:
        replace = "" if overwrite is None else ", or replace this one with `overwrite`"
        raise FileExistsError(f"{target} is not empty; give another folder{replace}")
    # sentence-transformers may keep its encoder, with the config, in a folder of its own.
    checkpoints = sorted(path.name for path in target.glob("checkpoint-*") if path.is_dir())
    known = (constants.CONFIG_NAME, "modules.json", "model.onnx", "model-int8.onnx")
    if not any((target / name).is_file() for name in known):
        reason = (
            "holds no config.json and no model.onnx or model-int8.onnx: it is no model that an export could replace"
        )
    elif (target / ".git").exists():
        reason = "is a repository of git, with its history"
    elif checkpoints:
        reason = f"holds the checkpoints of a training ({', '.join(checkpoints[:3])})"
    else:
        return
    raise FileExistsError(f"{target} {reason}, and would be lost. Give another folder, or remove this one yourself")


@contextmanager
def _folder_beside(target: Path) -> Iterator[Path]:
    """Yield a new hidden folder next to `target`, on the same disk; it is removed in the end."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-", suffix=".hf_lgelu"))
    except OSError as error:  # the error names the hidden folder, which the user did not give
        raise OSError(
            error.errno, f"{error.strerror}: nothing can be written to {target.parent}; give another place", str(target)
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def require_inside(file: Path, folder: Path) -> None:
    """Raise ValueError if `file` is, or is reached through, a link that leads out of `folder`.

    In the Hub's cache all files are links from snapshots/REVISION to blobs/ next to it. These are allowed.
    """
    whole = folder.resolve()
    own = [whole, whole.parent.parent / "blobs"] if whole.parent.name == "snapshots" else [whole]
    target = file.resolve()
    if not any(target.is_relative_to(place) for place in own):
        raise ValueError(
            f"{file.relative_to(folder)} in {folder} is a link that leads out of the folder, and would be copied (and "
            "pushed) with the model; put the file itself in its place, or remove the link"
        )


def save_picture(figure: "Figure", path: str | os.PathLike, dots_per_inch: int) -> Path:
    """Write a PNG and return its path; the same numbers give the same bytes. A missing folder is made."""
    with whole_file(path, overwrite=True) as new:
        # With matplotlib's version in the file, the same picture would give other bytes.
        figure.savefig(new, dpi=dots_per_inch, metadata={"Software": None})
    return Path(path)
