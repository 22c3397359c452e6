"""A model folder to the Hugging Face Hub: everything in one commit, nothing that is a pickle, no secret in a file."""

import json
import logging
import os
import re
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo, get_token
from huggingface_hub.constants import CONFIG_NAME, REPOCARD_NAME
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from transformers.utils import CHAT_TEMPLATE_DIR

from hf_lgelu.export.hub.card import TOKEN, holds_token
from hf_lgelu.export.hub.loading import MODULES_FILE, sentence_modules
from hf_lgelu.files import require_inside

logger = logging.getLogger(__name__)

LICENSE_FILE = "LICENSE"
_SENT = (
    *(".safetensors", ".onnx", ".onnx.data", ".onnx_data", ".json", ".txt", ".md", ".png"),
    *(".jinja", ".model", ".tiktoken", ".spm", ".codes", ".tokenizer"),  # tokenizers
)
# Where transformers looks for weights: a file in one piece goes before shards, and an adapter is put on top.
_LOADED_INSTEAD = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|pytorch_model.*\.(bin|json)"
    r"|adapter_config\.json|adapter_model\..*"
)
_OTHER_WEIGHTS = (".safetensors", ".bin", ".onnx", ".onnx_data", ".onnx.data", ".gguf", ".h5", ".msgpack", ".ot", ".pt")
_TEXT_SUFFIXES = (".json", ".txt", ".md", ".jinja", ".py", ".tiktoken")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
# What Trainer leaves beside a model: the state of a training, not the model. A record may name local paths.
_TRAINING_STATE = re.compile(
    r"training_args\.bin|optimizer\.(pt|bin)|scheduler\.pt|scaler\.pt|rng_state.*\.pth|trainer_state\.json|record\.json"
)


