"""The rung "place": before the refit, it fits kinks and slopes, and gives the added units of each block their work.

The map behind the gates mixes all channels and has an intercept. So it can supply a constant and a linear function of z
by itself, and the ReLU needs to fit only the rest of φ(z). For each channel, a and c minimize
‖φ(z) - a·ReLU(z - c) - b - d·z‖, and b and d are dropped. Since a·ReLU(z - c) = ReLU(a·z - a·c) for a > 0, slope a and
kink c go into the map before the gate: its rows times a, its bias (bias - c)·a. The network keeps its shape. A
BatchNorm before the gate takes slope and kink into its scale and shift in the same way.

In a gated unit, φ(z)·u, a constant in φ becomes linear in the block's input, and the map behind cannot supply it. So
the fit has no b and no d; with added units, which can supply the constant, it has b. The rows are weighted by u² where
the unit owns its other half.

The units added to a block are of two kinds. Units that are always on (always_on.py) compute the linear part; a block
has at most as many as it has inputs. Copies of a unit have a kink of their own: K ReLUs fit a gate better than a single
ReLU. Each added unit goes where it reduces the block's mean square error most, on the original's inputs. For a unit
that is always on, the gain is a squared singular value. For a copy, the gain is that of the gate's least squares times
the square of the unit's column in the map behind, as if the errors of channels were independent.
"""

import functools
import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_lgelu.models.batches import Batch
from hf_lgelu.models.channels import one_module_per_site
from hf_lgelu.models.config_keys import UnsupportedConfigError
from hf_lgelu.models.example_run import calls_seen, evaluation_mode, forward_hooks, run_example
from hf_lgelu.models.sites import ActivationSite
from hf_lgelu.refit.always_on import find_directions, gather_inputs, linear_part, write_always_on
from hf_lgelu.refit.folds import Folds
from hf_lgelu.refit.gate_units import GateUnit, find_gate_units
from hf_lgelu.refit.kinks import MOST_KINKS, Basis, Kinks, Placement, PlacementSums, first_of, fit_kinks, fit_placement
from hf_lgelu.refit.layers import Layers, find_layers
from hf_lgelu.refit.layerwise import Refit, Task, WiderOriginal
from hf_lgelu.refit.program import Program, Programs
from hf_lgelu.refit.verdict import ConversionRefusedError
from hf_lgelu.refit.weights import add_constant, oriented
from hf_lgelu.refit.widen import Block, find_blocks, widen_original

PLACEMENT_ROWS = 4096
"""The approximate number of rows that a placement is fitted on: three numbers a channel need no more."""


class Copies(NamedTuple):
    """Added units that copy others: for each, the unit that it copies, its slope and its kink."""

    sources: Tensor
    slopes: Tensor
    kinks: Tensor


class Shares(NamedTuple):
    """The work of the added units: how many are always on, (channels,) the ReLUs of each channel, and the copies."""

    always_on: int
    counts: Tensor
    copies: Copies


def share_out(fits: Sequence[Kinks], energies: Tensor, linear: Tensor, units: int) -> Shares:
    """The work of the added units that leaves the least error, summed over channels and the linear part.

    Args:
        fits: the fits with 1, 2, ... ReLUs a channel.
        energies: (channels,) the squares of which `unexplained` is a share.
        linear: the error that each further unit that is always on takes away, in falling order.
        units: the number of added units; there may be more than can be used.
    """
    left = torch.stack([fit.unexplained * energies for fit in fits])  # (K, channels)
    # A gain counts at most as much as the gain before, so that no channel gets its third ReLU before its second.
    gains = torch.where(torch.isfinite(left[1:]), left[:-1] - left[1:], 0.0).clamp(min=0).cummin(0).values
    gains = torch.where(torch.isfinite(left[0]), gains, -1.0)
    every = torch.cat([linear.to(gains.device), gains.flatten()])
    taken = every.argsort(descending=True, stable=True)[: min(units, int((every >= 0).sum()))]
    copied = taken[taken >= len(linear)] - len(linear)
    counts = 1 + torch.bincount(copied % gains.shape[1], minlength=gains.shape[1])
    found = [
        (at, fit.slopes[at, place], fit.kinks[at, place])
        for number, fit in enumerate(fits[1:], 2)
        for at in [(counts == number).nonzero()[:, 0]]
        for place in range(1, number)
    ]
    copies = Copies(*(torch.cat(parts) for parts in zip(*found, strict=True)))
    return Shares(len(taken) - len(copied), counts, copies)


