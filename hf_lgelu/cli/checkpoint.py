"""The checkpoint of a command: loaded, saved and pushed.

sentence-transformers loads and saves its own networks (embeddings, sparse embeddings, scores of pairs), with all of
their modules. They are converted and compared as a whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_lgelu.environment import require
from hf_lgelu.export.onnx_export import ONNX_FILE
from hf_lgelu.export.onnx_network import OnnxNetwork
from hf_lgelu.export.push import push_to_hub
from hf_lgelu.files import local
from hf_lgelu.models.checkpoint import (
    MODULES_FILE,
    SENTENCE_CLASSES,
    SENTENCE_SETTINGS,
    copy_processor_files,
    load_checkpoint,
    processor_files,
    save_checkpoint,
    sentence_class,
)
from hf_lgelu.models.loading import from_pretrained
from hf_lgelu.models.record import loads_elsewhere


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint, with the folder, Hub id or ONNX file that was given as its name.

    `network` is a model of transformers, a network of sentence-transformers, or an `OnnxNetwork`.
    """

    name: str
    network: Any
    trust_remote_code: bool = False

    @property
    def is_of_sentences(self) -> bool:
        """Whether sentence-transformers loads the checkpoint."""
        return type(self.network).__name__ in SENTENCE_CLASSES

    @property
    def model(self) -> Any:
        """The model of transformers in the checkpoint, or the ONNX network."""
        return self.network.transformers_model if self.is_of_sentences else self.network

    @property
    def prompt(self) -> str:
        """The text that sentence-transformers puts before every text, or before the first text of a pair."""
        return (self.network.prompts.get(self.network.default_prompt_name) or "") if self.is_of_sentences else ""

    def save(self, network: Any, folder: Path) -> None:
        """Write the changed `network` as a checkpoint of the same kind, with the tokenizer and other files.

        Raises ValueError for gates of sentence-transformers that a plain load would silently build as they were.
        """
        if isinstance(network, OnnxNetwork):
            network.save(folder / ONNX_FILE)
        elif not self.is_of_sentences:
            save_checkpoint(network, folder, source=self.name)
        elif loads_elsewhere(network.transformers_model.config):
            raise ValueError(
                f"no key of the config of {type(self.model).__name__} says its gates, and sentence-transformers would "
                "load the old ones: convert it in Python (hf_lgelu.convert_to_relu)"
            )
        else:
            network.save_pretrained(str(folder), create_model_card=False)
            copy_processor_files(self.name, folder)  # a tokenizer that was used saves other files


def read_checkpoint(name: str, *, progress: bool = True, trust_remote_code: bool = False) -> Checkpoint:
    """The checkpoint of a folder or Hub id. Code that the checkpoint brings is run only with `trust_remote_code`.

    Raises ValueError for an adapter, damaged weights, an unknown class, or a link to another place. Raises OSError if
    there is no checkpoint, and ImportError if sentence-transformers is needed and missing.
    """
    if not progress:
        logging.disable_progress_bar()
    path = local(name)
    name = name if path is None else str(path)
    if path is not None and path.is_dir():
        if (path / "adapter_config.json").is_file():
            raise ValueError(
                f"{name} is an adapter of PEFT, not a model. Merge it into its base (PeftModel.merge_and_unload(), "
                "then save_pretrained), and give the merged folder"
            )
        processor_files(path)  # a link among these is refused before the work
    try:
        if _file_of(name, MODULES_FILE) is not None:
            network = _read_sentence_network(name, trust_remote_code=trust_remote_code)
        else:
            network = load_checkpoint(name, trust_remote_code=trust_remote_code)
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"the weights of {name} are damaged: {error}; copy or download the checkpoint again"
        ) from error
    return Checkpoint(name, network, trust_remote_code)


def _file_of(name: str, file: str) -> Path | None:
    """The path of a file in a folder or a Hub repository; None where there is none."""
    path = local(name)
    if path is not None:
        return path / file if (path / file).is_file() else None
    try:
        return Path(hf_hub_download(name, file))
    except (EntryNotFoundError, LocalEntryNotFoundError):
        return None


def _read_sentence_network(name: str, *, trust_remote_code: bool = False) -> nn.Module:
    """The network of sentence-transformers in a folder or of a Hub id.

    Raises ImportError without sentence-transformers, and ValueError for a network that is not read here.
    """
    package = require("sentence_transformers", "sentence-transformers")
    kind, network = sentence_class(_file_of(name, SENTENCE_SETTINGS)), None
    if kind in SENTENCE_CLASSES:
        options = {"device": "cpu", "trust_remote_code": trust_remote_code, "model_kwargs": {"use_safetensors": True}}
        network = from_pretrained(getattr(package, kind), name, **options).eval()
    encoder = getattr(next(iter(network.children())), "auto_model", None) if network else None
    if network is None or not isinstance(encoder, PreTrainedModel):
        raise ValueError(
            f"{name} is a {kind[:80]}. hf-lgelu reads {', '.join(SENTENCE_CLASSES)} whose first module is an encoder "
            "of transformers. Load this one in Python: hf_lgelu.convert_to_relu(model, texts, "
            "options=ConversionConfig(data_collator=model.preprocess))"
        )
    return network


def push(folder: Path, repo_id: str | None, *, private: bool, tell: Callable[[str], None]) -> None:
    """Push a finished folder if a repository was named, and say where it is."""
    if repo_id is not None:
        tell(f"Pushed: {push_to_hub(folder, repo_id, private=private or None).commit_url}")
