"""The paths and Hub ids in a command's arguments, refused before any heavy library loads."""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from hf_lgelu.files import could_be_hub_id, require_replaceable

_ANSWER_SECONDS = 10.0


def local(name: str) -> Path | None:
    """The path of the folder or file `name`; None where there is none."""
    path = Path(name).expanduser()
    return path if path.exists() else None


def require_paths(arguments: Any) -> None:
    """Raise OSError or ValueError for an output folder that is occupied or has what is read inside, and for a
    checkpoint or data set that is not there; for these the Hub may be asked."""
    read = {
        value: entry.metadata["reads"]
        for entry in fields(arguments)
        if "reads" in entry.metadata and (value := getattr(arguments, entry.name)) not in (None, "none")
    }
    output = getattr(arguments, "output_dir", None)
    if output is not None:
        folder = Path(output)
        for name, kind in read.items():
            path, what = local(name), "the checkpoint" if kind == "model" else name
            if path is not None and path.resolve().is_relative_to(folder.resolve()):
                where = f"is {what} itself" if folder.samefile(path) else f"has {what} inside"
                raise ValueError(f"{folder} {where}; give another output folder, so that it is not lost")
        require_replaceable(output, overwrite=arguments.overwrite)
    for name, kind in read.items():
        require_there(name, kind)


def require_there(name: str, kind: str = "model") -> None:
    """Raise FileNotFoundError unless there is a folder or file `name`, a "model" or "dataset" of that id on the Hub, or
    a cached one.

    The libraries that load it would try the Hub five times, for half a minute, before they say so.
    """
    if local(name) is not None:
        return
    what = "the folder of a checkpoint" if kind == "model" else "a folder or file of data"
    missing = f"there is no folder or file {name}"
    if not could_be_hub_id(name):
        raise FileNotFoundError(f"{missing}; give {what}, or a Hub id such as user/{kind}")
    if kind == "model":
        is_cached = isinstance(try_to_load_from_cache(name, constants.CONFIG_NAME), str)
    else:  # as the package datasets, which takes seconds to load, finds its cache
        cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
        is_cached = (cache / name.replace("/", "___").lower()).is_dir()
    if is_cached:
        return
    if constants.HF_HUB_OFFLINE:
        raise FileNotFoundError(f"{missing}, and the Hub is not asked (HF_HUB_OFFLINE); give {what}")
    look = HfApi().model_info if kind == "model" else HfApi().dataset_info
    try:
        look(name, timeout=_ANSWER_SECONDS)
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        why = "has none of that name, or none that you may read" if status in (401, 403, 404) else f"answers {status}"
        raise FileNotFoundError(f"{missing}, and the Hub {why}; give {what}, or a Hub id") from error
    except (HTTPError, OSError) as error:
        raise FileNotFoundError(f"{missing}, and the Hub cannot be reached ({error}); give {what}") from error
