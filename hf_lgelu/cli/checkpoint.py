"""The checkpoint of a command: loaded, refused, saved and pushed.

A checkpoint of sentence-transformers is a folder of modules, of which one is an encoder of transformers. The encoder is
converted. sentence-transformers loads the folder and says how texts are read. The settings, the tokenizer and the other
modules (pooling, dense layers) are copied byte for byte. Networks are compared by their embeddings, and cross-encoders
by the scores of the encoder's head.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.constants import CONFIG_NAME
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from hf_lgelu.environment import require
from hf_lgelu.export.checkpoint_facts import MODULES_FILE, SENTENCE_CLASSES, sentence_class, sentence_modules
from hf_lgelu.export.onnx_export import ONNX_FILE
from hf_lgelu.export.onnx_network import OnnxNetwork
from hf_lgelu.export.push import push_to_hub
from hf_lgelu.files import local, require_inside, require_there
from hf_lgelu.models.checkpoint import load_checkpoint, processor_files, save_checkpoint
from hf_lgelu.models.loading import from_pretrained
from hf_lgelu.networks.sites import LEARNED_KINDS, find_sites, sites_in_words

_SETTINGS = ("*.json", "*.txt", "*.py", "*.model", "*.jinja", "*.tiktoken", "*.spm")  # with the files of tokenizers


class SentenceEmbedder(nn.Module):
    """An encoder of transformers and the modules after it (pooling, dense layers, normalization), not copied.

    The output is {"sentence_embedding": (N, D)}. Each module after the encoder takes a dict of features and adds to it.
    """

    main_input_name = "input_ids"

    def __init__(self, encoder: PreTrainedModel, behind: Sequence[nn.Module], max_seq_length: int | None) -> None:
        super().__init__()
        self.encoder, self.max_seq_length = encoder, max_seq_length
        self.behind = nn.ModuleList(behind)

    @property
    def config(self) -> PreTrainedConfig:
        """The encoder's config."""
        return self.encoder.config

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        tensors = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        features = {**tensors, "token_embeddings": self.encoder(**tensors)[0]}
        for module in self.behind:
            features = module(features)
        return {"sentence_embedding": features["sentence_embedding"]}


