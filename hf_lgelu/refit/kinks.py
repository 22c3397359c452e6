"""Kinks and slopes of the ReLUs that replace a gate, per channel: least squares on the gate's own inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_lgelu.processes import summed

Basis = Literal["relu", "constant", "line"]
"""The terms added to the ReLUs: none, b, or b + d·z."""

MOST_KINKS = 6
"""The most ReLUs of a channel. With b + d·z they leave 7e-5 of the square of a GELU of standard normal inputs."""

_LOWEST, _HIGHEST, _BINS = -3.2, 3.2, 64
_FLOOR = 1e-4  # of the diagonal: kinks at the edge of the data have almost no rows on one side
_AT_ONCE = 1024  # channels: memory holds a system for every kink of every channel
_SWEEPS = 4


@dataclass(eq=False)
class PlacementSums:
    """Sums per channel and bin of z, from which every kink at an edge of a bin is fitted exactly; float64."""

    sums: Tensor  # (5, channels, bins): Σw, Σwz, Σwz², Σwφ, Σwφz; the outermost bins reach to infinity
    square: Tensor  # (channels,) Σwφ²
    rows: Tensor  # a scalar, the number of rows

    @classmethod
    def zeros(cls, channels: int, device: torch.device | str = "cpu") -> "PlacementSums":
        """The sums over no rows."""
        place = {"dtype": torch.float64, "device": device}
        shapes = (5, channels, _BINS), (channels,), ()
        return cls(*(torch.zeros(shape, **place) for shape in shapes))

    @torch.no_grad()
    def add(self, z: Tensor, value: Tensor, weight: Tensor | None = None) -> None:
        """Add rows (n, channels): z, φ(z) and their weights (1 by default)."""
        z, value = (part.to(self.sums.device, torch.float64) for part in (z, value))
        weight = torch.ones_like(z) if weight is None else weight.to(self.sums.device, torch.float64)
        bins = ((z - _LOWEST) * (_BINS / (_HIGHEST - _LOWEST))).floor().clamp_(0, _BINS - 1).long()
        place = (bins + torch.arange(z.shape[1], device=bins.device) * _BINS).flatten()
        weighted_value = weight * value
        terms = (weight, weight * z, weight * z * z, weighted_value, weighted_value * z)
        for total, term in zip(self.sums, terms, strict=True):
            total.view(-1).index_add_(0, place, term.flatten())
        self.square += (weighted_value * value).sum(0)
        self.rows += len(z)

    def reduce_over_processes(self) -> "PlacementSums":
        """The sums over the rows of all processes, the same on each process."""
        return PlacementSums(*map(summed, (self.sums, self.square, self.rows)))


def knots() -> Tensor:
    """The kinks to try: the inner edges of the bins, zero among them."""
    return torch.linspace(_LOWEST, _HIGHEST, _BINS + 1, dtype=torch.float64)[1:-1]


@dataclass(frozen=True)
class Kinks:
    """φ(z) ≈ Σₖ slopes[:, k]·ReLU(z - kinks[:, k]) + constant + line·z per channel.

    There is no fit where no kink has rows on both sides, or no slope is above 0.
    """

    slopes: Tensor  # (channels, K), the greatest first
    kinks: Tensor  # (channels, K)
    constant: Tensor
    line: Tensor
    unexplained: Tensor  # the share of Σwφ² left; infinite where there is no fit


@torch.no_grad()
def fit_kinks(sums: PlacementSums, basis: Basis, most: int) -> list[Kinks]:
    """The fits with 1 to `most` ReLUs a channel; the first is the best of all kinks.

    Each further kink is the best addition to the kinks found before. Then each kink in turn is chosen anew, four times.
    """
    fits: list[list[Kinks]] = [[] for _ in range(most)]
    for part in zip(sums.sums.split(_AT_ONCE, 1), sums.square.split(_AT_ONCE), strict=True):
        above = _Above(*part)
        chosen = torch.zeros(len(above.square), 0, dtype=torch.long, device=above.square.device)
        for count in range(1, most + 1):
            chosen = torch.cat([above.best_with(chosen, basis), chosen], 1)
            for _ in range(_SWEEPS if count > 1 else 0):
                for _ in range(count):  # the oldest kink is chosen anew, and goes to the front
                    chosen = torch.cat([above.best_with(chosen[:, :-1], basis), chosen[:, :-1]], 1)
            fits[count - 1].append(above.fit(chosen, basis))
    return [Kinks(*map(torch.cat, zip(*(vars(part).values() for part in parts), strict=True))) for parts in fits]


class _Above:
    """Sums over the rows above every kink, and least squares from these sums."""

    def __init__(self, sums: Tensor, square: Tensor) -> None:
        """`sums` and `square` are as in PlacementSums, for some channels."""
        self.kinks, self.square = knots().to(sums.device), square
        self._totals = sums.sum(-1)
        self._sums = sums.flip(-1).cumsum(-1).flip(-1)[..., 1:]  # (5, C, kinks)
        self.splits = (self._sums[0] > 0) & (self._sums[0] < self._totals[0][:, None])
        """(C, kinks): whether the channel has rows on both sides of the kink."""

    def best_with(self, chosen: Tensor, basis: Basis) -> Tensor:
        """(C, 1) the kink that leaves the least error together with the (C, m) `chosen` kinks.

        Kinks are indices into `knots`. A single ReLU must have a slope above 0. If no kink gives one, the index means
        nothing.
        """
        every = torch.arange(len(self.kinks), device=chosen.device).expand(len(chosen), 1, -1)
        fixed = chosen[:, :, None].expand(-1, -1, len(self.kinks))
        solution, error = self.solve(torch.cat([every, fixed], 1), basis)
        possible = self.splits & ((solution[..., 0] > 0) | bool(chosen.shape[1]))
        return torch.where(possible, error, torch.inf).argmin(-1, keepdim=True)

    def solve(self, at: Tensor, basis: Basis) -> tuple[Tensor, Tensor]:
        """The least squares of n systems a channel, each with ReLUs at the m kinks `at` (C, m, n).

        Returns (C, n, columns) the m slopes, b and d, and (C, n) the error.
        """
        w, wz, wzz, wv, wvz = (total.gather(1, at.flatten(1)).view_as(at) for total in self._sums)
        kink = self.kinks[at]
        later = torch.maximum(at[:, :, None], at[:, None])
        both = [total.gather(1, later.flatten(1)).view_as(later) for total in self._sums[:3]]
        first, second = kink[:, :, None], kink[:, None]
        gram = both[2] - (first + second) * both[1] + first * second * both[0]
        one_one, one_z, z_z, one_v, z_v = (total[:, None].expand(-1, at.shape[2]) for total in self._totals)
        extra_terms = {"relu": 0, "constant": 1, "line": 2}[basis]
        crossed = torch.stack([wz - kink * w, wzz - kink * wz], 1)[:, :extra_terms]  # (C, extra_terms, m, n)
        corner = torch.stack([torch.stack([one_one, one_z], 1), torch.stack([one_z, z_z], 1)], 1)[
            :, :extra_terms, :extra_terms
        ]
        upper = torch.cat([gram, crossed.transpose(1, 2)], 2)
        matrix = torch.cat([upper, torch.cat([crossed, corner], 2)], 1).movedim(-1, 1)
        right = torch.cat([wvz - kink * wv, torch.stack([one_v, z_v], 1)[:, :extra_terms]], 1).movedim(-1, 1)
        diagonal = matrix.diagonal(dim1=-2, dim2=-1)
        floor = _FLOOR * diagonal + 1e-12 * self._totals[0].clamp(min=1e-30)[:, None, None]
        diagonal += floor
        solution = torch.linalg.solve(matrix, right[..., None])[..., 0]
        return solution, self.square[:, None] - (solution * (right + floor * solution)).sum(-1)

    def fit(self, chosen: Tensor, basis: Basis) -> Kinks:
        """The fit with the kinks `chosen` (C, m), the greatest slope first."""
        solution, error = self.solve(chosen[:, :, None], basis)
        count = chosen.shape[1]
        slopes, order = solution[:, 0, :count].sort(1, descending=True)
        rest = [solution[:, 0, column] for column in range(count, solution.shape[-1])]
        constant, line = [*rest, *[torch.zeros_like(slopes[:, 0])] * (2 - len(rest))]
        left = error[:, 0] / self.square.clamp(min=1e-30)
        is_fit = self.splits.gather(1, chosen).all(1) & (slopes[:, 0] > 0)
        kinks = self.kinks[chosen.gather(1, order)]
        return Kinks(slopes, kinks, constant, line, torch.where(is_fit, left, torch.inf))


def first_of(fits: Sequence[Kinks], counts: Tensor | None = None) -> Kinks:
    """The first ReLU, constant and line of each channel, from the fit with (channels,) `counts` ReLUs, 1 by default.

    A channel without a fit keeps slope 1 and kink 0.
    """
    fitted = torch.isfinite(fits[0].unexplained)
    at = torch.zeros_like(fitted, dtype=torch.long) if counts is None else counts.to(fitted.device) - 1

    def part(values: Sequence[Tensor], without: float) -> Tensor:
        return torch.where(fitted, torch.stack(list(values)).gather(0, at[None])[0], without)

    return Kinks(
        slopes=part([fit.slopes[:, 0] for fit in fits], 1.0)[:, None],
        kinks=part([fit.kinks[:, 0] for fit in fits], 0.0)[:, None],
        constant=part([fit.constant for fit in fits], 0.0),
        line=part([fit.line for fit in fits], 0.0),
        unexplained=part([fit.unexplained for fit in fits], torch.nan),
    )


class Copies(NamedTuple):
    """Added units that copy others: the copied unit, the slope and the kink of each."""

    sources: Tensor
    slopes: Tensor
    kinks: Tensor


def share_out(fits: Sequence[Kinks], energies: Tensor, linear: Tensor, units: int) -> tuple[int, Tensor, Copies]:
    """(number of units that are always on, number of ReLUs of each channel (channels,), copies) with the least error.

    The error is summed over channels and the linear part. `fits` have 1, 2, ... ReLUs a channel, and `unexplained` is a
    share of `energies` (channels,). `linear` is the error that each further unit that is always on takes away, in
    falling order. Not all `units` need be of use.
    """
    left = torch.stack([fit.unexplained * energies for fit in fits])  # (K, channels)
    # A gain counts at most as much as the gain before, so that no channel gets its third ReLU before its second.
    gains = torch.where(torch.isfinite(left[1:]), left[:-1] - left[1:], 0.0).clamp(min=0).cummin(0).values
    gains = torch.where(torch.isfinite(left[0]), gains, -1.0)
    every = torch.cat([linear.to(gains.device), gains.flatten()])
    taken = every.argsort(descending=True, stable=True)[: min(units, int((every >= 0).sum()))]
    copied = taken[taken >= len(linear)] - len(linear)
    counts = 1 + torch.bincount(copied % gains.shape[1], minlength=gains.shape[1])
    added = [
        (at, fit.slopes[at, place], fit.kinks[at, place])
        for number, fit in enumerate(fits[1:], 2)
        for at in [(counts == number).nonzero()[:, 0]]
        for place in range(1, number)
    ]
    copies = Copies(*(torch.cat(parts) for parts in zip(*added, strict=True)))
    return len(taken) - len(copied), counts, copies
