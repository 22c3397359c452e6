"""Which names could be those of repositories on the Hub."""

from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

_FILE_ENDINGS = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".arrow", ".txt", ".safetensors", ".bin", ".onnx")


def could_be_hub_id(name: str) -> bool:
    """Whether the Hub could have a repository of that name: no path, and not named like a file."""
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.endswith(_FILE_ENDINGS):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_hub_id(name: str | None) -> bool:
    """Whether a name is to be taken for that of a repository on the Hub: it could be, and no file or folder has it."""
    return name is not None and could_be_hub_id(name) and not Path(name).exists()
