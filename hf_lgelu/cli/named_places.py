"""What a user names: a folder, a file, or an id of the Hub. Whether it is there is known at once, in one try."""

from pathlib import Path

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from hf_lgelu.cli.near_names import did_you_mean
from hf_lgelu.export.hub.hub_id import could_be_hub_id

_SECONDS = 10.0


def local(name: str) -> Path | None:
    """The folder or file of that name; None if there is none."""
    path = Path(name).expanduser()
    return path if path.exists() else None


def require_model_there(name: str) -> None:
    """Raise FileNotFoundError unless there is a folder or file `name`, a model of that id on the Hub, or a cached one.

    The libraries that load it would try the Hub five times, for half a minute, before they say so.
    """
    if local(name) is None:
        cached = could_be_hub_id(name) and isinstance(try_to_load_from_cache(name, constants.CONFIG_NAME), str)
        _require_on_hub(name, "model", cached)


def require_data_there(name: str) -> None:
    """`require_model_there` of a data set."""
    if local(name) is None:
        from datasets import config

        prepared = Path(config.HF_DATASETS_CACHE) / name.replace("/", "___").lower()
        _require_on_hub(name, "dataset", could_be_hub_id(name) and prepared.is_dir())


def _require_on_hub(name: str, kind: str, is_cached: bool) -> None:
    if is_cached:
        return
    missing = f"there is no {'folder' if kind == 'model' else 'folder or file'} {name}{_near(name)}"
    accepted = "the folder of a checkpoint" if kind == "model" else "a folder or file of data"
    if not could_be_hub_id(name):
        raise FileNotFoundError(f"{missing}; give {accepted}, or a Hub id such as user/{kind}")
    if constants.HF_HUB_OFFLINE:
        raise FileNotFoundError(f"{missing}, and the Hub is not asked (HF_HUB_OFFLINE); give {accepted}")
    look = HfApi().model_info if kind == "model" else HfApi().dataset_info
    try:
        look(name, timeout=_SECONDS)
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        why = "has none of that name, or none that you may read" if status in (401, 403, 404) else f"answers {status}"
        raise FileNotFoundError(f"{missing}, and the Hub {why}; give {accepted}, or a Hub id") from error
    except (HTTPError, OSError) as error:
        raise FileNotFoundError(f"{missing}, and the Hub cannot be reached ({error}); give {accepted}") from error


def _near(name: str) -> str:
    """A hint at what is there with nearly that name."""
    path = Path(name).expanduser()
    try:
        beside = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    return did_you_mean(path.name, beside, path.parent)