def push_to_hub(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str = "Upload model with hf_lgelu",
    revision: str | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Push a model folder with its card, in one commit: the repository has the whole of it, or is as it was.

    Weights and adapters that lie where those of the folder go, under other names (of an earlier push in shards), would
    be loaded in their place or on top: the commit removes them. Other weights that stay (GGUF, `onnx/`) are warned of.

    A push that was cut off can be repeated: large files that arrived are not sent again. The repository is made
    first if there is none. `files_to_push` says which files go.

    Args:
        folder: config.json, safetensors, README.md (`write_card`), the files of a tokenizer or processor.
        repo_id: "user/name", or "name" alone for the account that is logged in.
        private: of a new repository, and True refuses one that is there and public; None takes the account's default.
        token: of the Hub; None takes the one of `hf auth login` or HF_TOKEN.
        commit_message: the first line of the commit.
        revision: branch; "main" if None. It must be there.
        create_pr: open a pull request with the commit instead.

    Raises:
        ValueError: the folder is not fit to be pushed (see `files_to_push`), or a file holds an access token.
        OSError: the Hub does not take the token (PermissionError), or the push was cut off (ConnectionError).

    Example:
        >>> from hf_lgelu import push_to_hub
        >>> push_to_hub("out/relu", "you/model-relu", private=True)  # doctest: +SKIP
    """
    files = files_to_push(folder)
    for name in files:
        if name.endswith((*_TEXT_SUFFIXES, LICENSE_FILE)) and holds_token(
            (Path(folder) / name).read_text(encoding="utf-8", errors="replace"), token or get_token()
        ):
            raise ValueError(f"{name} holds what looks like an access token; take it out (and revoke it) before a push")
    api = HfApi(token=token)
    # Not upload_folder: where hf_xet is installed, huggingface_hub splits that into several commits.
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(Path(folder) / name)) for name in files
    ]
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # of "name" it is "user/name"
        info = api.model_info(repo_id, revision=revision)
        if private and info.private is False:  # create_repo leaves what is there as it is
            raise ValueError(
                f"{repo_id} is there and is public: a push would publish the model, and a private one was asked for. "
                "Give another name, or make that repository private first"
            )
        operations += _deletions(info, files)
        commit = api.create_commit(
            repo_id, operations, commit_message=commit_message, revision=revision, create_pr=create_pr
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status not in (401, 403):
            raise
        raise PermissionError(
            f"the Hub at {api.endpoint} does not let this token write to {repo_id} (status {status}); log in with "
            "`hf auth login`, or set HF_TOKEN to a token that may write there"
        ) from error
    except (HTTPError, RuntimeError) as error:  # RuntimeError: of a large file, in a thread of the client
        told = TOKEN.sub("hf_…", str(error))
        raise ConnectionError(
            f"the push to {repo_id} was cut off or could not begin ({told}); the repository has all of it or none. "
            f"{folder} is complete: push again with push_to_hub({str(folder)!r}, {repo_id!r})"
        ) from error
    logger.info("pushed %d files to %s", len(files), repo_id)
    return commit


def _deletions(info: ModelInfo, files: list[str]) -> list[CommitOperationDelete]:
    """Deletions of the repository's files that a loader would take instead of the pushed ones."""
    there = {file.rfilename for file in info.siblings or ()} - set(files)
    places = {name.rpartition("/")[0] for name in files if name.endswith(".safetensors")}
    gone, other = [], []
    for name in sorted(there):
        place, _, plain = name.rpartition("/")
        if place in places and _LOADED_INSTEAD.fullmatch(plain):
            gone.append(CommitOperationDelete(path_in_repo=name))
        elif name.endswith(_OTHER_WEIGHTS):
            other.append(name)
    if other:
        logger.warning(
            "%s has weights that are not of this push and stay: %s. If they are of the network before, remove them",
            info.id,
            ", ".join(other[:8]),
        )
    return gone


def files_to_push(folder: str | os.PathLike) -> list[str]:
    """The files of a folder that `push_to_hub` sends, as sorted relative paths.

    Safetensors, ONNX with its data, JSON, text, the card, pictures, and the files of tokenizers and processors; Python
    files only if config.json names them as the model's own code. Left out are hidden files, other folders than
    `figures`, `additional_chat_templates`, those of a second tokenizer and the modules of sentence-transformers,
    Trainer's state (training_args.bin, optimizer.pt, …) and record.json.

    Raises ValueError where config.json, README.md or the weights are missing, or a file is a pickle or a link that
    leads out of the folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder; give the one that export_relu or save_pretrained wrote")
    tokenizers = (path.name for path in sorted(folder.glob("*_tokenizer")) if path.is_dir())
    places = [str(module["path"]) for module in sentence_modules(folder)]  # such as 1_Pooling
    places = [place for place in places if place and "/" not in place and not place.startswith(".")]
    inside = ("figures", CHAT_TEMPLATE_DIR, *tokenizers, *places)
    found = [path for place in (folder, *(folder / name for name in inside)) for path in sorted(place.glob("*"))]
    visible = [path for path in found if path.is_file() and not path.name.startswith(".")]
    model_files = [path for path in visible if not _TRAINING_STATE.fullmatch(path.name)]
    pickles = [path.name for path in model_files if path.suffix.lower() in _PICKLES]
    if pickles:
        raise ValueError(
            f"{folder} holds {', '.join(pickles)}: pickles can run code where they are loaded, and are not pushed. "
            "Save the weights as safetensors (save_pretrained does) and remove these files"
        )
    config = folder / CONFIG_NAME
    auto_map = (json.loads(config.read_text(encoding="utf-8")).get("auto_map") or {}) if config.is_file() else {}
    classes = [name for value in auto_map.values() for name in ([value] if isinstance(value, str) else value) if name]
    code = {f"{name.rpartition('.')[0]}.py" for name in classes if "--" not in name}  # {"AutoModel": "mlp.MLP..."}
    goes = {*code, LICENSE_FILE}
    files = [path for path in model_files if path.name.lower().endswith(_SENT) or path.name in goes]
    names = [path.relative_to(folder).as_posix() for path in files]
    # sentence-transformers may keep its encoder, with the config, in a folder of its own.
    whole = CONFIG_NAME if MODULES_FILE not in names else MODULES_FILE
    missing = [name for name in (whole, REPOCARD_NAME) if name not in names]
    if not any(name.endswith((".safetensors", ".onnx")) for name in names):
        missing.append("weights (*.safetensors)")
    if missing:
        raise ValueError(
            f"{folder} has no {', no '.join(missing)}; `hf-lgelu export` and `hf-lgelu convert` write a model with its "
            "card, and a card of your own is a file README.md (huggingface_hub.ModelCard)"
        )
    for name in names:
        require_inside(folder / name, folder)
    return sorted(names)
