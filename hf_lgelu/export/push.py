"""A model folder to the Hugging Face Hub."""

import os
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HTTPError

_TRAINING = ["training_args.bin", "optimizer.*", "scheduler.pt", "scaler.pt", "rng_state*", "trainer_state.json"]
_HIDDEN = [".*", "*/.*", "checkpoint-*", "record.json"]  # a record of a run may name local paths
# transformers reads a file in one piece before shards, and puts an adapter on top.
_LOADED_INSTEAD = ["model*.safetensors", "model.safetensors.index.json", "pytorch_model*", "adapter_*"]


def push_to_hub(folder: str | os.PathLike, repo_id: str, *, private: bool | None = None) -> CommitInfo:
    """Push a model folder by `upload_folder` of huggingface_hub, and delete old weights that would be loaded instead.

    Trainer's state, checkpoints and hidden files stay behind. A push that was cut off can be repeated.

    Args:
        folder: config.json, safetensors, README.md, the files of a tokenizer or processor.
        repo_id: "user/name", or only "name" for the account that is logged in; it is made if it is not there.
        private: of a new repository, and True refuses one that is there and public; None takes the account's default.

    Raises:
        ValueError: a private push would go to a public repository.
        NotADirectoryError: `folder` is no folder.
        ConnectionError: the Hub cannot be reached, or does not take the token; the message says how to push later.

    Example:
        >>> from hf_lgelu import push_to_hub
        >>> push_to_hub("out/relu", "you/model-relu", private=True)  # doctest: +SKIP
    """
    if not Path(folder).is_dir():
        raise NotADirectoryError(f"{folder} is no folder; give the one that an export or save_pretrained wrote")
    api, later = HfApi(), f"push_to_hub({str(folder)!r}, {str(repo_id)!r}, private={private})"
    places = {path.parent.relative_to(folder) for path in Path(folder).rglob("*.safetensors")}
    old = [(place / pattern).as_posix() for place in sorted(places) for pattern in _LOADED_INSTEAD]
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # of "name" it is "user/name"
        if private and not api.model_info(repo_id).private:  # create_repo leaves what is there as it is
            raise ValueError(f"{repo_id} is there and is public; give another name, or make it private first")
        return api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message="Upload model with hf_lgelu",
            ignore_patterns=[*_TRAINING, *_HIDDEN], delete_patterns=old,
        )  # fmt: skip
    except (HTTPError, OSError, RuntimeError) as error:  # offline, cut off, without a token or with a wrong one
        raise ConnectionError(
            f"the push to {repo_id} did not end ({error}). {folder} is complete. Push it later by hf_lgelu.{later}"
        ) from error
