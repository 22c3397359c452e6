"""Models that may be changed: checks that one is not wrapped, and copies that share nothing with it.

The copies have all values in memory, and plain weights where a norm or another parametrization computes weights.
"""

import contextlib
import copy
import functools
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any, TypeAlias, TypeVar

import torch
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils import align_module_device, has_offloaded_params
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from transformers import PreTrainedModel

from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.networks.rewrite import calls_of
from hf_lgelu.networks.run import own_forward
from hf_lgelu.networks.sites import uncompiled

Model = TypeVar("Model", bound=nn.Module)

_ROUNDING = 8  # units in the last place, between a weight and the same weight computed again


def require_values_here(named: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise RuntimeError where accelerate keeps the values of one of these named modules elsewhere."""
    kept = next((name or type(module).__name__ for name, module in named if has_offloaded_params(module)), None)
    if kept is not None:
        raise RuntimeError(
            f"accelerate keeps the values of {kept} on a disk or off the device (device_map, cpu_offload), where "
            "they cannot be changed or copied. Load the model whole, by from_pretrained without device_map"
        )


def with_values_in_memory(model: Model) -> Model:
    """The model; where accelerate keeps values on a disk or off the device, a copy with all of them on the CPU."""
    if not any(map(has_offloaded_params, model.modules())):
        return model
    twin, values = copy.deepcopy(model), dict[str, nn.Parameter]()
    for name, module in twin.named_modules():
        with align_module_device(module, "cpu"):
            values |= module.named_parameters(name, recurse=False)
    remove_hook_from_submodules(twin)  # gives buffers back
    vars(twin).pop("hf_device_map", None)
    twin.load_state_dict(values, strict=False, assign=True)
    if isinstance(twin, PreTrainedModel):
        twin.tie_weights()
    return twin


def require_unflattened(owners: Iterable[tuple[str, LambdaGate]]) -> None:
    """Raise RuntimeError, in all processes, if an s is no parameter of its gate: FSDP1 flattens s into shards."""
    for name, owner in owners:
        s = owner.raw_hardness
        if getattr(s, "_fsdp_flattened", False) or not isinstance(s, nn.Parameter):
            raise RuntimeError(
                f"the raw hardness of {name or 'a gate'} is no parameter of the gate, so its λ is not known. If FSDP1 "
                "has flattened it into shards, wrap with FSDP2 (fully_shard; fsdp_version: 2 in accelerate's config) "
                "or DistributedDataParallel. If it has a parametrization, remove that"
            )


def changeable_module(model: nn.Module, *, temporarily: bool = False) -> nn.Module:
    """The module to change; RuntimeError with the reason if it cannot be changed."""
    model = uncompiled(model)  # the compiled wrapper guards on the modules inside and compiles again
    for name, module in model.named_modules():
        where = f"its module {name!r}" if name else "it"
        # For one evaluation, an FSDP shard may be passed over if all ranks do so: Trainer has no unwrapped model then.
        sharded = "fsdp" in type(module).__module__.lower() and not temporarily
        if isinstance(module, DistributedDataParallel | DataParallel) or sharded:
            why = (
                f"wrapped by {type(module).__name__}, which has already taken stock of the parameters. Do the surgery "
                "before wrapping, or on the unwrapped model (accelerator.unwrap_model(model))"
            )
        elif type(module).__module__.startswith("peft.") and not temporarily:
            why = (
                f"{type(module).__name__} of PEFT, whose saved adapter says nothing of activations. Replace these "
                "before the adapter is put in, and substitute after merging: model = model.merge_and_unload()"
            )
        elif isinstance(module, torch.jit.ScriptModule):
            why = "TorchScript, whose code is fixed. Give the model from before torch.jit.script or torch.jit.trace"
        else:
            continue
        raise RuntimeError(f"the model cannot be changed: {where} is {why}")
    return model


_OWN = ("_parameters", "_buffers", "_modules")  # attributes of a module that a copy copies
_HOLDERS = (MethodType, CellType, functools.partial, Mapping, list, tuple, set, frozenset)


def independent_copy(model: Model) -> Model:
    """A deep copy that computes with its own weights, without accelerate's autocast; RuntimeError if that fails."""
    require_values_here(model.named_modules())
    # A weight that a hook computes (weight_norm) belongs to the graph of its last forward pass: deepcopy refuses it.
    made = [each for part in model.modules() for each in vars(part).values() if isinstance(each, Tensor)]
    with own_forward(model):
        twin = copy.deepcopy(model, {id(each): each.detach().clone() for each in made if not each.is_leaf})
    parts = [[(name, calls_of(module)) for name, module in each.named_modules()] for each in (model, twin)]
    if parts[0] != parts[1]:
        raise RuntimeError(f"{type(model).__name__} cannot be copied: its own __deepcopy__ gives other modules")
    originals = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}

    def is_known_to(value: Any) -> bool:
        # Python copies no functions, so `self.step = torch.compile(self._step)` would still run the original's modules.
        seen: set[int] = set()
        left = [value]
        while left:
            value = left.pop()
            if id(value) in originals:
                return True
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, FunctionType):
                named = [value.__globals__.get(name) for name in value.__code__.co_names]
                left += [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
                left += [found for found in named if id(found) in originals]
            elif isinstance(value, weakref.ref):
                left.append(value())
            elif isinstance(value, _HOLDERS):
                left += gc.get_referents(value)
        return False

    for name, module in twin.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _OWN and is_known_to(value):
                raise RuntimeError(
                    f"{type(model).__name__} cannot be copied: {f'{name}.{attribute}'.lstrip('.')} holds a function "
                    "that knows a module or tensor of the model from elsewhere (a closure, torch.compile or a "
                    "decorator of a bound method, a hook), and a copy would go on running the original. Make it a "
                    "method, decorate or compile it in the class, or remove the hook; after model.forward = "
                    "torch.compile(model.forward), `del model.forward`"
                )
    return twin


ComputedWeight: TypeAlias = tuple[str, str, list[nn.Module]]
"""(name of a module, name of its tensor, the parametrizations that computed the tensor)."""


def with_plain_weights(model: nn.Module) -> tuple[nn.Module, list[ComputedWeight]]:
    """(a copy in eval mode with plain weights in the place of computed ones, these weights); `model` if it has none.

    Raises ValueError for a norm that computes a weight by a hook.
    """
    for name, module in model.named_modules():
        if any(isinstance(hook, WeightNorm | SpectralNorm) for hook in module._forward_pre_hooks.values()):
            raise ValueError(
                f"a hook of torch.nn.utils.weight_norm or spectral_norm computes a weight of {name or 'the model'}. "
                "Use the function of this name in torch.nn.utils.parametrizations, or make the weight plain before the "
                "conversion (torch.nn.utils.remove_weight_norm, remove_spectral_norm)"
            )
    if not any(map(parametrize.is_parametrized, model.modules())):
        return model, []
    plain, found = independent_copy(model).eval(), list[ComputedWeight]()
    for name, module in [*plain.named_modules()]:
        if not parametrize.is_parametrized(module):
            continue
        kind = type(module)  # the copy has the class of the original, and the removal changes the class
        own = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
        module.__class__ = type(kind.__name__, kind.__bases__, own)
        for tensor, steps in [*module.parametrizations.items()]:
            found.append((name, tensor, [*steps]))
            parametrize.remove_parametrizations(module, tensor, leave_parametrized=True)
    return plain, found


@torch.no_grad()
def compute_again(model: nn.Module, weights: list[ComputedWeight]) -> tuple[str, ...]:
    """A sentence on the weights that stay plain, for a report. Changes `model` in place.

    A norm comes back where it gives the present weight: a weight norm always, a spectral norm where nothing changed.
    """
    plain = []
    for name, tensor, steps in weights:
        module = model.get_submodule(name)
        if not hasattr(module, tensor):  # another gate stands there now
            continue
        wanted: Tensor = getattr(module, tensor).detach().clone()
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # no right inverse
            for step in steps:
                parametrize.register_parametrization(module, tensor, step)
        if parametrize.is_parametrized(module, tensor):
            change, most = getattr(module, tensor) - wanted, wanted.abs().max() * torch.finfo(wanted.dtype).eps
            if bool((change.abs() <= _ROUNDING * most).all()):
                continue
            parametrize.remove_parametrizations(module, tensor, leave_parametrized=True)
            getattr(module, tensor).copy_(wanted)
        plain.append(f"{name}.{tensor}".removeprefix("."))
    if not plain:
        return ()
    return (
        f"{', '.join(plain)}: the norm or parametrization that computed {'it' if len(plain) == 1 else 'them'} is "
        "removed, because it cannot give the refitted weights (a spectral norm bounds them). To load the result into "
        "your own class, build these layers without it",
    )


def forget_quantizer(model: nn.Module) -> Iterator[str]:
    """The changes of a model's configs, so that weights from a quantized file (GGUF) are saved as floats.

    Changes `model` in place.
    """
    for name, module in model.named_modules():
        if getattr(module, "hf_quantizer", None) is not None or getattr(module, "is_quantized", False):
            module.hf_quantizer, module.is_quantized = None, False
            config = getattr(module, "config", None)
            if config is not None and getattr(config, "quantization_config", None) is not None:
                del config.quantization_config
                yield f"{name}.quantization_config removed".removeprefix(".") + ": the weights are floating point"
