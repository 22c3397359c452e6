"""Loading a checkpoint as the model class that it names, and the files that belong to a model beside its weights."""

import os
import shutil
from pathlib import Path

import transformers
from huggingface_hub import snapshot_download
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_lgelu.models.mlp import MLPForClassification
from hf_lgelu.models.rebuild import from_pretrained

PROCESSOR_FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken"),
    *("preprocessor_config.json", "processor_config.json", "image_processor*.json", "video_preprocessor_config.json"),
    *("feature_extractor*.json", "audio_tokenizer_config.json", "chat_template.*", "chat_templates/*"),
)
"""Names under which tokenizers and processors of transformers save themselves, as patterns."""


def load_checkpoint(name_or_path: str | os.PathLike, *, revision: str | None = None) -> PreTrainedModel:
    """The model of a folder or Hub id, as the class that its config names, with every λ-GELU in its place.

    Weights are read from safetensors only, and no code of the checkpoint is run.

    Raises:
        ValueError: the config names no class that transformers or this package has, or one that comes as code.
        OSError: there is no checkpoint, or none in safetensors.
    """
    # Left out, transformers would ask at the terminal whether to run what the checkpoint carries.
    config = AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=False)
    return from_pretrained(model_class(config), name_or_path, revision=revision, use_safetensors=True).eval()


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The first of the config's `architectures`; ValueError if neither transformers nor this package has it."""
    names = config.architectures or ()
    ours = {MLPForClassification.__name__: MLPForClassification}
    for name in names:
        found = ours.get(name) or getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    raise ValueError(
        f"the checkpoint's config names the architectures {', '.join(names) or 'none'}, and transformers "
        f"{transformers.__version__} has none of them; load the model yourself and pass it to the function"
    )


def copy_processor_files(source: str | os.PathLike, target: str | os.PathLike) -> list[str]:
    """Copy the tokenizer's and processor's files of a folder or Hub id, byte for byte; returns their names."""
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(source), allow_patterns=list(PROCESSOR_FILES)))
    files = sorted({path for pattern in PROCESSOR_FILES for path in folder.glob(pattern) if path.is_file()})
    for file in files:
        copy = Path(target) / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    return [file.relative_to(folder).as_posix() for file in files]
