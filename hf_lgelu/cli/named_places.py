"""What a user names: a folder, a file, or an id of the Hub. Whether it is there is known at once, in one try."""

from pathlib import Path

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from hf_lgelu.export.hub.loading import could_be_hub_id

_SECONDS = 10.0


def local(name: str) -> Path | None:
    """The folder or file of that name; None if there is none."""
    path = Path(name).expanduser()
    return path if path.exists() else None


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
    else:
        from datasets import config

        is_cached = (Path(config.HF_DATASETS_CACHE) / name.replace("/", "___").lower()).is_dir()
    if is_cached:
        return
    if constants.HF_HUB_OFFLINE:
        raise FileNotFoundError(f"{missing}, and the Hub is not asked (HF_HUB_OFFLINE); give {what}")
    look = HfApi().model_info if kind == "model" else HfApi().dataset_info
    try:
        look(name, timeout=_SECONDS)
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        why = "has none of that name, or none that you may read" if status in (401, 403, 404) else f"answers {status}"
        raise FileNotFoundError(f"{missing}, and the Hub {why}; give {what}, or a Hub id") from error
    except (HTTPError, OSError) as error:
        raise FileNotFoundError(f"{missing}, and the Hub cannot be reached ({error}); give {what}") from error
