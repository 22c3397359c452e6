"""A wider copy of the original: more units in each block, and a bias before every gate.

The added weights are zero, so the copy computes the same function.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_lgelu.graph.aims import LinearMap
from hf_lgelu.graph.layers import FedGate, Layer, Layers, affine_source, product_behind, views_back
from hf_lgelu.graph.maps import AffineOperation, read_geometry, shape_of
from hf_lgelu.graph.recording import Recording
from hf_lgelu.models.config_keys import (
    ConfigChange,
    UnsupportedConfigError,
    config_entries,
    plan_configs,
    plan_width_changes,
    write_configs,
)
from hf_lgelu.models.copies import independent_copy
from hf_lgelu.refit.kinks import MOST_KINKS

_SIZES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("out_features", "in_features"),
    Conv1D: ("nf", "nx"),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ("out_channels", "in_channels")),
    _BatchNorm: ("num_features",),
}
"""The layers that can be widened, and the names of their sizes."""


@dataclass(frozen=True)
class WiderOriginal:
    """A network with idle units that computes the same as the original."""

    model: nn.Module
    extra: Mapping[int, int] = field(default_factory=dict)  # {site: idle units in its block}
    share: float = 1.0  # the width as a share of the original's
    config_changes: tuple[ConfigChange, ...] = ()  # the changes of its config


@dataclass(frozen=True)
class Block:
    """A gate, the map before it and the single map after it: linear layers, or convolutions."""

    fed: FedGate
    before: AffineOperation  # `fed.before`, unless that is a BatchNorm between this map and the gate
    down: LinearMap

    @property
    def ahead(self) -> tuple[AffineOperation, ...]:
        """The operations of the units: the map before the gate, its BatchNorm, and the other half of a gated unit."""
        return tuple(dict.fromkeys((self.before, *self.fed.maps)))

    @property
    def maps(self) -> tuple[AffineOperation, ...]:
        """The operations `ahead`, and the map after the gate."""
        return (*self.ahead, self.down.operation)

    @property
    def has_linear_part(self) -> bool:
        """Whether units that are always on can compute the block's linear part: it has no windows and no BatchNorm."""
        geometries = (self.down.geometry, read_geometry(self.before))
        return self.before is self.fed.before and all(each and math.prod(each.kernel) == 1 for each in geometries)

    @property
    def up(self) -> AffineOperation:
        """The map that computes the linear function of a unit that is always on: W_up of a gated unit, else W_gate."""
        return self.fed.other or self.fed.before

    @property
    def width(self) -> int:
        """The number of hidden units."""
        return shape_of(self.down.operation.data)[self.down.operation.channel_axis or 0]


def find_blocks(recording: Recording, layers: Sequence[Layer], fed_gates: Sequence[FedGate]) -> list[Block]:
    """The gates with a map of their own right after them, or right after the product of a gated unit."""
    by_site = {fed.site: fed for fed in fed_gates}
    blocks: list[Block] = []
    for layer in layers:
        fed = by_site.get(layer.sites[0]) if len(layer.sites) == len(layer.maps) == 1 else None
        if fed is None or not fed.is_next:
            continue
        norm, down = fed.before, layer.maps[0].operation
        before = norm if norm.mixes else affine_source(recording, norm.data, norm.node)
        if before is None:
            continue
        call = fed.call
        source = product_behind(call) if fed.other is not None else call
        path = [*views_back(down.data, source)]
        node, alone = path[-1], all(len(each.users) == 1 for each in path)  # nothing else takes the units
        # A view may move other units to the axis; the other half may have another input.
        axis = down.channel_axis or 0
        whole = node is source and axis == norm.channel_axis and shape_of(source)[axis] == shape_of(down.data)[axis]
        whole &= fed.other is None or [*views_back(fed.other.data)][-1] is [*views_back(before.data)][-1]
        plain = all(
            each.mixes and each.channel_axis == axis and each.groups == 1 and read_geometry(each)
            for each in (before, fed.other, down)
            if each is not None
        )
        own = fed.other is None or fed.owns_other
        own &= all(each.is_direct for each in (before, fed.other, down) if each is not None)
        own &= recording.are_used_once(*before.parameters, *down.parameters)
        if whole and alone and plain and own and (fed.other is not None or product_behind(call) is None):
            blocks.append(Block(fed, before, layer.maps[0]))
    return blocks


