"""Checkpoints: the facts that decide what loads one, loading, saving, and the files next to the weights."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.constants import CONFIG_NAME
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    TimmWrapperForImageClassification,
    TimmWrapperModel,
)
from transformers.modelcard import TASK_MAPPING
from transformers.utils import CHAT_TEMPLATE_DIR, logging

from hf_lgelu.files import local, require_inside, require_there
from hf_lgelu.models.loading import from_pretrained
from hf_lgelu.models.mlp import MLPForClassification
from hf_lgelu.models.record import RECORD_KEY, VARIANT, loads_elsewhere
from hf_lgelu.networks.outputs import agree, outputs_of
from hf_lgelu.networks.run import Inputs

PROCESSOR_FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken"),
    # of single families: Marian, BERTweet and PhoBERT, ProphetNet, LUKE, BARTpho, GPT-NeoX Japanese, MyT5, RoCBert,
    # Whisper
    *("*.spm", "target_vocab.json", "bpe.codes", "prophetnet.tokenizer", "entity_vocab.json", "dict.txt", "emoji.json"),
    *("byte_maps.json", "word_shape.json", "word_pronunciation.json", "normalizer.json"),
    *("preprocessor_config.json", "processor_config.json", "image_processor*.json", "video_preprocessor_config.json"),
    *("tokenization_*.py", "processing_*.py", "image_processing_*.py"),  # code of the checkpoint
    *("*tekken*.json", "*_tokenizer/*"),  # Mistral's own; processors with a second tokenizer (InstructBLIP)
    *("feature_extractor*.json", "audio_tokenizer_config.json", "chat_template.*", f"{CHAT_TEMPLATE_DIR}/*"),
)
"""The patterns of the file names under which tokenizers and processors of transformers save themselves."""

MLP_CLASS = MLPForClassification.__name__
SENTENCE_CLASSES = ("SentenceTransformer", "SparseEncoder", "CrossEncoder")
"""Of sentence-transformers: embeddings, embeddings over a vocabulary, scores of pairs."""

ONNX_CLASS = "OnnxNetwork"

MODULES_FILE = "modules.json"
"""What a checkpoint of sentence-transformers has: the list of its modules and their folders."""

SENTENCE_SETTINGS = "config_sentence_transformers.json"
"""Where a checkpoint of sentence-transformers has the name of its class."""

# Classes that transformers' table does not have.
_OTHER_TASKS = {
    MLP_CLASS: "tabular-classification",
    "SentenceTransformer": "sentence-similarity",
    "SparseEncoder": "feature-extraction",
    "CrossEncoder": "text-ranking",
    "TimmWrapperForImageClassification": "image-classification",
}

logger = logging.get_logger(__name__)

_HEADS = frozenset({"cls", "pooler", "lm_head", "classifier", "score", "qa_outputs"})


def load_checkpoint(name_or_path: str | os.PathLike, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a folder or Hub id, of the class that its config names, with every λ-GELU in its place.

    Weights are read from safetensors only. Code of the checkpoint runs only with `trust_remote_code`. Raises ValueError
    for a config that names no class of transformers or of this package. Raises it also if the tensors are not the
    model's, except for a head that the class does not have. Raises OSError if there is no checkpoint in safetensors.
    """
    require_there(str(name_or_path))
    name_or_path = local(str(name_or_path)) or name_or_path
    path = Path(name_or_path)
    missing = [name for name in (CONFIG_NAME, "*.safetensors") if not any(path.glob(name))]
    if path.exists() and missing:
        held = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) if path.is_dir() else ""
        what = f"a folder with {held or 'no file'}" if path.is_dir() else "a file"
        network = next(path.glob("*.onnx"), None)
        advice = "the folder that save_pretrained wrote" if network is None else f"its ONNX network by name, {network}"
        raise FileNotFoundError(
            f"{path} is no checkpoint, but {what}, and has no {' and no '.join(missing)}. Give {advice}"
        )
    try:
        # Without this argument, transformers would ask at the terminal whether to run the checkpoint's code.
        config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
        named, given = getattr(config, "auto_map", None), {}
        own_code = {
            name: str(code)
            for name, code in (named.items() if isinstance(named, dict) else ())
            if name.startswith("AutoModel") and hasattr(transformers, name)
        }
        if trust_remote_code and own_code:
            saved = [name for name, code in own_code.items() if code.rpartition(".")[2] in (config.architectures or ())]
            loader, given = getattr(transformers, [*saved, *own_code][0]), {"trust_remote_code": True}
        else:
            loader = model_class(config)
            if own_code and loader is not MLPForClassification:
                logger.warning(
                    f"{name_or_path} brings code of its own ({', '.join(own_code.values())}), which is not run: what "
                    f"is loaded, compared and saved is transformers' {loader.__name__}, which may compute something "
                    "else (`trust_remote_code` runs it)"
                )
        model, found = from_pretrained(loader, name_or_path, use_safetensors=True, output_loading_info=True, **given)
    except (StrictDataclassError, KeyError) as error:  # a field's type, an unknown activation
        raise ValueError(
            f"the {CONFIG_NAME} of {name_or_path} is none that transformers {transformers.__version__} takes: {error}. "
            "Correct it there, or load the model yourself and pass it to the function"
        ) from error
    model.eval()
    # A missing part would be random, and transformers only warns. Published checkpoints hold tensors of other heads.
    modules = dict(model.named_modules())
    owners = {name: name.rpartition(".")[0] for name in found["unexpected_keys"]}
    unexpected = [name for name, owner in owners.items() if _HEADS.isdisjoint(owner.split(".")) or owner in modules]
    told = [
        f"{len(names)} {kind} ({', '.join(sorted(names)[:4])}{', ...' if len(names) > 4 else ''})"
        for kind, names in (("missing", found["missing_keys"]), ("unexpected", unexpected))
        if names
    ]
    if told:
        raise ValueError(
            f"{name_or_path} does not hold the tensors of {type(model).__name__}: {' and '.join(told)}. What is "
            "missing would be random. Save the whole model with save_pretrained, or look at its config.json"
        )
    # An export must not name code that the config names but that was not run.
    if hasattr(model.config, "auto_map") and not model.is_remote_code():
        del model.config.auto_map
    return model


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The first known class of the config's `architectures`; ValueError if transformers and this package know none."""
    names = config.architectures or ()
    if not names and config.model_type == "timm_wrapper":  # as saved by timm, also in its repositories on the Hub
        return TimmWrapperForImageClassification if config.num_labels else TimmWrapperModel
    for name in names:
        found = MLPForClassification if name == MLPForClassification.__name__ else getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    raise ValueError(
        f"the checkpoint's config names the architectures {', '.join(names) or 'none'}, and transformers "
        f"{transformers.__version__} has none of them; load the model yourself and pass it to the function, or run the "
        "code that the checkpoint brings, if you trust it (`trust_remote_code`)"
    )


