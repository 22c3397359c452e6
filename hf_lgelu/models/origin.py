"""Where a model was loaded from: transformers keeps it as `name_or_path`, and PEFT names it as an adapter's base."""

import os
from typing import Any

from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from hf_lgelu.models.config_keys import gate_names


def forget_checkpoint(model: nn.Module) -> None:
    """For a network that is another one than that of its checkpoint: an adapter trained on it must not name that.

    Changes `model` in place.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.name_or_path = module.config._name_or_path = ""


def written_gates(model: PreTrainedModel) -> set[str] | None:
    """The names of λ-gates in the file of the config that a model was loaded with; None where it is not found again.

    The config that the model was built from may have been given by hand.
    """
    text = written_config(model)
    return None if text is None else gate_names(text)


def written_config(model: PreTrainedModel) -> str | None:
    """The file of the config that a model was loaded with; "" of none, None where it is not found again."""
    source = getattr(model.config, "name_or_path", None) or "None"  # transformers writes str(None) for weights by hand
    if source == "None":
        return ""
    file: Any = os.path.join(source, CONFIG_NAME)
    if not os.path.exists(source):
        file = try_to_load_from_cache(source, CONFIG_NAME, revision=getattr(model.config, "_commit_hash", None))
    if not isinstance(file, str) or not os.path.isfile(file):
        return None
    with open(file, encoding="utf-8") as text:
        return text.read()
