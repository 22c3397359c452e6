"""settings.json: what a run was begun with and which data it read, beside the checkpoints that it may go on from."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lgelu_lab.benchmarks.source import Origin
from lgelu_lab.studies.folder import write_whole
from lgelu_lab.studies.records import EARLIER_DEFAULTS, UNTOLD

SETTINGS_FILE = "settings.json"
_DATA = "data"  # beside the settings; files of versions before it have none


def write_settings(folder: Path, settings: Mapping[str, Any], origin: Origin) -> None:
    """Write what `require_same_run` compares with; it is complete or not there."""
    write_whole(folder / SETTINGS_FILE, json.dumps({**settings, _DATA: asdict(origin)}))


def read_settings(folder: Path) -> dict[str, Any]:
    """What is there.

    Raises ValueError for a file that is not there, is cut off or is no text.
    """
    try:
        settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"it must hold an object, got {repr(settings)[:80]}")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} has checkpoints, and what run they are of cannot be read from its {SETTINGS_FILE} ({error}); "
            "remove them to train from the start"
        ) from error
    return settings


def require_same_run(checkpoint: Path, settings: Mapping[str, Any], origin: Origin) -> None:
    """Raise ValueError where the run that left `checkpoint` was begun with other settings, or on other data."""
    folder = checkpoint.parent
    begun = read_settings(folder)
    refuse_differing(folder, "an interrupted run", settings, begun)
    origin.require_same(begun.get(_DATA, {}), f"the interrupted run in {folder}")


def refuse_differing(folder: Path, what: str, asked: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Raise ValueError that names every setting in which what is `asked` for is not what is `there`."""
    there = {**EARLIER_DEFAULTS, **there}
    # What else an older record lacks was None or False.
    compared = asked.keys() - (UNTOLD - there.keys())
    differing = [
        name for name in asked if name in compared and asked[name] != there.get(name) and (name in there or asked[name])
    ]
    if differing:
        raise ValueError(
            f"{folder} has {what}: "
            + ", ".join(f"{name} was {there.get(name)!r} and is now {asked[name]!r}" for name in differing)
            + ". Give what it was made with, or another output folder, or remove what is there"
        )