def save_checkpoint(model: PreTrainedModel, folder: str | os.PathLike, source: str | os.PathLike | None = None) -> None:
    """Save a model with the tokenizer or image processor of the folder or Hub id `source`.

    If no config key can refuse a load without this package, the name of the weights' file does. Raises OSError if the
    disk is full.
    """
    try:
        model.save_pretrained(folder, variant=VARIANT if loads_elsewhere(model.config) else None)
    except SafetensorError as error:  # safetensors' error for a system error
        raise OSError(f"{folder} could not be written, and is not complete: {error}") from error
    if source is not None:
        copy_processor_files(source, folder)


def save_and_compare(
    model: PreTrainedModel, folder: str | os.PathLike, inputs: Inputs, source: str | os.PathLike | None
) -> None:
    """`save_checkpoint`. Raises RuntimeError unless plain transformers loads the same `model` from the folder."""
    save_checkpoint(model, folder, source)
    loaded = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True)
    require_same_model(model, loaded.to(model.device), inputs)


def require_same_model(model: nn.Module, loaded: nn.Module, inputs: Inputs) -> None:
    """Raise RuntimeError unless a saved and loaded model has the same tensors and, up to rounding, the same outputs."""
    tensors, others = model.state_dict(), loaded.state_dict()
    both = sorted(tensors.keys() & others.keys())
    retyped = [name for name in both if tensors[name].dtype != others[name].dtype]
    if retyped:
        name = retyped[0]
        raise RuntimeError(
            f"the saved model, loaded again, has {len(retyped)} tensors of another dtype ({name}: "
            f"{tensors[name].dtype} here, {others[name].dtype} there): transformers loads a model in one dtype. "
            "Give it in one, as from_pretrained(..., dtype=...) would"
        )
    differing = [name for name in both if not torch.equal(tensors[name].cpu(), others[name].cpu())]
    differing += tensors.keys() ^ others.keys()
    if differing:
        raise RuntimeError(f"the saved model, loaded again, has another {', '.join(sorted(differing)[:4])}")
    before, after = outputs_of(model, inputs), outputs_of(loaded, inputs)
    if not before or not agree(before, after):
        raise RuntimeError("the saved model, loaded again, gives other outputs than rounding explains, or none")


