"""Files that leave with a model must be the model's own: a link may lead to anything on this machine."""

from pathlib import Path


def require_inside(file: Path, folder: Path) -> None:
    """Raise ValueError if `file`, in `folder`, is or lies behind a link that leads out of it.

    The Hub's cache is all links, from snapshots/REVISION to blobs/ beside it: those are the model's own.
    """
    whole = folder.resolve()
    own = [whole, whole.parent.parent / "blobs"] if whole.parent.name == "snapshots" else [whole]
    target = file.resolve()
    if not any(target.is_relative_to(place) for place in own):
        raise ValueError(
            f"{file.relative_to(folder)} in {folder} is a link that leads out of the folder, and would be copied (and "
            "pushed) with the model; put the file itself in its place, or remove the link"
        )
