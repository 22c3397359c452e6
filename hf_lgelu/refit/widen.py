"""More units than the original has, for what a ReLU unit cannot do: be linear.

With one ReLU per channel, φ(z) ≈ a·ReLU(z - c) + b + d·z. What b and d make is linear in the block's input x: in a
gated unit W_down·diag(b)·W_up·x, in a plain one W_down·diag(d)·W_gate·x. Units that are always on carry it, of the kind
that the block has anyway: in a gated unit gate weight 0 and gate bias 1, in a plain one a bias so large that the ReLU
never cuts. There are as many as the budget has, so up and down are the factors of the best approximation of that rank
in the metric of the block's inputs.

First the original is written into the wider architecture, padded with zeros: the same function, and everything that
compares the two networks sees one shape.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_lgelu.models.config_keys import (
    ConfigChange,
    UnsupportedConfigError,
    apply_changes,
    pretrained_roots,
    write_config_changes,
)
from hf_lgelu.models.dataflow.affine_operations import AffineOperation
from hf_lgelu.models.dataflow.trace import operation_name
from hf_lgelu.models.example_run import run_example
from hf_lgelu.models.sites import ActivationSite
from hf_lgelu.refit.folds import Folds
from hf_lgelu.refit.layers import Layer, Layers, LinearMap
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.placement import (
    Basis,
    GateUnit,
    Placement,
    find_gate_units,
    fit_placement,
    gather_placements,
    product_behind,
    write_placement,
)
from hf_lgelu.refit.program import Program

ALWAYS_ON = 8.0
"""Standard deviations of its input by which a plain unit's bias keeps it on."""

_LEAST_VARIANCE = 1e-6  # of the mean one, added to the metric: directions that the inputs do not show


@dataclass(frozen=True)
class Block:
    """A gate unit with the one map behind it, all of them plain linear layers on the last axis."""

    unit: GateUnit
    down: LinearMap

    @property
    def maps(self) -> tuple[AffineOperation, ...]:
        """Before the gate, beside it (of a gated unit), behind it."""
        return (*self.unit.maps, self.down.operation)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all weights and biases."""
        return tuple(dict.fromkeys((*self.unit.parameters, *self.down.parameters)))

    @property
    def width(self) -> int:
        """Units."""
        return self.down.width


def find_blocks(program: Program, layers: Sequence[Layer], units: Sequence[GateUnit]) -> list[Block]:
    """The gates behind which stands one linear layer of its own, with nothing between but a gated unit's product."""
    by_site = {unit.site: unit for unit in units}
    refitted = {consumer.operation.weight for layer in layers for consumer in layer.maps}
    found = []
    for layer in layers:
        unit = by_site.get(layer.sites[0]) if len(layer.sites) == len(layer.maps) == 1 else None
        if unit is None or layer.maps[0].geometry.kind != "linear" or unit.before.weight in refitted:
            continue
        call = program.flow.calls[unit.site][0]
        source = product_behind(call) if unit.other is not None else call
        node = layer.maps[0].data
        while node is not source and operation_name(node) in ("clone", "dropout", "view", "reshape", "_unsafe_view"):
            node = node.args[0]
        linear = all(
            operation.mixes and operation.channel_axis == -1 for operation in (unit.before, layer.maps[0].operation)
        )
        if node is source and linear and (unit.other is not None or product_behind(call) is None):
            found.append(Block(unit, layer.maps[0]))
    return found


@dataclass(frozen=True)
class Room:
    """A network that computes what the original does, with `extra` idle units in every block.

    `share` is the width as a share of the original's; `config_changes` what its config says otherwise.
    """

    model: nn.Module
    extra: int = 0
    share: float = 1.0
    config_changes: tuple[ConfigChange, ...] = ()