def copy_processor_files(source: str | os.PathLike, target: str | os.PathLike) -> list[str]:
    """Copy the tokenizer's and processor's files of a folder or Hub id, byte for byte. Returns the files' names."""
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(source), allow_patterns=list(PROCESSOR_FILES)))
    files = processor_files(folder)
    for file in files:
        copy = Path(target) / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    return [file.relative_to(folder).as_posix() for file in files]


def processor_files(folder: Path) -> list[Path]:
    """The tokenizer's and processor's files in a folder, sorted. Raises ValueError for a link that leads out of it."""
    files = sorted({path for pattern in PROCESSOR_FILES for path in folder.glob(pattern) if path.is_file()})
    for file in files:
        require_inside(file, folder)
    return files


@dataclass(frozen=True)
class CheckpointFacts:
    """The facts of a checkpoint that decide how it is loaded.

    `needs_package` says that the config alone does not build the network (`from_pretrained`). A checkpoint of
    sentence-transformers is of one of SENTENCE_CLASSES, whatever its encoder.
    """

    model_class: str
    needs_package: bool = False

    @property
    def is_of_sentences(self) -> bool:
        """Whether sentence-transformers loads it."""
        return self.model_class in SENTENCE_CLASSES

    @property
    def library(self) -> str:
        """The Hub's name of the library that loads it."""
        other = "sentence-transformers" if self.is_of_sentences else "transformers"
        return {ONNX_CLASS: "onnx", MLP_CLASS: "hf_lgelu"}.get(self.model_class, other)

    @property
    def task(self) -> str | None:
        """The Hub's name of what models of this class do; None for a class that is not known here."""
        # Of several tasks the last, as on the cards of transformers' Trainer: BART is also in the one of masks.
        for task, classes in reversed(TASK_MAPPING.items()):
            if any(self.model_class in ([name] if isinstance(name, str) else name) for name in classes.values()):
                return task
        return _OTHER_TASKS.get(self.model_class)


def facts_of_folder(folder: str | os.PathLike) -> CheckpointFacts:
    """The facts of a saved model, from its config.json. Raises FileNotFoundError, or ValueError for no class in it."""
    config = json.loads((Path(folder) / CONFIG_NAME).read_text(encoding="utf-8"))
    name = str((config.get("architectures") or [""])[0])
    if (Path(folder) / MODULES_FILE).is_file():
        name = sentence_class(Path(folder) / SENTENCE_SETTINGS)
    if not name.isidentifier():  # it becomes Python on the card
        raise ValueError(f"{folder} names no class of a model, but {name[:80]!r}; use save_pretrained")
    return CheckpointFacts(name, needs_package=RECORD_KEY in config)


def sentence_class(settings: Path | None) -> str:
    """The class that the settings of a checkpoint name: as in sentence-transformers SentenceTransformer by default."""
    named = json.loads(settings.read_text(encoding="utf-8")) if settings is not None and settings.is_file() else {}
    return str(named.get("model_type", SENTENCE_CLASSES[0]))
