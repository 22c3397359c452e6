"""The rung "place": before the refit, each ReLU gets a kink and a slope of its own, and added units get their work.

For each gate, on the inputs that it has in the original:

1. Least squares fit φ(z) ≈ Σₖ aₖ·ReLU(z - cₖ) + b + d·z in each channel, with one ReLU, two, and so on.
2. The added units of a wider block are shared out. Each goes where it reduces the block's mean square error most. It is
one more ReLU of some channel (a copy of its unit, with a kink of its own), or a unit that is always on, for the linear
part that b and d make (see always_on.py). The gain of a copy is the gain of the least squares times the square of the
unit's column in the map after the gate, as if the errors of channels were independent.
3. Units and copies are written into the student. Slope and kink of each channel's first ReLU then go into the map
   before the gate, or the BatchNorm there, since a·ReLU(z - c) = ReLU(a·z - a·c) for a > 0.

The map after the gates mixes all channels and has an intercept, so it supplies b + d·z by itself: both are fitted and
dropped. In a gated unit, φ(z)·u, these terms would be linear in the block's input, and the map after the gates cannot
supply them. So the fit there has no d, and has b only where units that are always on can supply it. Its rows are
weighted by u² where the unit owns its other half.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from hf_lgelu.graph.layers import FedGate, Layer, find_layers, other_factor, product_behind
from hf_lgelu.models.config_keys import UnsupportedConfigError
from hf_lgelu.networks.run import NOT_TAKEN, run_example
from hf_lgelu.processes import own_part
from hf_lgelu.refit.always_on import ALWAYS_ON, best_gains, find_directions, gather_inputs, write_always_on
from hf_lgelu.refit.carry import Carrier
from hf_lgelu.refit.folds import Folds
from hf_lgelu.refit.kinks import MOST_KINKS, Basis, Copies, Kinks, PlacementSums, first_of, fit_kinks, share_out
from hf_lgelu.refit.layerwise import Refit, Writes
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.refusals import ConversionRefusedError
from hf_lgelu.refit.task import Task
from hf_lgelu.refit.weights import add_constant
from hf_lgelu.refit.widen import Block, WiderOriginal, find_blocks, widen_original

PLACEMENT_ROWS = 4096
"""The approximate number of rows that a placement is fitted on: three numbers per channel need no more."""


class Place(Refit):
    """The rung that fits each ReLU's slope and kink before the refit, in blocks that may have more units.

    A map before a gate that is itself refitted gets slopes and kinks after its refit; all other maps get them first.
    """

    effort = "place"

    def __init__(self, task: Task) -> None:
        """Raises ConversionRefusedError where the blocks cannot be widened as asked for."""
        super().__init__(task)
        if task.config.width > 1:
            _ = self.original  # raises before the work begins

    @cached_property
    def original(self) -> WiderOriginal:
        task, width = self.task, self.task.config.width
        recording = task.recordings.of(task.folds.first)
        layers = find_layers(recording, task.model, task.recordings.sites)
        try:
            wider = widen_original(task.model, recording, layers, width)
        except UnsupportedConfigError as error:
            keep = task.exchange.keep
            kept = "".join(f" {name} is kept, so its block stays as wide as it was." for name in keep)
            ways = "Keep no gate, or use `width` 1" if keep else "Use `width` 1"
            raise ConversionRefusedError(f"`width` {width:g}: {error}.{kept} {ways}") from error
        try:
            run_example(wider.model, task.folds.first.load().inputs)
        except NOT_TAKEN as error:
            raise ConversionRefusedError(
                f"`width` {width:g}: units of a widened block also go to an output that does not count, whose maps "
                f"keep their width ({error}). Use `width` 1, or name this output in `outputs`"
            ) from error
        return wider

    def plan(self, carrier: Carrier) -> Writes:
        """The kinks and slopes of all gates and the added units of each block, fitted, by the layer that they wait for.

        Added units are made from the weights before slopes and kinks change these.
        """
        original, folds, extra = self.original.model, self.task.folds, self.original.extra
        recording, layers = carrier.pair.recording, carrier.layers
        directions = find_directions(original, layers.fed_gates, folds)  # which take the place of biases
        fed_gates = [fed for fed in layers.fed_gates if fed.before.bias is not None or fed.site in directions]
        blocks = {
            block.fed.site: block
            for block in find_blocks(recording, layers.layers, fed_gates)
            if extra.get(block.fed.site)
        }
        if any(extra.values()) and not blocks:
            raise ConversionRefusedError(
                "no block can be widened: the maps before the gates have no bias, no key of the config gives them one, "
                "and their inputs have no direction that is the same for all. Use `width` 1"
            )
        sums = gather_placements(carrier, fed_gates, folds)
        inputs = gather_inputs(original, [each.fed for each in blocks.values() if each.has_linear_part], folds.spread)
        fitted = {site for layer in layers.layers for site in layer.sites}
        apart = {site for layer in layers.layers if layer.maps[0].geometry.groups > 1 for site in layer.sites}
        waits_for = _waits_for(layers.layers, fed_gates)
        writes: dict[int | None, list[Callable[[nn.Module], None]]] = defaultdict(list)
        for fed in fed_gates:
            direction, block = directions.get(fed.site), blocks.get(fed.site)
            waiting = writes[waits_for.get(fed.site)]
            if block is None:
                # A refitted map after the gate supplies a constant, and a line if it mixes channels.
                is_plain = fed.other is None and fed.site in fitted
                basis: Basis = "relu" if not is_plain else "constant" if fed.site in apart else "line"
                placement = first_of(fit_kinks(sums[fed.site], basis, 1))
            else:
                width = block.width - extra[fed.site]
                placement, units = _fit_block(original, block, width, sums[fed.site], inputs.get(fed.site), direction)
                waiting += units
            waiting.append(partial(write_placement, fed=fed, placement=placement, direction=direction))
        return writes


def _waits_for(layers: Sequence[Layer], fed_gates: Sequence[FedGate]) -> dict[int, int]:
    """{site of a gate: index of the last layer whose maps make its input, or the other half of its gated block}."""
    last: dict[int, int] = {}
    for index, layer in enumerate(layers):
        nodes = {node for consumer in layer.maps for node in (consumer.operation.node, *consumer.to_aim)}
        for fed in fed_gates:
            if fed.before.node in nodes or (fed.other is not None and fed.other.node in nodes):
                last[fed.site] = index
    return last


def gather_placements(carrier: Carrier, fed_gates: Sequence[FedGate], folds: Folds) -> dict[int, PlacementSums]:
    """The sums of each gate unit over some rows of every fold, in the original, by site."""
    weights = {fed.site: fed.before.weight_in(carrier.recordings.model) for fed in fed_gates}
    sums = {site: PlacementSums.zeros(len(weight), weight.device) for site, weight in weights.items()}
    most = -(-PLACEMENT_ROWS // len(folds.spread))
    for batch in own_part(folds.spread):
        gates = [fed for fed in carrier.pair_of(batch).layers.fed_gates if fed.site in sums]
        parts = {fed.site: [fed.call.args[0], fed.call] for fed in gates}  # z and φ(z)
        for fed in gates:
            product = product_behind(fed.call)
            if product is not None and fed.owns_other:
                parts[fed.site].append(other_factor(product, fed.call))
        before = {node: fed.before for fed in gates for node in parts[fed.site]}
        loaded, rows = batch.load(), {}
        for node, values in carrier.values(batch, before):
            every = loaded.without_padding(values, before[node].weight_name, before[node].channel_axis)
            rows[node] = every[:: max(1, len(every) // most)].clone()  # those of all gates are in memory at once
        for site, nodes in parts.items():
            z, value, *halves = (rows[node] for node in nodes)
            sums[site].add(z, value, *(half.double().square() for half in halves))
    return {site: total.reduce_over_processes() for site, total in sums.items()}


def _fit_block(
    original: nn.Module,
    block: Block,
    width: int,
    sums: PlacementSums,
    inputs: Moments | None,
    direction: Tensor | None,
) -> tuple[Kinks, list[Callable[[nn.Module], None]]]:
    """(the first ReLU of each channel, functions that write the added units) of a block that had `width` units."""
    extra, is_gated = block.width - width, block.fed.other is not None
    # For each channel two ReLUs, and twice as many copies as an even spread would give it.
    basis: Basis = "line" if not is_gated else "relu" if inputs is None else "constant"
    fits = fit_kinks(sums, basis, min(MOST_KINKS, 2 + math.ceil(2 * extra / width)))
    down = block.down.operation.weight_in(original).double()
    columns = down.square().sum([axis for axis in range(down.ndim) if axis != 1]).to(sums.square.device)
    gains = columns[:0]
    if inputs is not None:
        gains = best_gains(original, block, first_of(fits), inputs, width)
    always_on, counts, copies = share_out(fits, sums.square * columns / sums.rows, gains, extra)
    # A unit that is always on, or its offset in a plain block, is as large as the largest unit: int8 has one range for
    # all units of a block.
    size = ((sums.square.max() / sums.rows).sqrt().item() or 1.0) / (1.0 if is_gated else ALWAYS_ON)
    first, common = first_of(fits, counts), {"block": block, "direction": direction}
    units: list[Callable[[nn.Module], None]] = [partial(write_copies, copies=copies, start=width + always_on, **common)]
    if inputs is not None:
        linear = {"placement": first, "inputs": inputs, "width": width, "count": always_on, "size": size}
        units.insert(0, partial(write_always_on, **linear, **common))
    return first, units


@torch.no_grad()
def write_copies(student: nn.Module, block: Block, copies: Copies, start: int, direction: Tensor | None = None) -> None:
    """Write copies into the units from `start` on, before slopes and kinks are written into the copied units.

    The size of a copy's slope goes into the rows before the gate, its sign into the column after it. `direction` is as
    in `add_constant`.
    """
    new, down = slice(start, start + len(copies.sources)), block.down.operation
    columns = down.weight_in(student)
    sources = copies.sources.to(columns.device)
    slopes, kinks = (part.to(sources.device) for part in (copies.slopes, copies.kinks))
    for operation in block.ahead:
        size = slopes.abs() if operation is block.fed.before else torch.ones_like(slopes)
        rows = operation.weight_in(student)
        rows[new] = (rows[sources].double() * size.view(-1, *[1] * (rows.ndim - 1))).to(rows.dtype)
        operation.write_weight(student, rows)
        if operation.bias is not None:
            bias = operation.bias.read(student)
            bias[new] = (bias[sources].double() * size).to(bias.dtype)
            operation.bias.write(student, bias)
        if not operation.mixes:  # the statistics of a BatchNorm
            for statistic in (each for each in operation.module_in(student).buffers(recurse=False) if each.ndim):
                statistic[new] = statistic[sources]
    add_constant(student, block.fed.before, new, -kinks * slopes.abs(), direction)
    columns[:, new] = columns[:, sources] * slopes.sign().to(columns.dtype).view(-1, *[1] * (columns.ndim - 2))
    down.write_weight(student, columns)


@torch.no_grad()
def write_placement(student: nn.Module, fed: FedGate, placement: Kinks, direction: Tensor | None = None) -> None:
    """Write the slope and kink of one ReLU a channel into the map before the gate; `direction` as in `add_constant`."""
    rows = fed.before.weight_in(student)
    slope, kink = (part.to(rows.device) for part in (placement.slopes[:, 0], placement.kinks[:, 0]))
    fed.before.write_weight(student, rows.double() * slope.view(-1, *[1] * (rows.ndim - 1)))
    if fed.before.bias is None:
        add_constant(student, fed.before, slice(None), -kink * slope, direction)
        return
    bias = fed.before.bias.read(student).double().flatten()
    factor, offset = fed.factor.to(bias), fed.offset.to(bias)
    fed.before.bias.write(student, slope * bias + (slope * (offset - kink) - offset) / factor)
