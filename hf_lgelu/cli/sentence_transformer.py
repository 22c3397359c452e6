"""A checkpoint of sentence-transformers: a folder of modules, of which one is an encoder of transformers.

The encoder is converted. sentence-transformers loads the folder and says how texts are read. The settings, the
tokenizer and the other modules (pooling, dense layers) are copied byte for byte. Networks are compared by their
embeddings, and cross-encoders by the scores of the encoder's head.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.constants import CONFIG_NAME
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_lgelu.environment import require
from hf_lgelu.export.checkpoint_facts import MODULES_FILE, SENTENCE_CLASSES, sentence_class, sentence_modules
from hf_lgelu.files import local, require_inside
from hf_lgelu.models.checkpoint import load_checkpoint, save_checkpoint
from hf_lgelu.models.loading import from_pretrained

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
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        features = {**given, "token_embeddings": self.encoder(**given)[0]}
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
