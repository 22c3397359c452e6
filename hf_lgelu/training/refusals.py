"""What a run has of Trainer, or on its model, that would make another network than was asked for: refused, or said."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import TrainingArguments
from transformers.utils import logging

from hf_lgelu.models.hardening import HARDENED_FRACTION, is_hardened
from hf_lgelu.models.optimizer_groups import hardness_group
from hf_lgelu.models.sites import lambda_gelu_modules, raw_parameters

logger = logging.get_logger(__name__)


def refuse_deepspeed(args: TrainingArguments) -> None:
    """Its engine steps before s can be frozen."""
    if args.distributed_state is not None and args.distributed_state.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(
            "hardening does not work with DeepSpeed: its engine makes the optimizer step inside backward, before s can "
            "be frozen, and momentum would move s. Use FSDP2 or DistributedDataParallel"
        )


def refuse_best_checkpoints(args: TrainingArguments) -> None:
    """Of a plain Trainer, which would select among soft epochs too."""
    for option, selects in (
        ("load_best_model_at_end", args.load_best_model_at_end),
        ("save_strategy='best'", args.save_strategy == "best"),
    ):
        if selects:
            raise ValueError(
                f"{option} would select an epoch whose gates are still soft, and substituting ReLU there destroys the "
                "model. Use LambdaGELUTrainer, which selects among hardened epochs only (λ from "
                f"{HARDENED_FRACTION:.0%} of the target on), or turn it off"
            )


def refuse_liger(args: Any) -> None:
    """Its fused MLPs compute SiLU or GELU whatever the gate is."""
    chosen = args.liger_kernel_config or {}
    bound = [name for name in ("swiglu", "geglu") if chosen.get(name, True)]
    if args.use_liger_kernel and bound:
        raise ValueError(
            "use_liger_kernel puts fused MLPs on the model, which compute SiLU or GELU in the λ-gates' place: λ would "
            "never be learned. Leave them out: liger_kernel_config={'swiglu': False, 'geglu': False}"
        )


def refuse_efficient_loading(accelerator: Accelerator) -> None:
    """FSDP2's loading on one process, which knows no plain tensors: a gate's temperature and override are such."""
    plugin = accelerator.state.fsdp_plugin if accelerator.distributed_type == DistributedType.FSDP else None
    if plugin is not None and plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "fsdp_cpu_ram_efficient_loading hands out the weights of the first process, and fails at the buffers of "
            "λ-gates, which FSDP leaves whole: set it to false in accelerate's configuration"
        )


def check_ratio_of_rates(args: TrainingArguments) -> None:
    """Refuse schedulers under which s does not learn c times as fast as the weights."""
    if args.lr_scheduler_type == "greedy":
        raise ValueError(
            "lr_scheduler_type 'greedy' changes each group's learning rate on its own and loses the ratio "
            "hardness_lr_multiplier; choose another scheduler"
        )
    if args.lr_scheduler_type == "reduce_lr_on_plateau" and (args.lr_scheduler_kwargs or {}).get("min_lr"):
        raise ValueError(
            "min_lr of reduce_lr_on_plateau would stop both learning rates at the same floor and lose the ratio "
            "hardness_lr_multiplier; leave min_lr at 0"
        )


def require_gradient(model: nn.Module) -> None:
    """Raise where no s has a gradient after a backward pass: what computes in the gates' place is not theirs."""
    modules = lambda_gelu_modules(model)
    reached = any(parameter.grad is not None for _, module in modules for parameter in raw_parameters(module))
    # Optimizers that step inside backward leave no gradient anywhere.
    if not reached and any(parameter.grad is not None for parameter in model.parameters()):
        raise RuntimeError(
            f"after the first backward pass none of the {len(modules)} raw hardnesses has a gradient, so no λ-gate "
            "took part: something computes another activation in their place (a fused kernel put on the model, such "
            "as Liger's SwiGLU and GEGLU), and would do so whatever λ becomes. Leave it out"
        )


