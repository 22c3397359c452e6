"""The checkpoint of a command: loaded, refused, saved and pushed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_lgelu.cli.sentence_transformer import SentenceEmbedder, SentenceFolder, read_sentence_folder
from hf_lgelu.files import local, require_there
from hf_lgelu.models.checkpoint import load_checkpoint, processor_files, save_checkpoint
from hf_lgelu.networks.sites import LEARNED_KINDS, find_sites, sites_in_words


@dataclass(frozen=True)
class GivenCheckpoint:
    """A loaded checkpoint, with the folder or Hub id that was given as its name.

    `network` is the model of transformers. Of a sentence encoder, it is a `SentenceEmbedder`. `sentences` is the folder
    of a checkpoint of sentence-transformers.
    """

    name: str
    network: PreTrainedModel | SentenceEmbedder
    sentences: SentenceFolder | None = None
    trust_remote_code: bool = False

    @property
    def model(self) -> PreTrainedModel:
        """The model of transformers in the checkpoint."""
        return self.network.encoder if isinstance(self.network, SentenceEmbedder) else self.network

    @property
    def kind(self) -> str:
        """The name of the class by which its library loads the checkpoint."""
        return type(self.model).__name__ if self.sentences is None else self.sentences.network_class

    @property
    def embeds(self) -> bool:
        """Whether the network gives embeddings: it is of sentence-transformers, and no cross-encoder."""
        return isinstance(self.network, SentenceEmbedder)

    @property
    def processors(self) -> str:
        """The folder or Hub id of the tokenizer or image processor."""
        return self.name if self.sentences is None else str(self.sentences.encoder_path)

    def save(self, network: nn.Module, folder: Path) -> None:
        """Write the changed `network` as a checkpoint of the same kind, with the tokenizer and other files."""
        encoder: Any = network.encoder if isinstance(network, SentenceEmbedder) else network
        if self.sentences is not None:
            self.sentences.save(encoder, folder)
        else:
            save_checkpoint(encoder, folder, source=self.name)


def read_checkpoint(name: str, *, progress: bool = True, trust_remote_code: bool = False) -> GivenCheckpoint:
    """The checkpoint of a folder or Hub id. Code that the checkpoint brings is run only with `trust_remote_code`.

    Raises FileNotFoundError if there is no checkpoint. Raises ValueError for an adapter, damaged weights, an unknown
    class, or a link to another place. Raises ImportError if sentence-transformers is needed and missing.
    """
    if not progress:
        logging.disable_progress_bar()
    require_there(name)
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
        sentences = read_sentence_folder(name, trust_remote_code=trust_remote_code)
        if sentences is not None:
            return GivenCheckpoint(name, sentences.network, sentences, trust_remote_code)
        return GivenCheckpoint(
            name, load_checkpoint(name, trust_remote_code=trust_remote_code), None, trust_remote_code
        )
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"the weights of {name} are damaged: {error}; copy or download the checkpoint again"
        ) from error


def require_hardness(given: GivenCheckpoint) -> None:
    """Raise ValueError unless the checkpoint has a λ-GELU; the message says what to do instead."""
    kinds = {site.kind for site in find_sites(given.model)}
    if kinds & set(LEARNED_KINDS):
        return
    if kinds:
        raise ValueError(
            f"{given.name} has no λ-GELU: its gates are {sites_in_words(given.model)}. `hf-lgelu convert` makes a "
            "ReLU network of it without training; hf_lgelu.LambdaGELUTrainer trains it as lambda_gelu or lambda_silu"
        )
    _refuse_relu(given)
    raise ValueError(
        f"{given.name} has no gate that an export could exchange; hf_lgelu.find_smooth_calls lists what it computes "
        "smoothly"
    )


def require_gates(given: GivenCheckpoint) -> None:
    """Raise ValueError for a ReLU network. Gates that a forward calls as functions are found when the network runs.

    Raise it also for a smooth gate in a module after a sentence encoder, because these modules are copied unchanged.
    """
    sites = find_sites(given.network)
    if not sites:
        _refuse_relu(given)
    behind = [site.name for site in sites if given.embeds and not site.name.startswith("encoder.")]
    if behind:
        raise ValueError(
            f"{given.name} has smooth gates in modules after its encoder ({', '.join(behind)}), and this command "
            "converts only the encoder: call hf_lgelu.convert_to_relu on the SentenceTransformer, and save the result"
        )


def _refuse_relu(given: GivenCheckpoint) -> None:
    relus = sum(isinstance(module, nn.ReLU | nn.ReLU6 | nn.LeakyReLU) for module in given.network.modules())
    if relus:
        raise ValueError(
            f"{given.name} is a ReLU network already ({relus} ReLU modules, no smooth gate): nothing to do"
        )


def push(folder: Path, repo_id: str | None, *, private: bool, tell: Callable[[str], None]) -> None:
    """Push a finished folder if a repository was named, and say where it is."""
    if repo_id is not None:
        from hf_lgelu.export.push import push_to_hub

        try:
            tell(f"Pushed: {push_to_hub(folder, repo_id, private=private or None).commit_url}")
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(
                f"{folder} is complete, but not pushed: call hf_lgelu.push_to_hub({str(folder)!r}, {repo_id!r})"
            ) from interrupt
