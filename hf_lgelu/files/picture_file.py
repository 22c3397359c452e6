"""Pictures as files: of the same numbers the same bytes."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_picture(figure: "Figure", path: str | os.PathLike, dots_per_inch: int) -> Path:
    """Write a PNG, whose folder is made if it is not there, and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Which matplotlib it was would make another file of the same picture.
    figure.savefig(path, dpi=dots_per_inch, metadata={"Software": None})
    return path
