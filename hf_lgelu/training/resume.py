"""What a training takes over from the checkpoint that it goes on from: one of its model, and its best epoch so far."""

import json
import os
from typing import Any

from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import PreTrainedModel, TrainerState
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from hf_lgelu.models.config_keys import gate_names
from hf_lgelu.models.rebuild import from_pretrained
from hf_lgelu.models.site_record import RECORD_KEY
from hf_lgelu.models.sites import lambda_gelu_modules, uncompiled_name

logger = logging.get_logger(__name__)


def check_checkpoint_activations(folder: str, model: nn.Module) -> None:
    """Refuse to resume a model from a checkpoint with other activations: transformers would load it silently."""
    keys = _checkpoint_keys(folder)
    if not keys:  # pickled, a folder of FSDP, or adapters only
        return
    saved = {name for name in keys if name.endswith("raw_hardness")}
    present = {uncompiled_name(f"{name}.raw_hardness".removeprefix(".")) for name, _ in lambda_gelu_modules(model)}
    if len(saved) != len(present) or (saved != present and keys <= _own_keys(model)):
        raise ValueError(
            f"the checkpoint {folder} holds the hardness of {len(saved)} λ-GELU activations and the model has "
            f"{len(present)}: they are not the same network (was ReLU substituted in one of them?). Resume with the "
            "model as it was when the checkpoint was written"
        )
    config = os.path.join(folder, CONFIG_NAME)
    if not isinstance(model, PreTrainedModel) or not os.path.isfile(config):
        return
    with open(config, encoding="utf-8") as file:
        saved_config, own_config = file.read(), model.config.to_json_string()
    written, built = gate_names(saved_config), gate_names(own_config)
    if written and built and written != built:
        raise ValueError(
            f"the activations of the checkpoint {folder} are {', '.join(sorted(written))} and the model's "
            f"{', '.join(sorted(built))}, which is another function of the same weights. Resume with the model as it "
            "was when the checkpoint was written"
        )
    told, there = _records(json.loads(saved_config)), _records(json.loads(own_config))
    differing = [entry["site"] for entry in (*told, *there) if entry not in told or entry not in there]
    if differing:
        raise ValueError(
            f"the gates that surgery put into the model and those of the checkpoint {folder} differ, at "
            f"{', '.join(dict.fromkeys(differing))}, which is another function of the same weights. Repeat the surgery "
            "that the checkpoint was trained with (gate, forward, granularity), or load it with "
            "hf_lgelu.from_pretrained"
        )


def load_renamed(folder: str, model: nn.Module) -> bool:
    """Load a checkpoint whose tensors have other names than the model's; False, and nothing done, where they are its.

    transformers 5 saves many families (ViT, DeiT, every mixture of experts) under the names that the Hub knows, and
    only `from_pretrained` takes them back. Trainer loads by the model's own names and no more than warns, so a run
    would go on from random weights, and the best epoch would not be put back.

    Raises ValueError if the checkpoint lacks a tensor of the model, or holds another: what is missing would be random.
    """
    keys, own = _checkpoint_keys(folder), _own_keys(model)
    if not keys:
        return False
    unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
    if keys <= own or not isinstance(unwrapped, PreTrainedModel):
        _require_all_keys(folder, model, keys)
        return False
    loaded, told = from_pretrained(type(unwrapped), folder, output_loading_info=True)
    lost = [*told["missing_keys"], *told["unexpected_keys"], *told["mismatched_keys"]]
    lost += set(loaded.state_dict()) ^ set(unwrapped.state_dict())
    if lost:
        raise _of_another_network(folder, lost)
    unwrapped.load_state_dict(loaded.state_dict())
    return True


def _require_all_keys(folder: str, model: nn.Module, keys: set[str]) -> None:
    """Refuse a checkpoint in which a tensor is missing that shares no memory with one that is there."""
    state = {uncompiled_name(name): tensor for name, tensor in model.state_dict().items()}
    held = {tensor.data_ptr() for name, tensor in state.items() if name in keys}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    missing = [name for name, tensor in state.items() if name not in keys | ignored and tensor.data_ptr() not in held]
    if missing or not keys <= state.keys():
        raise _of_another_network(folder, [*missing, *(keys - state.keys())])


def _of_another_network(folder: str, names: list[str]) -> ValueError:
    return ValueError(
        f"the checkpoint {folder} and the model do not hold the same tensors ({len(names)} differ: "
        f"{', '.join(sorted(map(str, names))[:4])}{', ...' if len(names) > 4 else ''}), and what is missing would be "
        "random. Resume with the model as it was when the checkpoint was written"
    )


def _own_keys(model: nn.Module) -> set[str]:
    return {uncompiled_name(name) for name in model.state_dict()}


def _records(config: Any) -> list[dict[str, Any]]:
    """All entries of the records of gates in a config that was read from JSON, and in those inside it."""
    if not isinstance(config, dict):
        return []
    inner = [entry for key, value in config.items() if key != RECORD_KEY for entry in _records(value)]
    return [*(config.get(RECORD_KEY) or []), *inner]


def forget_best(state: TrainerState, why: str) -> None:
    """Let no checkpoint count as the best so far: the run that it is of chose by other rules."""
    if state.best_metric is None:
        return
    step = "" if state.best_global_step is None else f", of step {state.best_global_step}"
    logger.warning(f"The best checkpoint so far{step}, counts no longer: {why}")
    state.best_metric = state.best_global_step = state.best_model_checkpoint = None


def _checkpoint_keys(folder: str) -> set[str]:
    index, weights = os.path.join(folder, SAFE_WEIGHTS_INDEX_NAME), os.path.join(folder, SAFE_WEIGHTS_NAME)
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as file:
            return set(json.load(file)["weight_map"])
    if os.path.isfile(weights):
        from safetensors import safe_open

        with safe_open(weights, framework="pt") as file:
            return set(file.keys())
    return set()
