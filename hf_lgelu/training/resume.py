"""What a training takes over from the checkpoint that it goes on from: one of its model, and its best epoch so far."""

import json
import os

from torch import nn
from transformers import PreTrainedModel, TrainerState
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from hf_lgelu.models.config_keys import gate_names
from hf_lgelu.models.sites import lambda_gelu_modules

logger = logging.get_logger(__name__)


def check_checkpoint_activations(folder: str, model: nn.Module) -> None:
    """Refuse to resume a model from a checkpoint with other activations: transformers would load it silently."""
    keys = _checkpoint_keys(folder)
    if not keys:  # pickled, a folder of FSDP, or adapters only
        return
    saved = {name for name in keys if name.endswith("raw_hardness")}
    present = {_unwrapped(f"{name}.raw_hardness".removeprefix(".")) for name, _ in lambda_gelu_modules(model)}
    if saved != present:
        raise ValueError(
            f"the checkpoint {folder} holds the hardness of {len(saved)} λ-GELU activations and the model has "
            f"{len(present)}: they are not the same network (was ReLU substituted in one of them?). Resume with the "
            "model as it was when the checkpoint was written"
        )
    config = os.path.join(folder, CONFIG_NAME)
    if not isinstance(model, PreTrainedModel) or not os.path.isfile(config):
        return
    with open(config, encoding="utf-8") as file:
        written, built = gate_names(file.read()), gate_names(model.config.to_json_string())
    if written and built and written != built:
        raise ValueError(
            f"the activations of the checkpoint {folder} are {', '.join(sorted(written))} and the model's "
            f"{', '.join(sorted(built))}, which is another function of the same weights. Resume with the model as it "
            "was when the checkpoint was written"
        )


def forget_best(state: TrainerState, why: str) -> None:
    """Let no checkpoint count as the best so far: the run that it is of chose by other rules."""
    if state.best_metric is None:
        return
    step = "" if state.best_global_step is None else f", of step {state.best_global_step}"
    logger.warning(f"The best checkpoint so far{step}, counts no longer: {why}")
    state.best_metric = state.best_global_step = state.best_model_checkpoint = None


def _unwrapped(name: str) -> str:
    """The name as a checkpoint has it: without what torch.compile, FSDP and activation checkpointing add."""
    for wrapper in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


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