def widen_original(model: nn.Module, recording: Recording, layers: Layers, budget: float) -> WiderOriginal:
    """A copy with at most `budget` times the units and a bias before the gates; `model` itself if nothing is added.

    `recording` is one of the model, and `layers` are its layers. All parts but the blocks (`find_blocks`) keep their
    width. Where no key of the config adds biases, the copy has no new biases (see always_on.py). Then it gets wider
    only if all blocks are gated units.

    Raises UnsupportedConfigError where the budget cannot be used.
    """
    blocks = blocks_to_widen(model, recording, layers)
    extra: dict[int, int] = {}
    for width in {block.width for block in blocks}:
        alike = [block for block in blocks if block.width == width]
        # More than an always-on unit for each input and MOST_KINKS - 1 copies of each unit would have no use.
        inputs = min(block.before.weight_in(model).shape[1] if block.has_linear_part else 0 for block in alike)
        more = min(int((budget - 1) * width + 1e-9), inputs + (MOST_KINKS - 1) * width)
        extra |= {block.fed.site: more for block in alike}
    is_wider = any(extra.values())
    if budget > 1 and not is_wider:
        raise UnsupportedConfigError(
            "no gate stands between linear layers or plain convolutions of its own that could have a whole unit more"
        )
    if not is_wider and all(block.fed.before.bias is not None for block in blocks):
        return WiderOriginal(model)
    try:
        wide, changes = padded(model, blocks, extra)
    except UnsupportedConfigError:
        if not is_wider:
            return WiderOriginal(model)
        if any(block.fed.other is None for block in blocks):
            raise
        wide, changes = padded(model, blocks, extra, biases=False)
    return WiderOriginal(wide, extra, 1 + sum(extra.values()) / sum(block.width for block in blocks), changes)


def blocks_to_widen(model: nn.Module, recording: Recording, layers: Layers) -> list[Block]:
    """The blocks that can have more units. Only shapes decide this: a config may have no key of the width."""
    blocks = find_blocks(recording, layers.layers, layers.fed_gates)
    return [block for block in blocks if all(_sizes(operation.module_in(model)) for operation in block.maps)]


def padded(
    model: nn.Module, blocks: Sequence[Block], extra: Mapping[int, int], *, biases: bool = True
) -> tuple[nn.Module, tuple[ConfigChange, ...]]:
    """(a copy with `extra` more units of zero weights in each block, by site; the changes of its config).

    `biases` adds a zero bias before each gate. Raises UnsupportedConfigError where no key gives the new shape.
    """
    wide = independent_copy(model)
    for block in blocks:
        for operation in block.ahead:
            _pad(wide, operation, operation.output_axis, extra[block.fed.site])
        _pad(wide, block.down.operation, block.down.operation.input_axis, extra[block.fed.site])
        if biases and block.fed.before.bias is None:  # families have biases in all maps of a block, or in none
            for operation in (each for each in block.maps if each.bias is None):
                weight, module = wide.get_parameter(operation.weight_name), operation.module_in(wide)
                if getattr(module, "bias", False) is not None:
                    raise UnsupportedConfigError(
                        f"{type(module).__name__} at {operation.weight_name} cannot be given a bias"
                    )
                module.bias = nn.Parameter(weight.new_zeros(weight.shape[operation.output_axis]), weight.requires_grad)
    widths = {block.before.weight_name: (block.width, extra[block.fed.site]) for block in blocks}
    return wide, write_configs(plan_configs(wide, widths, lambda root, inside: _plan(root, dict(inside.values()))))


def _pad(wide: nn.Module, operation: AffineOperation, axis: Any, extra: int) -> None:
    """Add `extra` zeros along an axis of the weight, and to the bias where that axis counts outputs."""
    module, is_output = operation.module_in(wide), axis == operation.output_axis
    axes = {operation.weight_name: axis} | ({operation.bias.name: 0} if operation.bias and is_output else {})
    for parameter, along in axes.items():
        owner, _, attribute = parameter.rpartition(".")
        old = wide.get_parameter(parameter)
        longer = F.pad(old.detach(), [*[0] * 2 * (old.ndim - 1 - along), 0, extra])  # the last axis comes first
        setattr(wide.get_submodule(owner), attribute, nn.Parameter(longer, old.requires_grad))
    name = _sizes(module)[0 if is_output else 1]
    setattr(module, name, getattr(module, name) + extra)
    for statistic, old in module.named_buffers(recurse=False) if isinstance(module, _BatchNorm) else ():
        if old.ndim:
            setattr(module, statistic, F.pad(old, [0, extra]))


def _sizes(module: nn.Module) -> tuple[str, ...]:
    return next((names for kind, names in _SIZES.items() if isinstance(module, kind)), ())


def _plan(root: PreTrainedModel, more: Mapping[int, int]) -> list[ConfigChange]:
    """The changes of a config so that it builds exactly the tensors that `root` has now; `more` is {width: units}."""

    def resized(value: Any) -> Any:
        if isinstance(value, list):
            return [resized(each) for each in value]
        value = min(more) if value is None and any(more.values()) else value
        return value + more.get(value, 0) if isinstance(value, int) else value

    entries = config_entries(root.config)
    biases = [ConfigChange(path, False, True) for path, value in entries if value is False and "bias" in path[-1]]
    changes = plan_width_changes(root, resized, [[], *([bias] for bias in biases)])
    if changes is None:
        raise UnsupportedConfigError(
            f"no key of {type(root.config).__name__} builds {type(root).__name__} with {max(more.values())} more units "
            "in each block, with a bias before the gates or without"
        )
    return changes
