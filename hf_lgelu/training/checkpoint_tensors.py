"""The tensors of a checkpoint, put into the model that it is of where transformers' Trainer cannot."""

import functools
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from accelerate.utils import extract_model_from_parallel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from hf_lgelu.models.sites import uncompiled_name


def checkpoint_keys(folder: str) -> set[str]:
    """The names of a checkpoint's tensors; none where it has no weights of a whole model (FSDP's, adapters)."""
    keys: set[str] = set()
    for file in _weight_files(folder):
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as tensors:
                keys.update(tensors.keys())
        else:
            keys.update(torch.load(file, map_location="meta", weights_only=True))
    return keys


def load_renamed(folder: str, model: nn.Module) -> bool:
    """Load a checkpoint whose tensors have other names than the model's; False, and nothing done, where they are its.

    transformers 5 saves many families (ViT, DeiT, every mixture of experts) under the names that the Hub knows, some
    of them cut or joined, and only `from_pretrained` takes them back. Trainer loads by the model's own names and no
    more than warns, so a run would go on from random weights, and the best epoch would not be put back. Here each
    tensor goes to where `save_pretrained` took it from: into this model, whatever was changed in it since it was
    built, and in its own dtypes.

    Raises ValueError if the checkpoint lacks a tensor of the model, or holds another: what is missing would be random.
    """
    keys = checkpoint_keys(folder)
    if not keys:
        return False
    state = model.state_dict()
    if keys <= state.keys():
        _require_all_tensors(folder, model, state, keys)
        return False
    unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
    state = unwrapped.state_dict()
    places = _places(unwrapped, state)
    if not keys <= places.names:
        places = _places(unwrapped, {uncompiled_name(name): tensor for name, tensor in state.items()})
    _require_all_tensors(folder, unwrapped, places.whole | dict.fromkeys(places.cut), keys)
    _copy(folder, places)
    return True


@dataclass(frozen=True)
class _Places:
    """Where the tensors of a file belong, by their names there.

    Args:
        whole: the model's tensor itself, under another name or its own.
        cut: for each element, its number in `rest`.
        rest: the model's other tensors, numbered through.
    """

    whole: dict[str, Tensor]
    cut: dict[str, Tensor]
    rest: list[Tensor]

    @property
    def names(self) -> set[str]:
        return self.whole.keys() | self.cut.keys()


def _places(model: nn.Module, state: dict[str, Tensor]) -> _Places:
    """What `save_pretrained` would call the tensors of `state`."""
    if not isinstance(model, PreTrainedModel):
        return _Places(state, {}, [])
    empty = {name: tensor.to("meta", copy=True) for name, tensor in state.items()}
    whose = {id(tensor): name for name, tensor in empty.items()}
    saved = revert_weight_conversion(model, empty)
    whole = {name: whose[id(tensor)] for name, tensor in saved.items() if id(tensor) in whose}
    found = set(whole.values())
    rest = {name: tensor for name, tensor in state.items() if name not in found}
    # What joins, cuts and turns tensors does the same to the numbers of their elements.
    starts = itertools.accumulate((tensor.numel() for tensor in rest.values()), initial=0)
    numbers = {
        name: torch.arange(start, start + tensor.numel()).view(tensor.shape)
        for (name, tensor), start in zip(rest.items(), starts, strict=False)
    }
    cut = revert_weight_conversion(model, numbers) if numbers else {}
    return _Places({name: state[own] for name, own in whole.items()}, cut, list(rest.values()))


def _require_all_tensors(folder: str, model: nn.Module, places: Mapping[str, Tensor | None], keys: set[str]) -> None:
    """Refuse a checkpoint with one tensor too many, or one too few that shares no memory with one that is there."""
    held = {tensor.data_ptr() for name, tensor in places.items() if name in keys and tensor is not None}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    missing = {
        name
        for name, tensor in places.items()
        if name not in keys and (tensor is None or tensor.data_ptr() not in held)
    }
    if lost := sorted(missing - ignored | keys - places.keys()):
        raise ValueError(
            f"the checkpoint {folder} and the model do not hold the same tensors ({len(lost)} differ: "
            f"{', '.join(lost[:4])}{', ...' if len(lost) > 4 else ''}), and what is missing would be random. Resume "
            "with the model as it was when the checkpoint was written"
        )


@torch.no_grad()
def _copy(folder: str, places: _Places) -> None:
    """Copy a checkpoint's tensors to the model's. Nothing is copied where one has another shape."""
    tensors = dict(_tensors(folder))
    for name, tensor in tensors.items():
        shape = (places.whole[name] if name in places.whole else places.cut[name]).shape
        if tensor.shape != shape:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} in the checkpoint {folder} and {tuple(shape)} in the model. Resume "
                "with the model as it was when the checkpoint was written"
            )
    sizes = [tensor.numel() for tensor in places.rest]
    values = torch.empty(
        sum(sizes),
        dtype=functools.reduce(torch.promote_types, (tensors[name].dtype for name in places.cut), torch.bool),
    )
    is_there = torch.zeros(sum(sizes), dtype=torch.bool)
    for name, numbers in places.cut.items():
        values[numbers.flatten()] = tensors[name].flatten().to(values.dtype)
        is_there[numbers.flatten()] = True
    if not is_there.all():
        raise ValueError(
            f"transformers wrote the checkpoint {folder} with other numbers than the model's, not only under other "
            "names and at other places, so it cannot be taken back exactly. Begin anew from from_pretrained(...) of it"
        )
    for name, own in places.whole.items():
        if name in tensors:
            own.copy_(tensors[name])
    for own, value in zip(places.rest, values.split(sizes), strict=True):
        own.copy_(value.view(own.shape))


def _tensors(folder: str) -> Iterator[tuple[str, Tensor]]:
    for file in _weight_files(folder):
        if file.endswith(".safetensors"):
            yield from load_file(file).items()
        else:
            yield from torch.load(file, map_location="cpu", weights_only=True, mmap=True).items()


def _weight_files(folder: str) -> list[str]:
    """Those that Trainer would read, in its order."""
    for index, whole in ((SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME), (WEIGHTS_INDEX_NAME, WEIGHTS_NAME)):
        if os.path.isfile(os.path.join(folder, whole)):
            return [os.path.join(folder, whole)]
        if os.path.isfile(os.path.join(folder, index)):
            with open(os.path.join(folder, index), encoding="utf-8") as file:
                names = set(json.load(file)["weight_map"].values())
            return [os.path.join(folder, name) for name in sorted(names)]
    return []
