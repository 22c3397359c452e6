"""Refusals and warnings for a training that would end with another network than the user asked for.

LambdaGELUTrainer calls `refuse_with_gates`, HardeningCallback calls `refuse_to_harden`.
"""

import sys
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import TrainerState, TrainingArguments
from transformers.utils import logging

from hf_lgelu.models.hardening import is_hardened, target_of_each
from hf_lgelu.models.optimizer_groups import hardness_group, trainable_gates
from hf_lgelu.networks.sites import lambda_gelu_modules
from hf_lgelu.training.arguments import HardeningConfig, LambdaGELUTrainingArguments

logger = logging.get_logger(__name__)

_OF_PEFT = (
    "For an adapter of PEFT, pass modules_to_save=hardness_modules_to_save(model) to its config (this misses gates "
    "inside experts that target_parameters names)"
)


def refuse_with_gates(args: TrainingArguments, accelerator: Accelerator) -> None:
    """Raise ValueError for options of Trainer with which no model with λ-gates can be trained."""
    if args.lr_scheduler_type == "greedy":
        raise ValueError(
            "lr_scheduler_type 'greedy' sets the learning rate of s independently of that of the weights, and loses "
            "the ratio hardness_lr_multiplier; choose another scheduler"
        )
    chosen = args.liger_kernel_config or {}
    if args.use_liger_kernel and any(chosen.get(name, True) for name in ("swiglu", "geglu")):
        raise ValueError(
            "use_liger_kernel replaces MLPs by fused ones, which compute SiLU or GELU: λ would never be learned. Leave "
            "these out: liger_kernel_config={'swiglu': False, 'geglu': False}"
        )
    plugin = accelerator.state.fsdp_plugin if accelerator.distributed_type == DistributedType.FSDP else None
    # FSDP2 then loads on one process and takes no plain tensors, such as a gate's temperature and override.
    if plugin is not None and plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "fsdp_cpu_ram_efficient_loading sends out the weights of the first process, and fails at the buffers of "
            "λ-gates, which FSDP does not shard: set it to false in accelerate's configuration"
        )


def refuse_to_harden(
    config: HardeningConfig, args: TrainingArguments, state: TrainerState, model: nn.Module, optimizer: Any
) -> None:
    """Raise ValueError or RuntimeError for a training that cannot harden the model."""
    if args.distributed_state is not None and args.distributed_state.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(
            "hardening does not work with DeepSpeed: its engine makes the optimizer step inside backward, before s can "
            "be frozen, and momentum would move s. Use FSDP2 or DistributedDataParallel"
        )
    target_of_each(model, config.targets)  # raises ValueError for a name of no gate
    check_hardness_learns(model, optimizer)
    if config.hardening_strategy == "epoch" and state.num_train_epochs >= sys.maxsize:
        raise ValueError(
            "the training data has no length, so epochs cannot be counted; harden with hardening_strategy='steps'"
        )
    selecting = {
        "load_best_model_at_end": args.load_best_model_at_end,
        "save_strategy='best'": args.save_strategy == "best",
    }
    # LambdaGELUTrainer, which has its own arguments, selects hardened epochs.
    if any(selecting.values()) and not isinstance(args, LambdaGELUTrainingArguments):
        raise ValueError(
            f"{next(option for option, selects in selecting.items() if selects)} would select an epoch with soft gates "
            "that ReLU destroys. Use LambdaGELUTrainer, which selects hardened epochs, or turn the option off"
        )


def check_hardness_learns(model: nn.Module, optimizer: Any) -> None:
    """Raise ValueError if an s is frozen, and RuntimeError if the optimizer does not hold one."""
    modules = trainable_gates(model)
    frozen = [name for name, module in modules if not module.raw_hardness.requires_grad]
    if frozen:
        raise ValueError(
            f"the raw hardness of {', '.join(frozen[:4])} is frozen (requires_grad=False), so λ is not learned and may "
            f"not be saved. {_OF_PEFT}; else call module.raw_hardness.requires_grad_(True)"
        )
    held = {id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    forgotten = [name for name, module in modules if id(module.raw_hardness) not in held]
    if forgotten and held & names.keys():  # a sharded optimizer may hold other parameters
        raise RuntimeError(
            f"the optimizer does not hold the raw hardness of {', '.join(forgotten[:4])}: it was made before the "
            "surgery. Make it after the surgery, from hardness_parameter_groups(model, ...)"
        )


def require_gradient(model: nn.Module) -> None:
    """Raise RuntimeError if no s has a gradient after a backward pass, so that no λ-gate ran."""
    modules = lambda_gelu_modules(model)
    reached = any(module.raw_hardness.grad is not None for _, module in modules)
    # An optimizer that steps inside backward leaves no gradient.
    if not reached and any(parameter.grad is not None for parameter in model.parameters()):
        raise RuntimeError(
            f"after the first backward pass none of the {len(modules)} raw hardnesses has a gradient, so no λ-gate "
            "ran: another activation is computed in their place, for example by Liger's SwiGLU. Leave it out"
        )


def warn_ungrouped(optimizer: Any, model: nn.Module) -> None:
    """Warn of an optimizer without a hardness group, if an s learns."""
    learning = {id(s) for _, module in lambda_gelu_modules(model) if (s := module.raw_hardness).requires_grad}
    if not learning or not hasattr(optimizer, "param_groups") or hardness_group(optimizer) is not None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    how = "learns and decays as the weights do" if learning & held else "is in no group and stays as it is"
    logger.warning(
        f"The optimizer has no hardness group: the raw hardness {how}. Use LambdaGELUTrainer with its own optimizer, "
        "or build yours (optimizers=(optimizer, None)) from hf_lgelu.hardness_parameter_groups(model, ...)"
    )


def warn_not_learning(model: nn.Module) -> None:
    """Warn of gates whose λ does not learn, at the start of a training without hardening."""
    modules, held = lambda_gelu_modules(model), held_hardness(model)
    frozen = [name for name, module in modules if not module.raw_hardness.requires_grad]
    if held and not is_hardened(model):
        logger.warning(
            f"Hardening has set λ of {len(held)} gates (from {min(held):.4g} on), so λ is not learned. "
            "release_hardness(model) makes λ follow s again; to finish hardening, resume that run or give harden=True"
        )
    elif frozen and not held:
        logger.warning(
            f"λ of {len(frozen)} of {len(modules)} gates does not learn: their raw hardness is frozen "
            f"({', '.join(frozen[:4])}{', ...' if len(frozen) > 4 else ''}). {_OF_PEFT}"
        )


def held_hardness(model: nn.Module) -> list[float]:
    """λ of the gates that hardening has set, so that λ does not follow s there."""
    overrides = [module.hardness_override.max().item() for _, module in lambda_gelu_modules(model)]
    return [hardness for hardness in overrides if hardness >= 1]


def warn_released(model: nn.Module) -> None:
    """Warn of hard gates at the start of hardening, which makes them soft again."""
    if held := held_hardness(model):
        logger.warning(
            f"The gates of this network are hardened (λ up to {max(held):.4g}). Hardening begins again at the learned "
            "λ: gates are soft until it ends. To train on with hard gates, leave harden out or resume from a checkpoint"
        )
