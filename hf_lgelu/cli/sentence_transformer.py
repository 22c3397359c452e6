"""A checkpoint of sentence-transformers: a folder of modules, of which one is an encoder of transformers.

What is converted is the encoder. Everything else in the folder (pooling, dense layers, prompts, the tokenizer) goes
along byte for byte. Networks are compared by their embeddings, cross-encoders by the scores of their encoder's head.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.constants import CONFIG_NAME, REPOCARD_NAME
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_lgelu.environment import require
from hf_lgelu.export.hub.loading import (
    MODULES_FILE,
    SENTENCE_CLASSES,
    sentence_class,
    sentence_modules,
    sentence_settings,
)
from hf_lgelu.files import local, require_inside
from hf_lgelu.models.checkpoint import load_checkpoint, save_checkpoint
from hf_lgelu.models.loading import from_pretrained

# Of the encoder, written anew; and other forms of the whole network, which would still be the smooth one.
_ENCODERS_OWN = (CONFIG_NAME, "model*.safetensors", "model.safetensors.index.json", "pytorch_model*")
# Where sentence-transformers keeps how many tokens an encoder is given, by the class that wrote it.
_WRITERS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_SETTINGS = tuple(f"sentence_{writer}_config.json" for writer in _WRITERS)
_WEIGHTS = ("*.safetensors", "*.bin", "*.onnx", "*.onnx_data", "*.onnx.data", "*.h5", "*.msgpack", "*.ot", "*.gguf")
_OTHER_FORMS = ("onnx", "openvino", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "coreml")


class SentenceEmbedder(nn.Module):
    """An encoder of transformers and the modules behind it (pooling, dense layers, normalization); none is copied.

    Its output is {"sentence_embedding": (N, D)}. Each module behind takes a dict of features and adds to it.
    """

    main_input_name = "input_ids"

    def __init__(self, encoder: PreTrainedModel, behind: Sequence[nn.Module]) -> None:
        super().__init__()
        self.encoder = encoder
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
    """A folder of sentence-transformers, a network of one of SENTENCE_CLASSES.

    `encoder` is where in it the encoder lies, "" where that is the folder itself. `longest` is how many tokens of a
    text the encoder is given; None leaves that to the tokenizer. `prompt` is put before every text, or before the first
    of a pair.
    """

    path: Path
    encoder: str
    longest: int | None = None
    network_class: str = SENTENCE_CLASSES[0]
    prompt: str = ""

    @property
    def encoder_path(self) -> Path:
        """Folder of the encoder's config, weights and tokenizer."""
        return self.path / self.encoder

    def load(self, *, trust_remote_code: bool = False) -> SentenceEmbedder | PreTrainedModel:
        """The network in the folder; of a cross-encoder the encoder, whose logits are the scores.

        Raises ImportError without sentence-transformers, and ValueError where the first module is no encoder.
        """
        package = require("sentence_transformers", "sentence-transformers")
        if self.network_class == "CrossEncoder":
            return load_checkpoint(self.encoder_path, trust_remote_code=trust_remote_code)
        kind = getattr(package, self.network_class)
        whole = from_pretrained(kind, str(self.path), device="cpu", trust_remote_code=trust_remote_code)
        first, *behind = whole.children()
        encoder = getattr(first, "auto_model", None)
        if not isinstance(encoder, PreTrainedModel):
            raise ValueError(
                f"the first module of {self.path}, {type(first).__name__}, is no encoder of transformers (but static "
                "embeddings, a router or the like): there are no gates in it to exchange"
            )
        # Not as its config says: of an encoder that was a language model that is often still the whole one's class.
        loaded = load_checkpoint(self.encoder_path, kind=type(encoder), trust_remote_code=trust_remote_code)
        return SentenceEmbedder(loaded, behind).eval()

    def copy_rest(self, target: Path) -> None:
        """Copy the files into `target`, without the card, the encoder's own files and other forms of the weights.

        Raises ValueError for a link that leads out of the folder.
        """
        modules = [self.path / module["path"] for module in sentence_modules(self.path)]

        def left_out(place: str, names: list[str]) -> set[str]:
            folder, patterns = Path(place), [".*"]
            # Where weights are the encoder's, in whatever form: those of other modules lie in folders of their own.
            if folder in (self.path, self.encoder_path):
                patterns += [*_OTHER_FORMS, *_WEIGHTS, "openvino_*", REPOCARD_NAME]
            if folder == self.encoder_path:
                patterns += _ENCODERS_OWN
            found = shutil.ignore_patterns(*patterns)(place, names)
            for path in (folder / name for name in names if name not in found):
                require_inside(path, self.path)
                # Weights that the list of modules does not name: what was exported there before, and the like.
                is_module = folder != self.path or any(path in (module, *module.parents) for module in modules)
                if path.is_dir() and not is_module and any(any(path.rglob(pattern)) for pattern in _WEIGHTS):
                    found.add(path.name)
            return found

        shutil.copytree(self.path, target, ignore=left_out, copy_function=shutil.copyfile, dirs_exist_ok=True)

    def save(self, encoder: PreTrainedModel, target: Path) -> None:
        """Write the folder anew, with another encoder. Raises what `save_checkpoint` and `copy_rest` raise."""
        self.copy_rest(target)
        save_checkpoint(encoder, target / self.encoder)


def find_sentence_folder(name: str) -> SentenceFolder | None:
    """The folder or Hub id `name` as a checkpoint of sentence-transformers; None where it is of another kind.

    Raises ValueError for a class that is not among SENTENCE_CLASSES, or a cross-encoder that computes its scores behind
    the encoder.
    """
    path = local(name)
    if path is None:
        try:
            hf_hub_download(name, MODULES_FILE)
        except (EntryNotFoundError, LocalEntryNotFoundError):
            return None
        # Of the encoder safetensors alone are read; older modules behind it have their weights in pytorch_model.bin.
        others = ["pytorch_model*", "0_*/pytorch_model*", "*.onnx*", "*.gguf", "*.h5", "*.msgpack", "*.ot"]
        forms = [f"{form}*" for form in _OTHER_FORMS]
        path = Path(snapshot_download(name, ignore_patterns=[*forms, *others, "openvino_*"]))
    if not (path / MODULES_FILE).is_file():
        return None
    network_class, modules = sentence_class(path), sentence_modules(path)
    first = next((module["path"] for module in modules), "")
    if network_class == "CrossEncoder" and len(modules) > 1:
        behind = ", ".join(module["path"] for module in modules[1:])
        raise ValueError(
            f"{name} is a cross-encoder with modules behind its encoder ({behind}), and read from folders are those "
            "whose encoder gives the scores. Load it and give the model itself: "
            "hf_lgelu.convert_to_relu(model, pairs, options=ConversionConfig(data_collator=model.preprocess))"
        )
    # How many tokens the encoder is given, in a file beside it whose name its class decides.
    file = next((path / first / name for name in _SETTINGS if (path / first / name).is_file()), None)
    settings = json.loads(file.read_text(encoding="utf-8")) if file is not None else None
    longest = settings.get("max_seq_length") if isinstance(settings, dict) else None
    whole = sentence_settings(path)
    prompts = whole.get("prompts")
    prompt = prompts.get(whole.get("default_prompt_name")) if isinstance(prompts, dict) else None
    return SentenceFolder(path, first, int(longest) if longest else None, network_class, prompt or "")
