"""The hardness parameter group: its own learning rate c·η and no weight decay."""

from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from hf_lgelu.models.sites import lambda_gelu_modules, require_lambda_gelu

DEFAULT_LR_MULTIPLIER = 9.0
"""The paper's c."""

HARDNESS_GROUP = "hardness"
"""Value of a parameter group's "group_name" that marks it as the one that holds s."""

# Trainer's rule: biases and normalizations are not decayed.
_NO_DECAY_PATTERNS = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def hardness_parameter_groups(
    model: nn.Module,
    learning_rate: float,
    hardness_lr_multiplier: float = DEFAULT_LR_MULTIPLIER,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Three parameter groups for any torch optimizer: decayed weights, undecayed ones, and s.

    Args:
        model: has λ-GELU sites; pass it as the optimizer shall see it (after FSDP wrapping).
        learning_rate: η of the first two groups.
        hardness_lr_multiplier: c; s learns with c·η (the paper uses 9).
        weight_decay: of the first group; biases and normalizations have none, and neither has s.

    Raises:
        ValueError: no λ-GELU, or a number out of range.
        RuntimeError: s is hidden in a flat parameter (FSDP without use_orig_params=True).
    """
    _check_rate("learning_rate", learning_rate)
    _check_rate("hardness_lr_multiplier", hardness_lr_multiplier)
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
    hardness = _hardness_parameters(model)
    decayed_names = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY_PATTERNS))
    decayed, undecayed = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in hardness:
            (decayed if name in decayed_names else undecayed).append(parameter)
    return [
        {"params": decayed, "lr": learning_rate, "weight_decay": weight_decay},
        {"params": undecayed, "lr": learning_rate, "weight_decay": 0.0},
        {
            "params": list(hardness.values()),
            "lr": hardness_lr_multiplier * learning_rate,
            "weight_decay": 0.0,
            "group_name": HARDNESS_GROUP,
        },
    ]


def separate_hardness_group(
    optimizer: torch.optim.Optimizer, model: nn.Module, hardness_lr_multiplier: float = DEFAULT_LR_MULTIPLIER
) -> None:
    """Move s out of an optimizer's groups into one of its own, with c times their learning rate and no decay.

    For optimizers that somebody else built, before their first step and before their scheduler.
    Raises RuntimeError where the optimizer does not hold every s in its parameter groups (LOMO,
    layer-wise GaLore and other optimizers that replace the groups).
    """
    _check_rate("hardness_lr_multiplier", hardness_lr_multiplier)
    hardness = _hardness_parameters(model)
    groups = list(getattr(optimizer, "param_groups", ()))
    held = {id(parameter) for group in groups for parameter in group["params"]}
    if not hardness.keys() <= held or not hasattr(optimizer, "add_param_group"):
        raise RuntimeError(
            f"{type(optimizer).__name__} replaces the parameter groups, so the raw hardness cannot have a learning "
            "rate of its own and would be lost or decayed. Choose an optimizer with ordinary groups, such as "
            "adamw_torch or sgd"
        )
    for group in groups:
        moved = [parameter for parameter in group["params"] if id(parameter) in hardness]
        if not moved:
            continue
        if not isinstance(group.get("lr"), int | float | torch.Tensor):
            raise RuntimeError(
                f"{type(optimizer).__name__} has no learning rate to multiply (relative step sizes); give it one"
            )
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in hardness]
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        options.update(lr=hardness_lr_multiplier * group["lr"], weight_decay=0.0, group_name=HARDNESS_GROUP)
        optimizer.add_param_group({"params": moved, **options})


def hardness_learning_rate(optimizer: Any) -> float | None:
    """The current learning rate of s, or None if the optimizer has no hardness group."""
    for group in optimizer.param_groups:
        if group.get("group_name") == HARDNESS_GROUP:
            return float(group["lr"])
    return None


def _hardness_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """{id: s} of every hardness, each once, as the model's own parameters() lists them."""
    require_lambda_gelu(model)
    visible = {id(parameter) for parameter in model.parameters()}
    hardness = {id(module.raw_hardness): module.raw_hardness for _, module in lambda_gelu_modules(model)}
    if not hardness.keys() <= visible:
        raise RuntimeError(
            "the raw hardness is hidden in a flat parameter, so it cannot have a group of its own. Wrap with FSDP2, or "
            "with FSDP's use_orig_params=True (fsdp_use_orig_params: true in accelerate's config)"
        )
    return hardness


def _check_rate(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