@dataclass(frozen=True)
class SentenceFolder:
    """A folder of sentence-transformers with a network of one of SENTENCE_CLASSES.

    `network` is the embedder, or of a cross-encoder the encoder, whose logits are the scores. `encoder` is the place of
    the encoder in the folder; "" is the folder itself. `longest` is the most tokens of a text. `prompt` is put before
    every text, or before the first text of a pair.
    """

    path: Path
    encoder: str
    network: SentenceEmbedder | PreTrainedModel
    network_class: str
    longest: int | None
    prompt: str

    @property
    def encoder_path(self) -> Path:
        """Folder of the encoder's config, weights and tokenizer."""
        return self.path / self.encoder

    def copy_rest(self, target: Path) -> None:
        """Copy the settings and the other modules into `target`, without the encoder's config and weights.

        Raises ValueError for a link that leads out of the folder.
        """
        own = {self.path, self.encoder_path}
        files = {file for place in own for pattern in _SETTINGS for file in place.glob(pattern)}
        files -= {self.encoder_path / CONFIG_NAME, *self.encoder_path.glob("*.index.json")}
        for place in {self.path / module["path"] for module in sentence_modules(self.path)} - own:
            files |= {file for file in place.rglob("*") if file.is_file()}
        for file in sorted(file for file in files if not file.name.startswith(".")):
            require_inside(file, self.path)
            copy = target / file.relative_to(self.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)

    def save(self, encoder: PreTrainedModel, target: Path) -> None:
        """Write the folder with another encoder. Raises the errors of `save_checkpoint` and `copy_rest`."""
        self.copy_rest(target)
        save_checkpoint(encoder, target / self.encoder)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint, with the folder, Hub id or ONNX file that was given as its name.

    `network` is the model of transformers, a `SentenceEmbedder` of a sentence encoder, or an `OnnxNetwork`. `sentences`
    is the folder of a checkpoint of sentence-transformers.
    """

    name: str
    network: nn.Module
    sentences: SentenceFolder | None = None
    trust_remote_code: bool = False

    @property
    def model(self) -> Any:
        """The model of transformers in the checkpoint, or the ONNX network."""
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
        if isinstance(network, OnnxNetwork):
            network.save(folder / ONNX_FILE)
        elif self.sentences is not None:
            self.sentences.save(encoder, folder)
        else:
            save_checkpoint(encoder, folder, source=self.name)


def read_checkpoint(name: str, *, progress: bool = True, trust_remote_code: bool = False) -> Checkpoint:
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
            return Checkpoint(name, sentences.network, sentences, trust_remote_code)
        return Checkpoint(name, load_checkpoint(name, trust_remote_code=trust_remote_code), None, trust_remote_code)
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"the weights of {name} are damaged: {error}; copy or download the checkpoint again"
        ) from error


def read_sentence_folder(name: str, *, trust_remote_code: bool = False) -> SentenceFolder | None:
    """The checkpoint of sentence-transformers in a folder or of a Hub id; None for a checkpoint of another kind.

    Raises ImportError without sentence-transformers, and ValueError for a network that no folder gives here.
    """
    path = local(name)
    if path is None:
        try:
            modules = sentence_modules(Path(hf_hub_download(name, MODULES_FILE)).parent)
        except (EntryNotFoundError, LocalEntryNotFoundError):
            return None
        # The encoder is read only from safetensors; other modules may have pytorch_model.bin.
        wanted = [f"{module['path']}/*" for module in modules[1:]]
        path = Path(snapshot_download(name, allow_patterns=[*_SETTINGS, "*.safetensors", *wanted]))
    if not (path / MODULES_FILE).is_file():
        return None
    package = require("sentence_transformers", "sentence-transformers")
    network_class, modules = sentence_class(path), sentence_modules(path)
    is_cross = network_class == "CrossEncoder"
    whole, children, encoder = None, [], None
    if network_class in SENTENCE_CLASSES and not (is_cross and len(modules) > 1):
        kind = getattr(package, network_class)
        whole = from_pretrained(kind, str(path), device="cpu", trust_remote_code=trust_remote_code)
        children = list(whole.children())
        encoder = getattr(children[0], "auto_model", None)
    if whole is None or not isinstance(encoder, PreTrainedModel):
        raise ValueError(
            f"{name} is a {network_class[:80]} of {len(modules)} modules. hf-lgelu reads {', '.join(SENTENCE_CLASSES)} "
            "whose first module is an encoder of transformers; a CrossEncoder has no other module. Load this one in "
            "Python: hf_lgelu.convert_to_relu(model, texts, options=ConversionConfig(data_collator=model.preprocess))"
        )
    place = modules[0]["path"]
    # The config of an encoder that was a language model often still names the language model's class.
    loaded = load_checkpoint(path / place, kind=type(encoder), trust_remote_code=trust_remote_code)
    network = loaded if is_cross else SentenceEmbedder(loaded, children[1:], whole.max_seq_length).eval()
    prompt = whole.prompts.get(whole.default_prompt_name) or ""
    return SentenceFolder(path, place, network, network_class, whole.max_seq_length, prompt)


def require_hardness(checkpoint: Checkpoint) -> None:
    """Raise ValueError unless the checkpoint has a λ-GELU; the message says what to do instead."""
    kinds = {site.kind for site in find_sites(checkpoint.model)}
    if kinds & set(LEARNED_KINDS):
        return
    if kinds:
        raise ValueError(
            f"{checkpoint.name} has no λ-GELU: its gates are {sites_in_words(checkpoint.model)}. `hf-lgelu convert` "
            "makes a ReLU network of it without training; hf_lgelu.LambdaGELUTrainer trains it as lambda_gelu or "
            "lambda_silu"
        )
    _refuse_relu(checkpoint)
    raise ValueError(
        f"{checkpoint.name} has no gate that an export could exchange; hf_lgelu.find_smooth_calls lists what it "
        "computes smoothly"
    )


def require_gates(checkpoint: Checkpoint) -> None:
    """Raise ValueError for a ReLU network. Gates that a forward calls as functions are found when the network runs.

    Raise it also for a smooth gate in a module after a sentence encoder, because these modules are copied unchanged.
    """
    sites = find_sites(checkpoint.network)
    if not sites:
        _refuse_relu(checkpoint)
    behind = [site.name for site in sites if checkpoint.embeds and not site.name.startswith("encoder.")]
    if behind:
        raise ValueError(
            f"{checkpoint.name} has smooth gates in modules after its encoder ({', '.join(behind)}), and this command "
            "converts only the encoder: call hf_lgelu.convert_to_relu on the SentenceTransformer, and save the result"
        )


def _refuse_relu(checkpoint: Checkpoint) -> None:
    relus = sum(isinstance(module, nn.ReLU | nn.ReLU6 | nn.LeakyReLU) for module in checkpoint.network.modules())
    if relus:
        raise ValueError(
            f"{checkpoint.name} is a ReLU network already ({relus} ReLU modules, no smooth gate): nothing to do"
        )


def push(folder: Path, repo_id: str | None, *, private: bool, tell: Callable[[str], None]) -> None:
    """Push a finished folder if a repository was named, and say where it is."""
    if repo_id is not None:
        try:
            tell(f"Pushed: {push_to_hub(folder, repo_id, private=private or None).commit_url}")
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(
                f"{folder} is complete, but not pushed: call hf_lgelu.push_to_hub({str(folder)!r}, {repo_id!r})"
            ) from interrupt