def tell_unreached(model: nn.Module) -> None:
    """Say after a backward pass which of the gates that learn it has not reached."""
    if all(parameter.grad is None for parameter in model.parameters()):  # an optimizer that steps inside backward
        return
    learning = [(name, raw_parameters(module)) for name, module in lambda_gelu_modules(model)]
    learning = [(name, parameters) for name, parameters in learning if all(p.requires_grad for p in parameters)]
    unreached = [name for name, parameters in learning if all(p.grad is None for p in parameters)]
    if unreached:
        logger.warning(
            f"The first step has no gradient for λ of {len(unreached)} of {len(learning)} gates "
            f"({', '.join(unreached[:4])}{', ...' if len(unreached) > 4 else ''}). Experts and dropped layers may come "
            "to run later. A gate that never runs keeps its λ, which counts in hardness/mean, and "
            "DistributedDataParallel stops at it: so it is where the model registers one activation under two names "
            "and runs it by one of them. Have it register that once, before the surgery"
        )


def tell_ungrouped(optimizer: Any, model: nn.Module) -> None:
    """Of an optimizer that LambdaGELUTrainer did not make and that nobody gave a group for an s that learns."""
    learning = {id(s) for _, module in lambda_gelu_modules(model) for s in raw_parameters(module) if s.requires_grad}
    if not learning or not hasattr(optimizer, "param_groups") or hardness_group(optimizer) is not None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    how = "learns and decays as the weights do" if learning & held else "is in none, and stays as it is"
    logger.warning(
        f"The optimizer has no hardness group: the raw hardness {how}. Use LambdaGELUTrainer with its own optimizer, "
        "build one from hf_lgelu.hardness_parameter_groups(model, ...), or call separate_hardness_group(optimizer, "
        "model) before it is passed (optimizers=(optimizer, None)) or create_optimizer returns it"
    )


def tell_held(model: nn.Module) -> None:
    """Say it where a training without hardening goes on from gates that are on their way: their λ does not learn."""
    if largest_override(model) >= 1 and not is_hardened(model):
        held = [module for _, module in lambda_gelu_modules(model) if bool((module.hardness_override >= 1).any())]
        smallest = min(module.hardness.min().item() for module in held)
        logger.warning(
            f"λ of {len(held)} gates was set by hardening (from {smallest:.4g} on) and stays there: it is not learned, "
            "and no hardening goes on. release_hardness(model) lets it follow s again; to end hardening, resume from "
            "the checkpoint of that run, or train with harden=True"
        )


def tell_frozen(model: nn.Module) -> None:
    """Say it where a training without hardening begins with an s that does not learn."""
    modules = lambda_gelu_modules(model)
    frozen = [name for name, module in modules if not all(s.requires_grad for s in raw_parameters(module))]
    if frozen and largest_override(model) < 1:
        logger.warning(
            f"λ of {len(frozen)} of {len(modules)} gates does not learn: their raw hardness is frozen "
            f"({', '.join(frozen[:4])}{', ...' if len(frozen) > 4 else ''}). An adapter of PEFT freezes it, and saves "
            "no λ, unless its config has modules_to_save=hardness_modules_to_save(model); that finds no gate inside "
            "experts whose weights the adapter takes by target_parameters"
        )


def tell_softer(before: float, after: float) -> None:
    """Say it where a run that goes on from a checkpoint sets λ back: it has other epochs than the one before it."""
    if after < 0.999 * before:
        logger.warning(
            f"Hardening had come to λ = {before:.4g} and goes on with {max(after, 1.0):.4g}: with another number of "
            "epochs (or steps) than in the run that is resumed, its place in them is another. The gates are softer "
            "until it is over. To keep them as hard as they are, train on from the network without harden"
        )


def largest_override(model: nn.Module) -> float:
    """The largest λ that hardening has set; 0 where λ follows s everywhere."""
    overrides = [module.hardness_override.max() for _, module in lambda_gelu_modules(model)]
    together = [override.to(overrides[0].device) for override in overrides]  # the device is waited for once
    return torch.stack(together).max().item() if together else 0.0


def tell_released(model: nn.Module, switch_fraction: float) -> None:
    """Say it where a network that is hard already begins again with soft gates."""
    largest = largest_override(model)
    if largest >= 1 and switch_fraction > 0:
        logger.warning(
            f"The gates of this network are hardened (λ up to {largest:.4g}). Hardening begins with λ learned anew, "
            "so they are soft until it is over, and another network. To train it on as it is, leave harden out; to go "
            "on with a run that was stopped, resume from its checkpoint"
        )
