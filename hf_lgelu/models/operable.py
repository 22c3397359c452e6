"""What of a model may be operated on: the module inside torch.compile, and nothing that somebody has wrapped."""

from collections.abc import Iterable

import torch
from accelerate.utils import has_offloaded_params
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.models.sites import checked_module, raw_parameters


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside torch.compile, which hides operations; another one itself. TypeError where it is no module."""
    return getattr(checked_module(model), "_orig_mod", model)


def require_values_here(named: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise RuntimeError where accelerate keeps the values of one of these modules, with their names, elsewhere.

    What was written into such a module would be gone with its next forward, and a copy would have no values.
    """
    kept = next((name or type(module).__name__ for name, module in named if has_offloaded_params(module)), None)
    if kept is not None:
        raise RuntimeError(
            f"accelerate keeps the values of {kept} on a disk or beside the device (device_map, cpu_offload), where "
            "they cannot be changed or copied. Load the model whole, by from_pretrained without device_map or with one "
            'that fits ("cpu"), and call again'
        )


def require_unflattened(owners: Iterable[tuple[str, LambdaGate]]) -> None:
    """Raise RuntimeError where FSDP1 has flattened an s: of its shards most processes hold nothing.

    All processes raise, those that hold a whole s too.
    """
    for name, owner in owners:
        flat = any(getattr(parameter, "_fsdp_flattened", False) for parameter in raw_parameters(owner))
        if flat or not all(isinstance(parameter, nn.Parameter) for parameter in raw_parameters(owner)):
            raise RuntimeError(
                f"FSDP1 has flattened the raw hardness of {name or 'a gate'} into shards, of which most processes hold "
                "nothing, with use_orig_params=True too: its λ can neither be read nor set. Wrap with FSDP2 "
                "(fully_shard; fsdp_version: 2 in accelerate's config) or DistributedDataParallel"
            )


def operable_module(model: nn.Module, *, temporarily: bool = False) -> nn.Module:
    """The module to operate on, or a RuntimeError with the reason why it must not be touched (TypeError: no module)."""
    model = uncompiled(model)  # the compiled wrapper guards on the modules inside and compiles again
    for name, module in model.named_modules():
        where = f"its module {name!r}" if name else "it"
        # A shard of FSDP can be left out for one evaluation, if all ranks do it; Trainer has no unwrapped model then.
        sharded = "fsdp" in type(module).__module__.lower() and not temporarily
        if isinstance(module, DistributedDataParallel | DataParallel) or sharded:
            raise RuntimeError(
                f"the model cannot be changed: {where} is wrapped by {type(module).__name__}, which has already taken "
                "stock of the parameters. Do the surgery before wrapping, or on the unwrapped model "
                "(accelerator.unwrap_model(model))"
            )
        if type(module).__module__.startswith("peft.") and not temporarily:
            raise RuntimeError(
                f"the model cannot be changed: {where} is {type(module).__name__} of PEFT, and a saved adapter says "
                "nothing of the activations that it was trained with. Replace activations before get_peft_model, and "
                "substitute after merging: model = model.merge_and_unload()"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise RuntimeError(
                f"the model cannot be changed: {where} is a TorchScript module. Operate before scripting"
            )
    return model
