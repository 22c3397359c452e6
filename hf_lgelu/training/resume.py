"""What a training takes over from the checkpoint that it goes on from: one of its model, and its best epoch so far."""

import json
import os
from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerState
from transformers.utils import CONFIG_NAME, logging

from hf_lgelu.models.config_keys import gate_names
from hf_lgelu.models.site_record import RECORD_KEY
from hf_lgelu.models.sites import lambda_gelu_modules, uncompiled_name
from hf_lgelu.training.checkpoint_tensors import checkpoint_keys

logger = logging.get_logger(__name__)


def check_checkpoint_activations(folder: str, model: nn.Module) -> None:
    """Refuse to resume a model from a checkpoint with other activations: transformers would load it silently."""
    keys = {uncompiled_name(name) for name in checkpoint_keys(folder)}
    if not keys:  # a folder of FSDP, or adapters only
        return
    saved = {name for name in keys if name.endswith("raw_hardness")}
    present = {uncompiled_name(f"{name}.raw_hardness".removeprefix(".")) for name, _ in lambda_gelu_modules(model)}
    # Saved under other names, these are told apart when the tensors are loaded.
    is_renamed = not keys <= {uncompiled_name(name) for name in model.state_dict()}
    if len(saved) != len(present) or (saved != present and not is_renamed):
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
            "that the checkpoint was trained with (gate, granularity), or load it with "
            "hf_lgelu.from_pretrained"
        )


def _records(config: Any) -> list[dict[str, Any]]:
    """All entries of the records of gates in a config that was read from JSON, and in those inside it."""
    if not isinstance(config, dict):
        return []
    inner = [entry for key, value in config.items() if key != RECORD_KEY for entry in _records(value)]
    own = [{name: entry[name] for name in entry if name != "granularity"} for entry in config.get(RECORD_KEY) or []]
    return [*own, *inner]  # hf_lgelu 0.2.0 wrote the granularity too, which the shape says


def forget_best(state: TrainerState, why: str) -> None:
    """Let no checkpoint count as the best so far: the run that it is of chose by other rules."""
    if state.best_metric is None:
        return
    step = "" if state.best_global_step is None else f", of step {state.best_global_step}"
    logger.warning(f"The best checkpoint so far{step}, counts no longer: {why}")
    state.best_metric = state.best_global_step = state.best_model_checkpoint = None
