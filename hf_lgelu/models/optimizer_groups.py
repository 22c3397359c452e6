"""The parameter group of s in an optimizer, with its own learning rate, c·η, and no weight decay."""

from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from hf_lgelu.activation.hardness import is_number
from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.models.config_keys import forget_checkpoint
from hf_lgelu.models.copies import require_unflattened
from hf_lgelu.networks.sites import LEARNED_KINDS, find_sites, require_lambda_gelu

DEFAULT_LR_MULTIPLIER = 9.0
"""The paper's c."""

HARDNESS_GROUP = "hardness"
"""The "group_name" of the parameter group that holds s."""

# Trainer's rule: biases and normalizations have no weight decay.
_NO_DECAY_PATTERNS = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def hardness_parameter_groups(
    model: nn.Module,
    learning_rate: float,
    hardness_lr_multiplier: float = DEFAULT_LR_MULTIPLIER,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Three parameter groups for any torch optimizer: decayed weights, undecayed ones, and s.

    Args:
        model: a model with λ-GELU sites, in the form that the optimizer will see (after FSDP wrapping).
        learning_rate: η of the first two groups.
        hardness_lr_multiplier: c; s learns with c·η (the paper uses 9).
        weight_decay: the weight decay of the first group. s has none, and neither have parameters that Trainer spares:
            biases, LayerNorm, and norms by their names ("norm", "layer_norm"). A BatchNorm of another name ("bn1") is
            decayed.

    Parameters with requires_grad=False are in no group, s included. Raises ValueError without λ-GELU or for a number
    out of range, and RuntimeError where FSDP1 has flattened s.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    >>> groups = hf_lgelu.hardness_parameter_groups(model, 0.5, hardness_lr_multiplier=9.0, weight_decay=0.01)
    >>> [(len(group["params"]), group["lr"], group["weight_decay"]) for group in groups]
    [(3, 0.5, 0.01), (3, 0.5, 0.0), (2, 4.5, 0.0)]
    >>> optimizer = torch.optim.AdamW(groups)
    """
    check_rate("learning_rate", learning_rate)
    check_rate("hardness_lr_multiplier", hardness_lr_multiplier)
    check_rate("weight_decay", weight_decay)
    learning_rate, weight_decay = float(learning_rate), float(weight_decay)  # numpy's would be in checkpoints
    hardness = _hardness_parameters(model)
    decayed_names = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY_PATTERNS))
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in hardness:
            (decayed if name in decayed_names else undecayed).append(parameter)
    return [
        {"params": decayed, "lr": learning_rate, "weight_decay": weight_decay},
        {"params": undecayed, "lr": learning_rate, "weight_decay": 0.0},
        {"params": list(hardness.values()), **_hardness_options(learning_rate, hardness_lr_multiplier)},
    ]


def separate_hardness_group(
    optimizer: torch.optim.Optimizer, model: nn.Module, hardness_lr_multiplier: float = DEFAULT_LR_MULTIPLIER
) -> None:
    """Move s from an optimizer's groups into a group of its own, with c times the learning rate and no decay.

    Changes `optimizer` in place. Use this for optimizers from other code, before their first step and before their
    scheduler. Raises ValueError for a model without λ-GELU or a bad multiplier, and RuntimeError where the optimizer
    cannot give s a learning rate of its own. The optimizer is unchanged then.
    """
    check_rate("hardness_lr_multiplier", hardness_lr_multiplier)
    hardness = _hardness_parameters(model)
    if not hardness:  # every s is frozen
        return
    groups = list(getattr(optimizer, "param_groups", ()))
    is_whole = hardness.keys() <= {id(parameter) for group in groups for parameter in group["params"]}
    changed = [group for group in groups if any(id(parameter) in hardness for parameter in group["params"])]
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps optimizers
    why = None
    if any(group.get("group_name") == HARDNESS_GROUP for group in groups):
        why = "has a hardness group already"
    # Layer-wise GaLore and APOLLO hold no s. LOMO ignores its groups, because it updates inside backward.
    elif not is_whole or not hasattr(optimizer, "add_param_group") or hasattr(optimizer, "fused_backward"):
        why = "replaces the parameter groups or ignores their learning rates"
    elif any("initial_lr" in group for group in changed):
        why = "has a scheduler already, which would not know a new group"
    elif not all(isinstance(group.get("lr"), int | float | torch.Tensor) for group in changed):
        why = "has no learning rate to multiply (relative step sizes)"
    if why is not None:
        raise RuntimeError(
            f"{type(inner).__name__} {why}, so s cannot have a group with a learning rate of its own. Take an "
            "optimizer with ordinary groups, such as AdamW or SGD, and give s its group before the scheduler is made"
        )
    for group in changed:
        leaves = [id(parameter) in hardness for parameter in group["params"]]
        added = {**group, **_hardness_options(group["lr"], hardness_lr_multiplier)}
        for key in ("params", "param_names") if "param_names" in group else ("params",):
            added[key] = [item for item, goes in zip(group[key], leaves, strict=True) if goes]
            group[key] = [item for item, goes in zip(group[key], leaves, strict=True) if not goes]
        if names := added.pop("param_names", None):
            added["params"] = list(zip(names, added["params"], strict=True))
        optimizer.add_param_group(added)


def hardness_group(optimizer: Any) -> dict[str, Any] | None:
    """The optimizer's parameter group that holds s, or None."""
    return next((group for group in optimizer.param_groups if group.get("group_name") == HARDNESS_GROUP), None)


def check_rate(name: str, value: float) -> None:
    """Raise ValueError with the name unless the value is a finite number of at least 0."""
    if not is_number(value) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")


def _hardness_options(learning_rate: Any, multiplier: float) -> dict[str, Any]:
    return {"lr": float(multiplier) * learning_rate, "weight_decay": 0.0, "group_name": HARDNESS_GROUP}


def _hardness_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """{id: s} of every hardness that learns, each once; each s is the object that the model's parameters() lists."""
    return {id(s): s for _, module in trainable_gates(model) if (s := module.raw_hardness).requires_grad}


def trainable_gates(model: nn.Module) -> list[tuple[str, LambdaGate]]:
    """The result of `require_lambda_gelu`. Raises RuntimeError if a process holds only a part of an s or its units."""
    modules, size = require_lambda_gelu(model), getattr(model, "tp_size", None) or 1
    require_unflattened(modules)
    if size > 1:
        raise RuntimeError(
            f"the model is split by tensor parallelism over {size} processes, where each has a part of a gate's units "
            "and s the gradient of that part: λ would differ between them. Train with DistributedDataParallel or FSDP2"
        )
    return modules


def hardness_modules_to_save(model: nn.Module) -> list[str]:
    """The names of all λ-GELU modules, for `modules_to_save` of a PEFT config.

    `get_peft_model` freezes s, and an adapter's checkpoint holds no λ. If `modules_to_save` names the λ-GELUs, each of
    them trains with the adapter, is saved with it and comes back with it. It stays after `merge_and_unload`, and
    `substitute_relu` can follow. docs/families.md says which of PEFT's methods can merge.

    The model forgets the checkpoint that it comes from. Otherwise PEFT would name this checkpoint as the adapter's
    base, and load the base without λ where the activation string was given to `from_pretrained`. So load the base
    yourself, and then the adapter: `PeftModel.from_pretrained(base, adapter)`.

    Raises ValueError for a model without λ-GELU, and if one λ-gate stands at several places: PEFT would make copies.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> import hf_lgelu
    >>> from hf_lgelu.models.optimizer_groups import hardness_modules_to_save
    >>> sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9, "bos_token_id": 0, "eos_token_id": 0}
    >>> model = GPT2LMHeadModel(GPT2Config(activation_function="lambda_gelu", **sizes))
    >>> hardness_modules_to_save(model)
    ['transformer.h.0.mlp.act']
    """
    names = [name for name, _ in require_lambda_gelu(model)]
    several = [site.name for site in find_sites(model, LEARNED_KINDS) if site.name not in names]
    if several:
        raise ValueError(
            f"the λ-gate at {', '.join(several[:4])} stands at another place too, and PEFT saves a gate at one place "
            "alone: the others get the λ of the base. Give each place a gate of its own, or train without an adapter"
        )
    forget_checkpoint(model)
    return names