@torch.no_grad()
def write_copies(
    converted: nn.Module, block: Block, copies: Copies, start: int, direction: Tensor | None = None
) -> None:
    """Write copies into the units from `start` on, before slopes and kinks are written into the copied units.

    The size of a copy's slope goes into the rows before the gate, its sign into the column behind. `direction` is that
    of `add_constant`.
    """
    before, other, down = block.unit.before, block.unit.other, block.down.operation
    new = slice(start, start + len(copies.sources))
    sources = copies.sources.to(oriented(converted, down).device)
    slopes, kinks = (part.to(sources.device) for part in (copies.slopes, copies.kinks))
    rows = oriented(converted, before)
    rows[new] = (rows[sources].double() * slopes.abs()[:, None]).to(rows.dtype)
    constants = -kinks
    if before.bias is not None:
        constants = converted.get_parameter(before.bias)[sources].double() - kinks
    add_constant(converted, before, new, constants * slopes.abs(), direction)
    if other is not None:
        oriented(converted, other)[new] = oriented(converted, other)[sources]
        if other.bias is not None:
            converted.get_parameter(other.bias)[new] = converted.get_parameter(other.bias)[sources]
    columns = oriented(converted, down)
    columns[:, new] = columns[:, sources] * slopes.sign().to(columns.dtype)


class Place(Refit):
    """The rung that refits behind ReLUs with fitted slopes and kinks, in blocks that may have more units.

    A map before a gate that is itself refitted gets slopes and kinks after its refit; all other maps get them first.
    """

    effort = "place"

    def __init__(self, task: Task) -> None:
        """Raises ConversionRefusedError where the blocks cannot be widened as asked for."""
        super().__init__(task)
        if task.config.width > 1:
            _ = self.original  # refused before the work

    @functools.cached_property
    def original(self) -> WiderOriginal:
        task, width = self.task, self.task.config.width
        with evaluation_mode(task.model):
            program, sites = task.programs.of(task.folds.first), task.programs.sites
            found = find_layers(program, task.model, sites)
            try:
                return widen_original(task.model, program, found.layers, len(sites), width)
            except UnsupportedConfigError as error:
                keep = task.plan.keep
                kept = "".join(f" {name} is kept, so its block stays as wide as it was." for name in keep)
                ways = "Keep no gate, or use width=1" if keep else "Use width=1"
                raise ConversionRefusedError(f"width={width:g}: {error}.{kept} {ways}") from error

    def prepare(self, programs: Programs, program: Program, found: Layers) -> None:
        """Find the slopes and kinks of all gates, and the work of the added units."""
        original, sites, extra = programs.model, programs.sites, self.original.extra
        every = find_gate_units(program)
        directions = find_directions(original, every, self.task.folds)
        units = [unit for unit in every if unit.before.bias is not None or unit.site in directions]
        blocks = find_blocks(program, found.layers, units) if extra else []
        wide = {block.unit.site for block in blocks}
        narrow = [site.name for index, site in enumerate(sites) if index not in wide] if extra else []
        if narrow:
            raise ConversionRefusedError(
                f"the blocks of {', '.join(narrow[:4])}{' and so on' if len(narrow) > 4 else ''} cannot be widened: "
                "the map before the gate has no bias, no key of the config gives it one, and its inputs have no "
                "direction that is the same for all. Use width=1"
            )
        sums = gather_placements(original, sites, units, self.task.folds)
        self._inputs = gather_inputs(original, [block.unit for block in blocks], self.task.folds.spread)
        self._blocks = {block.unit.site: block for block in blocks}
        self._shares: dict[int, Shares] = {}
        self._sizes: dict[int, float] = {}
        placements: dict[int, Placement] = {}
        for unit in units:
            site, basis = unit.site, _basis(unit, unit.site in self._blocks)
            if site in self._blocks:
                fits = fit_kinks(sums[site], basis, self._most_kinks(site))
                self._sizes[site] = _size(sums[site], unit.other is not None)
                self._shares[site] = self._shared_out(original, site, fits, sums[site])
                placements[site] = first_of(fits, self._shares[site].counts)
            else:
                placements[site] = fit_placement(sums[site], basis)
        self._units, self._placements = {unit.site: unit for unit in units}, placements
        self._directions = directions
        self._waiting: dict[int, set[int]] = {}  # {index of a layer: gates whose input comes from its maps}
        for index, layer in enumerate(found.layers):
            nodes = {node for consumer in layer.maps for node in (consumer.node, *consumer.aim.path)}
            self._waiting[index] = {unit.site for unit in units if unit.before.node in nodes}

    def write_first(self, student: nn.Module) -> None:
        """Write the slopes and kinks that wait for no refit."""
        self._write(student, self._units.keys() - set().union(*self._waiting.values()))

    def write_behind(self, student: nn.Module, index: int) -> None:
        """Write the slopes and kinks that waited for the refit of a layer."""
        self._write(student, self._waiting[index])

    def _most_kinks(self, site: int) -> int:
        """The most ReLUs that are tried for a channel: twice as many copies as an even spread would give, and two."""
        even = self.original.extra / (self._blocks[site].width - self.original.extra)
        return min(MOST_KINKS, 2 + math.ceil(2 * even))

    def _shared_out(self, original: nn.Module, site: int, fits: Sequence[Kinks], sums: PlacementSums) -> Shares:
        block = self._blocks[site]
        columns = oriented(original, block.down.operation).double().square().sum(0).to(sums.square.device)
        alone = first_of(fits, torch.ones(len(columns), dtype=torch.long))
        linear = linear_part(original, block, alone, self._inputs[site], block.width - self.original.extra)
        return share_out(fits, sums.square * columns / sums.rows, linear.best_gains(), self.original.extra)

    def _write(self, student: nn.Module, due: set[int]) -> None:
        for site in sorted(due):
            placement, direction = self._placements[site], self._directions.get(site)
            if site in self._blocks:
                block, shares, width = (
                    self._blocks[site],
                    self._shares[site],
                    self._blocks[site].width - self.original.extra,
                )
                count, inputs, size = shares.always_on, self._inputs[site], self._sizes[site]
                write_always_on(student, block, placement, inputs, width, count, size, direction)
                write_copies(student, block, shares.copies, width + count, direction)
            write_placement(student, self._units[site], placement, direction)


