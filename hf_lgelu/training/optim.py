"""The hardness parameter group: its own learning rate c·η and no weight decay."""

from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from hf_lgelu.models.operable import require_unflattened
from hf_lgelu.models.optimizer_groups import (
    DEFAULT_LR_MULTIPLIER,
    HARDNESS_GROUP,
    check_rate,
    hardness_group,
    hardness_options,
    require_no_scheduler,
    require_takes_hardness,
)
from hf_lgelu.models.sites import lambda_gelu_modules, raw_parameters, require_lambda_gelu

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
        weight_decay: of the first group; s has none, nor has what Trainer spares: biases, LayerNorm, and norms by
            their names ("norm", "layer_norm"). A BatchNorm of another name ("bn1") is decayed.

    Parameters with requires_grad=False are in no group, s included.

    Raises:
        ValueError: no λ-GELU, or a number out of range.
        RuntimeError: s is hidden in a flat parameter (FSDP1).

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
    learning_rate, weight_decay = float(learning_rate), float(weight_decay)  # numpy's would be in each checkpoint
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
        {"params": list(hardness.values()), **hardness_options({"lr": learning_rate}, hardness_lr_multiplier)},
    ]


def separate_hardness_group(
    optimizer: torch.optim.Optimizer, model: nn.Module, hardness_lr_multiplier: float = DEFAULT_LR_MULTIPLIER
) -> None:
    """Move s out of an optimizer's groups into one of its own, with c times their learning rate and no decay.

    Changes `optimizer` in place. For optimizers that somebody else built, before their first step and before
    their scheduler. Raises RuntimeError where the optimizer cannot give s a learning rate of its own: it does not hold
    every s in its parameter groups (layer-wise GaLore and APOLLO), ignores the groups' learning rates (LOMO), takes one
    group (L-BFGS) or matrices alone (Muon), has a hardness group already, or a scheduler, which would set the new
    group's rate back; ValueError for a model without λ-GELU or a bad multiplier. The optimizer is unchanged then.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    >>> hf_lgelu.separate_hardness_group(optimizer, model)
    >>> [(len(group["params"]), group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    [(6, 0.1, 0.01), (2, 0.9, 0.0)]
    """
    check_rate("hardness_lr_multiplier", hardness_lr_multiplier)
    hardness = _hardness_parameters(model)
    if not hardness:  # every s is frozen
        return
    groups = list(getattr(optimizer, "param_groups", ()))
    if any(group.get("group_name") == HARDNESS_GROUP for group in groups):
        raise RuntimeError(
            "the optimizer has a hardness group already; a second call would multiply its learning rate once more"
        )
    require_no_scheduler(groups)
    require_takes_hardness(optimizer)
    held = {id(parameter) for group in groups for parameter in group["params"]}
    # LOMO has groups for show: it updates inside backward, everything with one learning rate.
    if not hardness.keys() <= held or not hasattr(optimizer, "add_param_group") or hasattr(optimizer, "fused_backward"):
        raise RuntimeError(
            f"{type(optimizer).__name__} replaces the parameter groups or ignores their learning rates, so the raw "
            "hardness cannot have a learning rate of its own. Choose an optimizer with ordinary groups, such as "
            "adamw_torch or sgd"
        )
    for group in groups:
        moves = [id(parameter) in hardness for parameter in group["params"]]
        if any(moves):
            _move_to_own_group(optimizer, group, moves, hardness_lr_multiplier)


def _move_to_own_group(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], moves: list[bool], multiplier: float
) -> None:
    if not isinstance(group.get("lr"), int | float | torch.Tensor):
        raise RuntimeError(
            f"{type(optimizer).__name__} has no learning rate to multiply (relative step sizes); give it one"
        )
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    options |= hardness_options(group, multiplier)
    # An optimizer that was built from named_parameters() keeps the names beside the parameters.
    named = "param_names" in group
    entries = list(zip(group["param_names"], group["params"], strict=True)) if named else group["params"]
    for key in ("params", "param_names") if named else ("params",):
        group[key] = [item for item, moved in zip(group[key], moves, strict=True) if not moved]
    optimizer.add_param_group({"params": [e for e, moved in zip(entries, moves, strict=True) if moved], **options})


