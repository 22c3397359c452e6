"""A share of zeros behind every ReLU, for what skips work on zeros: kinks so far up that it is reached, then the refit.

ReLU(z - c) is zero where z ≤ c. With c the quantile of a channel's pre-activations in the original, the share of zeros
is what was asked for on the inputs that it was read from; c goes into the bias before the gate, so the network stays a
plain one. The map behind is then fitted to features that are zero most of the time.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from hf_lgelu.models.example_run import forward_hooks, run_example
from hf_lgelu.models.sites import ActivationSite
from hf_lgelu.refit.batches import Batch
from hf_lgelu.refit.constant_direction import find_directions
from hf_lgelu.refit.exchange import Exchange
from hf_lgelu.refit.folds import Folds
from hf_lgelu.refit.kinks import Placement
from hf_lgelu.refit.layers import Layers
from hf_lgelu.refit.placement import GateUnit, PlacementWriter, find_gate_units, gate_rows
from hf_lgelu.refit.processes import each_has, mean_of_rows
from hf_lgelu.refit.program import Program
from hf_lgelu.refit.verdict import ConversionRefusedError

ROWS = 1024
"""Rows, about, that quantiles are read from: 0.9 of them is off by less than 0.01."""


class Thinning(PlacementWriter):
    """The step of `zeros=`: a kink for each channel in the place of those that are nearest to the smooth gate."""

    def __init__(
        self, original: nn.Module, sites: Sequence[ActivationSite], folds: Folds, program: Program, found: Layers,
        share: float,
    ) -> None:  # fmt: skip
        """Raises ConversionRefusedError for a gate without a bias of its own before it, or what stands for one."""
        every = find_gate_units(program)
        directions = find_directions(original, every, folds)
        units = {unit.site: unit for unit in every if unit.before.bias is not None or unit.site in directions}
        missing = [site.name for index, site in enumerate(sites) if index not in units]
        if missing:
            raise ConversionRefusedError(
                f"zeros={share:g}: a kink takes a bias before the gate that feeds nothing else, and there is none at "
                f"{', '.join(missing[:4])}{' and so on' if len(missing) > 4 else ''}"
            )
        kinks = _quantiles(original, sites, list(units.values()), folds, share)
        super().__init__(units, {site: _kink_alone(kink) for site, kink in kinks.items()}, found.layers, directions)


def _kink_alone(kink: Tensor) -> Placement:
    nothing = torch.zeros_like(kink)
    return Placement(torch.ones_like(kink), kink, nothing, nothing, nothing)


@torch.no_grad()
def _quantiles(
    model: nn.Module, sites: Sequence[ActivationSite], units: Sequence[GateUnit], folds: Folds, share: float
) -> dict[int, Tensor]:
    """Of each gate's inputs, per channel: the least value with `share` of the rows at or below it, never below 0."""
    rows: dict[int, list[Tensor]] = {unit.site: [] for unit in units}
    for unit, (z, *_) in gate_rows(model, sites, units, folds, ROWS):
        rows[unit.site].append(z.float())
    found = {}
    for unit in units:
        weight = model.get_parameter(unit.before.weight_name)
        kink = weight.new_zeros(weight.shape[unit.before.output_axis or 0], dtype=torch.float64)
        some = rows[unit.site]
        if some:
            z = torch.cat(some)
            kink = z.kthvalue(min(len(z), math.ceil(share * len(z))), dim=0).values.double()
        found[unit.site] = mean_of_rows(kink, float(bool(some))).clamp(min=0)
    return found


@torch.no_grad()
def share_of_zeros(model: nn.Module, names: Sequence[str], batches: Sequence[Batch]) -> float | None:
    """The share of zeros among what the gates put out on the batches of all processes, without padded tokens."""
    zeros = numbers = 0
    batch: Batch

    def count(name: str, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        nonlocal zeros, numbers
        counted = batch.without_padding(output, name)
        zeros += int((counted == 0).sum())
        numbers += counted.numel()

    with ExitStack() as hooks:
        for name in names:
            hooks.enter_context(forward_hooks([model.get_submodule(name)], partial(count, name)))
        for batch in batches:
            run_example(model, batch.inputs)
    zeros, numbers = (sum(part) for part in zip(*each_has((zeros, numbers)), strict=True))
    return zeros / numbers if numbers else None


def shares_of_zeros(
    model: nn.Module, converted: nn.Module, exchange: Exchange, batches: Sequence[Batch]
) -> tuple[float, float] | None:
    """Of the direct swap and of `converted`; None without inputs, or where the target has no zeros."""
    if not exchange.target.has_zeros:
        return None
    names = [site.name for site in exchange.sites(model)]
    with exchange.direct_swap(model).applied():
        before = share_of_zeros(model, names, batches)
    after = share_of_zeros(converted, names, batches)
    return None if before is None or after is None else (before, after)