def _basis(unit: GateUnit, has_room: bool) -> Basis:
    if unit.other is None:
        return "line"
    return "constant" if has_room else "relu"


def _size(sums: PlacementSums, is_gated: bool) -> float:
    """The root mean square of the largest unit; half of it in a plain block, where always-on units have an offset."""
    loudest = (sums.square.max() / sums.rows).sqrt().item()
    return (loudest or 1.0) * (1.0 if is_gated else 0.5)


@torch.no_grad()
def gather_placements(
    model: nn.Module, sites: Sequence[ActivationSite], units: Sequence[GateUnit], folds: Folds
) -> dict[int, PlacementSums]:
    """The sums of each gate unit over some rows of every fold, in the original, by site."""
    sums: dict[int, PlacementSums] = {}
    for unit in units:
        weight = model.get_parameter(unit.before.weight_name)
        sums[unit.site] = PlacementSums.zeros(weight.shape[unit.before.output_axis or 0], weight.device)
    batches = folds.spread  # with several processes, a process may have none
    batch: Batch
    calls: dict[int, list[Tensor]] = {}
    halves: dict[int, list[Tensor]] = {}

    def some(values: Tensor, unit: GateUnit) -> Tensor:
        """Evenly spaced rows without padding, copied, since later operations may work in place.

        They keep their dtype: the rows of all gates of a batch are in memory at once.
        """
        rows = batch.without_padding(values.detach(), unit.before.weight_name, unit.before.channel_axis)
        return rows[:: max(1, len(rows) // -(-PLACEMENT_ROWS // len(batches)))].clone()

    def see(gate: nn.Module, *call: Tensor) -> None:
        calls[gates[gate].site] = [some(values, gates[gate]) for values in call]

    def see_half(unit: GateUnit, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        halves[unit.site] = [some(output, unit)]

    with one_module_per_site(model, sites), ExitStack() as hooks:
        gates = {getattr(sites[unit.site].parent, sites[unit.site].attribute): unit for unit in units}
        hooks.enter_context(calls_seen(gates, see))
        for unit in units:
            for other in unit.maps[1:]:  # not one that others use too, whose calls nothing tells apart
                owner = model.get_submodule(other.weight_name.rpartition(".")[0])
                hooks.enter_context(forward_hooks([owner], partial(see_half, unit)))
        for batch in (part.load() for part in batches):
            run_example(model, batch.inputs)
            for unit in units:
                squares = (value.double().square() for value in halves.pop(unit.site, []))
                sums[unit.site].add(*(value.double() for value in calls.pop(unit.site)), *squares)
    return {site: total.reduce_over_processes() for site, total in sums.items()}


@torch.no_grad()
def write_placement(
    converted: nn.Module, unit: GateUnit, placement: Placement, direction: Tensor | None = None
) -> None:
    """Write slope and kink into the map before the gate of `converted`; `direction` is that of `add_constant`."""
    weight = converted.get_parameter(unit.before.weight_name)
    slope, kink = (part.to(weight.device) for part in (placement.slope, placement.kink))
    axis = unit.before.output_axis
    shape = [1] * weight.dim()
    shape[0 if axis is None else axis] = -1
    weight.copy_(weight.double() * slope.view(shape))
    if unit.before.bias is None:
        add_constant(converted, unit.before, slice(None), -kink * slope, direction)
        return
    bias = converted.get_parameter(unit.before.bias)
    bias.copy_((bias.double() - kink) * slope)