def hardness_learning_rate(optimizer: Any) -> float | torch.Tensor | None:
    """The current learning rate of s, or None if the optimizer has no hardness group.

    Where the optimizer holds it as a tensor, a copy on the same device: making a number of it would wait for the
    device.
    """
    if not hasattr(optimizer, "param_groups"):
        raise RuntimeError(
            f"{type(optimizer).__name__} has no parameter groups, so s has no learning rate that is known. Of "
            'DeepSpeed leave "optimizer" out of its config: Trainer then makes one, with a group for s'
        )
    group = hardness_group(optimizer)
    if group is None:
        return None
    rate = group["lr"]
    return rate.clone() if isinstance(rate, torch.Tensor) else float(rate)


def check_hardness_learns(model: nn.Module, optimizer: Any) -> None:
    """Raise where λ is to be learned and hardened and somebody has kept s from both.

    Raises:
        ValueError: no λ-GELU, or an s with requires_grad=False.
        RuntimeError: the optimizer holds weights of the model, but not its s; or FSDP1 has flattened s.
    """
    modules = require_lambda_gelu(model)
    _refuse_tensor_parallel(model)
    require_unflattened(modules)
    frozen = [name for name, module in modules if not all(p.requires_grad for p in raw_parameters(module))]
    if frozen:
        raise ValueError(
            f"the raw hardness of {', '.join(frozen[:4])} is frozen (requires_grad=False), so λ is not learned, and "
            "what froze it may not save it. For an adapter of PEFT, pass "
            "modules_to_save=hardness_modules_to_save(model) to its config (which finds no gate inside experts whose "
            "weights the adapter takes by target_parameters); else call module.raw_hardness.requires_grad_(True)"
        )
    held = {id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    forgotten = [name for name, module in modules if not held.issuperset(map(id, raw_parameters(module)))]
    if forgotten and held & names.keys():  # sharded, an optimizer may hold other parameters altogether
        raise RuntimeError(
            f"the optimizer does not hold the raw hardness of {', '.join(forgotten[:4])}: it was made before the "
            "λ-GELU was put in. Pass it to replace_activations(model, optimizer=...), or make it after the surgery"
        )


def hold_averaged_hardness(optimizer: Any, model: nn.Module) -> None:
    """Keep a schedule-free optimizer from moving the frozen s of `model`. Other optimizers are left alone.

    Such an optimizer exchanges two sequences in every parameter whenever it goes from training to
    evaluation and back. Once its second sequence ("z") equals s, the exchange changes nothing.
    """
    for _, module in lambda_gelu_modules(model):
        for parameter in raw_parameters(module):
            state = optimizer.state.get(parameter, {})
            if "z" in state:
                state["z"].copy_(parameter.detach())


def _refuse_tensor_parallel(model: nn.Module) -> None:
    """Raise RuntimeError where a gate sees the units of its rank alone: each rank would learn a λ of its own."""
    size = getattr(model, "tp_size", None) or 1
    if size > 1:
        raise RuntimeError(
            f"the model is split by tensor parallelism over {size} processes, where each has a part of a gate's units "
            "and s the gradient of that part: λ would differ between them. Train with DistributedDataParallel or FSDP2"
        )


def _hardness_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """{id: s} of every hardness that learns, each once, as the model's own parameters() lists them."""
    require_lambda_gelu(model)
    _refuse_tensor_parallel(model)
    visible = {id(parameter) for parameter in model.parameters()}
    hardness = {id(s): s for _, module in lambda_gelu_modules(model) for s in raw_parameters(module)}
    if not hardness.keys() <= visible:
        raise RuntimeError(
            "the raw hardness is hidden in a flat parameter (FSDP1), so it cannot have a group of its own. Wrap with "
            "FSDP2 (fully_shard; fsdp_version: 2 in accelerate's config)"
        )
    return {key: parameter for key, parameter in hardness.items() if parameter.requires_grad}
