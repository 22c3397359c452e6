"""What may have been meant by a name that is not there."""

import difflib
from collections.abc import Iterable
from pathlib import Path


def did_you_mean(word: str, known: Iterable[str], folder: Path | None = None) -> str:
    """ " (did you mean x?)" of what is known (in `folder`) with nearly that name, or ""."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0] if folder is None else folder / near[0]}?)" if near else ""