def make_room(model: nn.Module, program: Program, layers: Sequence[Layer], sites: int, width_budget: float) -> Room:
    """At most `width_budget` times the units, and a bias before every gate; `model` itself where nothing is missing.

    `program` and `layers` are of the model's trace, `sites` is the number of its gates. Without a budget, a family
    whose config has no key for the biases does without them.

    Raises UnsupportedConfigError where the budget cannot be used.
    """
    blocks = find_blocks(program, layers, find_gate_units(program))
    extra = 0
    if width_budget > 1:
        if len(blocks) < sites or len({block.width for block in blocks}) != 1:
            raise UnsupportedConfigError(
                f"of {sites} gates {len(blocks)} stand in blocks of two or three linear layers of their own, and these "
                "must be all, of one width"
            )
        width = blocks[0].width
        inputs = min(model.get_parameter(b.unit.before.weight).shape[b.unit.before.input_axis] for b in blocks)
        extra = min(int((width_budget - 1) * width + 1e-9), inputs)
    if not extra and all(block.unit.before.bias is not None for block in blocks):
        return Room(model)
    try:
        wide, changes = padded(model, blocks, extra)
    except UnsupportedConfigError:
        if extra:
            raise
        return Room(model)
    return Room(wide, extra, 1 + extra / blocks[0].width, changes)


def padded(model: nn.Module, blocks: Sequence[Block], extra: int) -> tuple[nn.Module, tuple[ConfigChange, ...]]:
    """The same function with `extra` more units in every block, all of their weights zero, and a bias before each gate.

    `model` stays as it is; the config of the copy says its new shape, and what was changed of it is given back.

    Raises UnsupportedConfigError where no key of the config does.
    """
    wide = copy.deepcopy(model)
    for block in blocks:
        _pad_block(wide, block, extra)
    changes: tuple[ConfigChange, ...] = ()
    for name, root in pretrained_roots(wide):
        prefix = f"{name}." if name else ""
        inside = [block for block in blocks if block.unit.before.weight_name.startswith(prefix)]
        if inside:
            planned = _plan(root, {block.width for block in inside}, extra)
            write_config_changes(root, planned)
            changes += tuple(planned)
    return wide, changes


def _pad_block(wide: nn.Module, block: Block, extra: int) -> None:
    unit = block.unit
    _pad(wide, unit.before, unit.before.output_axis, extra)
    if unit.other is not None:
        _pad(wide, unit.other, unit.other.output_axis, extra)
    _pad(wide, block.down.operation, block.down.operation.input_axis, extra)
    if unit.before.bias is None:  # families have biases in all maps of a block, or in none
        for operation in block.maps:
            if operation.bias is None:
                _add_bias(wide, operation)


def _pad(wide: nn.Module, operation: AffineOperation, axis: int | None, extra: int) -> None:
    if axis is None:
        raise UnsupportedConfigError(f"{operation.weight} mixes nothing, and cannot be widened")
    weight = wide.get_parameter(operation.weight_name)
    _put(wide, operation.weight_name, _with_zeros(weight, axis, extra))
    if operation.bias is not None and axis == operation.output_axis:
        _put(wide, operation.bias, _with_zeros(wide.get_parameter(operation.bias), 0, extra))
    module, is_output = _owner(wide, operation), axis == operation.output_axis
    names = {nn.Linear: ("out_features", "in_features"), Conv1D: ("nf", "nx")}.get(type(module))
    if names is None:
        raise UnsupportedConfigError(
            f"{operation.weight} belongs to a {type(module).__name__}, which cannot be widened"
        )
    name = names[0 if is_output else 1]
    if hasattr(module, name):
        setattr(module, name, getattr(module, name) + extra)


def _with_zeros(parameter: nn.Parameter, axis: int, extra: int) -> Tensor:
    shape = list(parameter.shape)
    shape[axis] = extra
    return torch.cat([parameter.detach(), parameter.new_zeros(shape)], axis)


def _add_bias(wide: nn.Module, operation: AffineOperation) -> None:
    weight = wide.get_parameter(operation.weight)
    module = _owner(wide, operation)
    if getattr(module, "bias", False) is not None:
        raise UnsupportedConfigError(f"{type(module).__name__} at {operation.weight} cannot be given a bias")
    module.bias = nn.Parameter(weight.new_zeros(weight.shape[operation.output_axis]), weight.requires_grad)


def _owner(model: nn.Module, operation: AffineOperation) -> nn.Module:
    return model.get_submodule(operation.weight_name.rpartition(".")[0])


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    old = model.get_parameter(name)
    setattr(model.get_submodule(owner), attribute, nn.Parameter(value, old.requires_grad))


