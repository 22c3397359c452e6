"""Checkpoints from which a training resumes, or takes the best: of the same network, and loaded whole."""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_lgelu.activation.gates import GATES
from hf_lgelu.models.config_keys import config_entries
from hf_lgelu.models.loading import from_pretrained
from hf_lgelu.models.record import RECORD_KEY


def require_same_gates(folder: str, model: nn.Module) -> None:
    """Raise ValueError for a checkpoint whose config says other gates: their tensors have the same names."""
    config = Path(folder, CONFIG_NAME)
    if not isinstance(model, PreTrainedModel) or not config.is_file():
        return
    told, there = map(_gates_said, (json.loads(config.read_text(encoding="utf-8")), model.config.to_dict()))
    differing = [".".join(path) for path in {**told, **there} if told.get(path) != there.get(path)]
    if differing:
        raise ValueError(
            f"the configs of the checkpoint {folder} and of the model say other gates ({', '.join(differing)}), so "
            "they are different functions. Resume after the same surgery, or load it with hf_lgelu.from_pretrained"
        )


def _gates_said(config: Any) -> dict[tuple[str, ...], Any]:
    """{path: names of λ-gates and records of gates} in a config, or in its JSON."""
    return {
        path: value
        for path, value in config_entries(config)
        if path[-1] == RECORD_KEY or str(value).removeprefix("gated-") in GATES
    }


def load_renamed(folder: str, model: nn.Module) -> bool:
    """Whether a checkpoint's tensors have other names than the model's, and were therefore loaded here.

    transformers 5 saves many families (ViT, DeiT, every mixture of experts) under the Hub's names, some tensors cut or
    joined. Only `from_pretrained` reads them. Trainer loads by the model's own names, and only warns, so a run would go
    on from random weights, and the best epoch would not be restored.

    Raises ValueError for a checkpoint that does not hold all tensors of the model, or holds others.
    """
    keys, state = _checkpoint_keys(folder), model.state_dict()
    if not keys:  # a folder of FSDP, or adapters only
        return False
    own = extract_model_from_parallel(model, keep_torch_compile=False)
    if keys <= state.keys():
        held = {state[name].data_ptr() for name in keys}
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        lost = [name for name in state if state[name].data_ptr() not in held and name not in ignored]
    elif not isinstance(own, PreTrainedModel):
        lost = sorted(keys - state.keys())
    else:
        # The widest dtype of the model is exact; each tensor is copied from it into its own dtype.
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in state.values()) else torch.float32
        loaded, found = from_pretrained(type(own), folder, dtype=dtype, output_loading_info=True)
        lost = sorted(
            {*found["missing_keys"], *found["unexpected_keys"], *(loaded.state_dict().keys() ^ own.state_dict().keys())}
        )
        if not lost:
            own.load_state_dict(loaded.state_dict())
            return True
    if lost:
        raise ValueError(
            f"the checkpoint {folder} and the model do not hold the same tensors ({len(lost)} differ: "
            f"{', '.join(lost[:4])}{', ...' if len(lost) > 4 else ''}), and missing tensors would be random. Resume "
            f"with the model of that run, or begin a new run from from_pretrained({folder!r})"
        )
    return False


def _checkpoint_keys(folder: str) -> set[str]:
    """The names of a checkpoint's tensors; none for a checkpoint of FSDP or of an adapter."""
    file, index = Path(folder, SAFE_WEIGHTS_NAME), Path(folder, SAFE_WEIGHTS_INDEX_NAME)
    if file.is_file():
        with safe_open(file, framework="pt") as tensors:
            return set(tensors.keys())
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"]) if index.is_file() else set()
