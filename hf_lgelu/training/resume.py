"""Checkpoints from which a training resumes, or takes the best: of the same network, and loaded whole."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from hf_lgelu.activation.gates import GATES
from hf_lgelu.models.config_keys import gate_names
from hf_lgelu.models.loading import from_pretrained
from hf_lgelu.models.record import RECORD_KEY
from hf_lgelu.networks.sites import lambda_gelu_modules, uncompiled_name

logger = logging.get_logger(__name__)


def whole_checkpoint(folder: str | bool, output_dir: str) -> str | bool:
    """The checkpoint from which a run resumes: `folder`, or the last checkpoint in it (True: in `output_dir`).

    If this checkpoint is not whole, the last whole checkpoint before it is taken. Trainer writes trainer_state.json
    last; if this file cannot be read, the run was stopped while it saved. A full disk or a copy may have cut off the
    weights. Raises ValueError if no checkpoint is whole.
    """
    of_run = output_dir if isinstance(folder, bool) else folder
    given = (get_last_checkpoint(of_run) if os.path.isdir(of_run) else None) or folder
    if isinstance(given, bool):
        return folder  # Trainer raises the error
    last = str(Path(given))
    before = sort_checkpoints(os.path.dirname(last))
    before = before[: before.index(last)] if last in before else []
    broken: list[str] = []
    for checkpoint in (last, *reversed(before)):
        state = os.path.join(checkpoint, TRAINER_STATE_NAME)
        try:
            TrainerState.load_from_json(state)
            _checkpoint_keys(checkpoint)
        except (OSError, TypeError, ValueError, SafetensorError) as error:
            broken.append(checkpoint if isinstance(error, SafetensorError) else state)
            continue
        if broken:
            logger.warning(
                f"{', '.join(broken)}: absent, empty or damaged, as if the run was stopped while it saved. Training "
                f"goes on from {checkpoint}, the last whole checkpoint before"
            )
        return checkpoint
    why = "there is no such folder"
    if os.path.isdir(last):
        why = (
            f"{broken[0]} is absent, empty or damaged, and there is no whole checkpoint before it. Begin a new run, "
            f"from the weights if {last} has them: from_pretrained({last!r})"
        )
    raise ValueError(f"Can't find a valid checkpoint at {last}: {why}")  # as transformers says it


def check_checkpoint_activations(folder: str, model: nn.Module) -> None:
    """Raise ValueError for a checkpoint with other activations, which transformers would load without an error."""
    keys = {uncompiled_name(name) for name in _checkpoint_keys(folder)}
    if not keys:  # a folder of FSDP, or adapters only
        return
    saved = {name for name in keys if name.endswith("raw_hardness")}
    present = {uncompiled_name(f"{name}.raw_hardness".removeprefix(".")) for name, _ in lambda_gelu_modules(model)}
    # Sites with other names are compared when the tensors are loaded.
    is_renamed = not keys <= {uncompiled_name(name) for name in model.state_dict()}
    if len(saved) != len(present) or (saved != present and not is_renamed):
        way = ""
        if not saved and isinstance(model, PreTrainedModel):
            options = [f"{key}={gate!r}" for key, gate in model.config.to_dict().items() if gate in [*GATES]]
            call = f"from_pretrained({', '.join([repr(folder), *options[:1]])})"
            way = f", or begin a new run with gates from its weights: {call}"
            way += "" if options else ", then hf_lgelu.replace_activations"
        raise ValueError(
            f"the checkpoint {folder} has λ of {len(saved)} gates and the model has {len(present)}: they are different "
            f"networks. Resume with the model of that run{way}"
        )
    config = os.path.join(folder, CONFIG_NAME)
    if not isinstance(model, PreTrainedModel) or not os.path.isfile(config):
        return
    with open(config, encoding="utf-8") as file:
        saved_config, own_config = file.read(), model.config.to_json_string()
    written, built = gate_names(saved_config), gate_names(own_config)
    differing = sorted(written ^ built) if written and built else []
    told, there = _records(json.loads(saved_config)), _records(json.loads(own_config))
    differing += [entry["site"] for entry in (*told, *there) if entry not in told or entry not in there]
    if differing:
        raise ValueError(
            f"the gates of the checkpoint {folder} and of the model differ ({', '.join(dict.fromkeys(differing))}), so "
            "they are different functions. Resume after the same surgery, or load it with hf_lgelu.from_pretrained"
        )


def _records(config: Any) -> list[dict[str, Any]]:
    """All entries of the records of gates in a config from JSON, and in the configs inside it."""
    if not isinstance(config, dict):
        return []
    inner = [entry for key, value in config.items() if key != RECORD_KEY for entry in _records(value)]
    return [*(config.get(RECORD_KEY) or []), *inner]


def load_renamed(folder: str, model: nn.Module) -> bool:
    """Whether a checkpoint's tensors have other names than the model's, and were therefore loaded here.

    transformers 5 saves many families (ViT, DeiT, every mixture of experts) under the Hub's names, some tensors cut or
    joined. Only `from_pretrained` reads them. Trainer loads by the model's own names, and only warns, so a run would go
    on from random weights, and the best epoch would not be restored.
    """
    keys, state = _checkpoint_keys(folder), model.state_dict()
    if not keys:  # a folder of FSDP, or adapters only
        return False
    if keys <= state.keys():
        held = {state[name].data_ptr() for name in keys}
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        missing = [name for name in state if state[name].data_ptr() not in held and name not in ignored]
        if missing:
            raise ValueError(_of_other_tensors(folder, missing))
        return False
    own = extract_model_from_parallel(model, keep_torch_compile=False)
    if not isinstance(own, PreTrainedModel):
        raise ValueError(_of_other_tensors(folder, sorted(keys - state.keys())))
    # The widest dtype of the model is exact; each tensor is copied from it into its own dtype.
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in state.values()) else torch.float32
    try:
        loaded, found = from_pretrained(type(own), folder, dtype=dtype, output_loading_info=True)
        if lost := sorted([*found["missing_keys"], *found["unexpected_keys"]]):
            raise ValueError(_of_other_tensors(folder, lost))
        own.load_state_dict(loaded.state_dict())
    except (RuntimeError, TypeError) as error:  # the model was changed after it was built, or is of the user's class
        raise ValueError(
            f"the checkpoint {folder} has other names than the model, and from_pretrained builds another network from "
            f"it: {error}. Begin a new run from from_pretrained({folder!r})"
        ) from error
    return True


def _of_other_tensors(folder: str, lost: list[str]) -> str:
    return (
        f"the checkpoint {folder} and the model do not hold the same tensors ({len(lost)} differ: "
        f"{', '.join(lost[:4])}{', ...' if len(lost) > 4 else ''}), and missing tensors would be random. Resume with "
        f"the model of that run, or begin a new run from from_pretrained({folder!r})"
    )


def _checkpoint_keys(folder: str) -> set[str]:
    """The names of a checkpoint's tensors; none for a checkpoint of FSDP or of an adapter."""
    file, index = Path(folder, SAFE_WEIGHTS_NAME), Path(folder, SAFE_WEIGHTS_INDEX_NAME)
    if file.is_file():
        with safe_open(file, framework="pt") as tensors:
            return set(tensors.keys())
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"]) if index.is_file() else set()