def _plan(root: PreTrainedModel, widths: set[int], extra: int) -> list[ConfigChange]:
    """The changes of a config after which it builds exactly the parameters that `root` has now."""
    shapes = {name: tuple(value.shape) for name, value in root.named_parameters()}
    entries = list(_entries(root.config.to_dict()))
    larger = [
        ConfigChange(path, value, value + extra)
        for path, value in entries
        if extra and type(value) is int and value in widths
    ]
    # GPT-2 leaves the width open: four times the hidden size.
    larger += [
        ConfigChange(path, None, min(widths) + extra)
        for path, value in entries
        if extra and value is None and ("inner" in path[-1] or "intermediate" in path[-1])
    ]
    biases = [ConfigChange(path, False, True) for path, value in entries if value is False and "bias" in path[-1]]
    for size, bias in itertools.product([[change] for change in larger] + [larger, []], [[], *([b] for b in biases)]):
        if _built_shapes(root, [*size, *bias]) == shapes:
            return [*size, *bias]
    raise UnsupportedConfigError(
        f"no key of {type(root.config).__name__} builds {type(root).__name__} with {extra} more units in each block "
        "and a bias before the gates"
    )


def _entries(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _entries(value, (*path, key))
        else:
            yield (*path, key), value


def _built_shapes(root: PreTrainedModel, changes: list[ConfigChange]) -> Mapping[str, tuple[int, ...]] | None:
    try:
        config: PreTrainedConfig = apply_changes(root.config, changes)
        with torch.device("meta"):
            built = type(root)(config)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None  # a key that is no part of this model's shape
    return {name: tuple(value.shape) for name, value in built.named_parameters()}


@torch.no_grad()
def gather_inputs(model: nn.Module, blocks: Sequence[Block], folds: Folds) -> dict[int, Moments]:
    """Sums over the inputs of every block in the original, over one batch of each fold, by site."""
    sums: dict[int, Moments] = {}
    for block in blocks:
        weight = model.get_parameter(block.unit.before.weight_name)
        sums[block.unit.site] = Moments.zeros(1, weight.shape[block.unit.before.input_axis or 0], 1, weight.device)
    mask: Tensor | None = None

    def watch(block: Block) -> Any:
        def see(module: nn.Module, inputs: tuple) -> None:
            rows = inputs[0].detach()
            rows = rows[mask.to(rows.device)] if mask is not None and mask.shape == rows.shape[:-1] else rows
            rows = rows.reshape(-1, 1, rows.shape[-1])
            nothing = rows.new_zeros(len(rows), 1, 1)
            sums[block.unit.site].add(rows, nothing, nothing)

        return see

    with ExitStack() as hooks:
        for block in blocks:
            handle = _owner(model, block.unit.before).register_forward_pre_hook(watch(block))
            hooks.callback(handle.remove)
        for fold in folds.folds:
            for batch in fold[:1]:
                loaded = batch.load()
                given = loaded.tensors.get("attention_mask")
                mask = None if given is None else given.bool()
                run_example(model, loaded.inputs)
    return {site: total.reduce_over_processes() for site, total in sums.items()}


@torch.no_grad()
def low_rank(matrix: Tensor, second_moments: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U (o, r) and V (r, i) with the least Σ‖(matrix - UV)x‖² over inputs x whose mean xxᵀ is `second_moments`.

    Each row of V has unit mean square over the inputs. float64.
    """
    matrix, second_moments = matrix.double(), second_moments.double()
    identity = torch.eye(len(second_moments), dtype=torch.float64, device=second_moments.device)
    metric = second_moments + _LEAST_VARIANCE * second_moments.diagonal().mean().clamp(min=1e-12) * identity
    root = torch.linalg.cholesky(metric)
    left, values, right = torch.linalg.svd(matrix @ root, full_matrices=False)
    rank = min(rank, len(values))
    return left[:, :rank] * values[:rank], torch.linalg.solve_triangular(root, right[:rank], upper=False, left=False)


@torch.no_grad()
def write_always_on(
    converted: nn.Module, block: Block, placement: Placement, inputs: Moments, width: int, extra: int
) -> None:
    """Give the units from `width` on what is linear in the block, before the slopes and kinks are written."""
    unit, down = block.unit, block.down.operation
    mean = inputs.feature_sum[0] / inputs.count
    second = inputs.gram[0] / inputs.count
    gated = unit.other is not None
    carrier = unit.before if unit.other is None else unit.other
    through = _oriented(converted, carrier)[:width].double()
    factor = placement.constant if gated else placement.line
    matrix = (_oriented(converted, down)[:, :width].double() * factor[:width]) @ through
    if not gated:  # around the mean: the constant is the intercept's
        second = second - torch.outer(mean, mean)
    down_columns, up_rows = low_rank(matrix, second, extra)
    new = slice(width, width + len(up_rows))
    _oriented(converted, carrier)[new] = up_rows.to(_oriented(converted, carrier).dtype)
    _oriented(converted, down)[:, new] = down_columns.to(_oriented(converted, down).dtype)
    bias = converted.get_parameter(unit.before.bias)
    if gated:
        bias[new] = 1.0
        return
    offsets = ALWAYS_ON - up_rows @ mean
    bias[new] = offsets.to(bias.dtype)
    if down.bias is not None:
        converted.get_parameter(down.bias).sub_((down_columns @ offsets).to(bias.dtype))


def _oriented(model: nn.Module, operation: AffineOperation) -> Tensor:
    """A view of a map's weight as (outputs, inputs)."""
    weight = model.get_parameter(operation.weight).detach()
    return weight if operation.output_axis == 0 else weight.T


def movable(model: nn.Module, block: Block, extra: int) -> dict[str, Tensor]:
    """{parameter of a block: 1 where a gradient may move it, 0 in units that are always on}, for those that differ.

    Of a plain block: its units always on have features far from zero, and steps on their weights are steps on the
    block's constant, times that. In a gated unit they are as other units.
    """
    if not extra or block.unit.other is not None:
        return {}
    masks = {}
    before, down = block.unit.before, block.down.operation
    for name, axis in ((before.weight, before.output_axis), (before.bias, 0), (down.weight, down.input_axis)):
        if name is not None and axis is not None:
            mask = torch.ones_like(model.get_parameter(name))
            mask.narrow(axis, block.width - extra, extra).zero_()
            masks[name] = mask
    return masks


class Preparation:
    """What is written into the converted network beside the refits: kinks and slopes, and units that are always on.

    A gate's map that is itself refitted gets its slopes and kinks when that is done, all others at the start.
    """

    def __init__(
        self, original: nn.Module, sites: Sequence[ActivationSite], folds: Folds, program: Program, found: Layers,
        extra: int,
    ) -> None:  # fmt: skip
        """`original` has room for `extra` units in each block; `program` and `found` are of its trace."""
        units = [unit for unit in find_gate_units(program) if unit.before.bias is not None]
        blocks = find_blocks(program, found.layers, units) if extra else []
        sums = gather_placements(original, sites, units, folds)
        inputs = gather_inputs(original, blocks, folds)
        self._extra, self._inputs = extra, inputs
        self._blocks = {block.unit.site: block for block in blocks}
        self._units = {unit.site: unit for unit in units}
        self.placements = {
            unit.site: fit_placement(sums[unit.site], _basis(unit, unit.site in self._blocks)) for unit in units
        }
        self._waiting = dict(self._refitted_before(found.layers))

    def _refitted_before(self, layers: Sequence[Layer]) -> Iterator[tuple[int, set[int]]]:
        """{index of a layer: gates whose input comes from its maps}."""
        for index, layer in enumerate(layers):
            nodes = {node for consumer in layer.maps for node in (consumer.node, *consumer.target.path)}
            sites = {site for site, unit in self._units.items() if unit.before.node in nodes}
            if sites:
                yield index, sites

    def begin(self, converted: nn.Module) -> None:
        """Write what waits for no refit."""
        self._write(converted, self._units.keys() - set().union(*self._waiting.values()))

    def behind_layer(self, converted: nn.Module, index: int) -> None:
        """Write what waited for the refit of a layer."""
        self._write(converted, self._waiting.get(index, set()))

    def _write(self, converted: nn.Module, due: set[int]) -> None:
        for site in sorted(due):
            placement = self.placements[site]
            if site in self._blocks:
                block = self._blocks[site]
                write_always_on(converted, block, placement, self._inputs[site], block.width - self._extra, self._extra)
            write_placement(converted, self._units[site], placement)


def _basis(unit: GateUnit, has_room: bool) -> Basis:
    if unit.other is None:
        return "line"
    return "constant" if has_room else "relu"
