"""Several ReLUs in place of a gate: against dense least squares, loops, and the formula written by hand."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hf_lgelu.refit.kinks import Kinks, PlacementSums, first_of, fit_kinks, knots, share_out


def drawn(channels=3, count=500, seed=2):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([0.5, 1.0, 2.0])[:channels]
    return torch.randn(count, channels, generator=generator, dtype=torch.float64) * spread + 0.3


def columns(x, kinks, basis):
    beside = [np.ones_like(x), x][: {"relu": 0, "constant": 1, "line": 2}[basis]]
    return np.stack([*(np.maximum(x - kink, 0) for kink in kinks), *beside], 1)


def residual(x, y, kinks, basis, weight):
    found = columns(x, kinks, basis)
    solution = np.linalg.lstsq(np.sqrt(weight)[:, None] * found, np.sqrt(weight) * y, rcond=None)[0]
    return (weight * (y - found @ solution) ** 2).sum()


@pytest.mark.parametrize("basis", ["relu", "constant", "line"])
@pytest.mark.parametrize("weighted", [False, True])
def test_one_and_two_kinks_are_about_the_best(basis, weighted):
    z = drawn()
    weight = torch.rand(z.shape, generator=torch.Generator().manual_seed(1), dtype=z.dtype) if weighted else None
    sums = PlacementSums.zeros(3)
    for part in z.split(180):
        of_part = None if weight is None else weight[: len(part)]
        sums.add(part, F.silu(part), of_part)
    fits = fit_kinks(sums, basis, 2)
    for channel, (count, found) in itertools.product(range(3), enumerate(fits, 1)):
        x, y = z[:, channel].numpy(), F.silu(z[:, channel]).numpy()
        w = np.ones(len(x)) if weight is None else np.concatenate([weight[: len(p), channel] for p in z.split(180)])
        inside = [kink for kink in knots().tolist() if (x < kink).any() and (x > kink).any()]
        best = min(residual(x, y, some, basis, w) for some in itertools.combinations(inside[::count], count))
        reached = (w * (y - value(found, channel, x)) ** 2).sum()
        # The floor under the diagonal costs little. Of one kink all were tried, and nothing can be below the best.
        assert best * (1 - 1e-9) * (count == 1) <= reached <= (1 + 0.05 * count) * best
        assert float(found.unexplained[channel]) == pytest.approx(reached / (w * y**2).sum(), rel=0.1)


def value(fit, channel, x):
    relus = sum(
        float(slope) * np.maximum(x - float(kink), 0)
        for slope, kink in zip(fit.slopes[channel], fit.kinks[channel], strict=True)
    )
    return relus + float(fit.constant[channel]) + float(fit.line[channel]) * x


@pytest.mark.parametrize("basis", ["constant", "line"])
def test_more_kinks_leave_less(basis):
    z = drawn(count=4000)
    sums = PlacementSums.zeros(3)
    sums.add(z, F.gelu(z))
    left = torch.stack([fit.unexplained for fit in fit_kinks(sums, basis, 5)])
    assert (left[1:] < left[:-1]).all()
    assert (left[4] < 0.1 * left[0]).all()
    assert all((fit.slopes[:, 0] >= fit.slopes[:, -1]).all() for fit in fit_kinks(sums, basis, 3))


def test_what_is_piecewise_linear_is_found_exactly():
    z = drawn(count=2000)
    at = knots()[[20, 30, 40]]
    y = 0.7 * (z - at[0]).relu() - 0.4 * (z - at[1]).relu() + 0.9 * (z - at[2]).relu() + 0.2
    sums = PlacementSums.zeros(3)
    sums.add(z, y)
    found = fit_kinks(sums, "constant", 3)[2]
    assert (found.unexplained < 2e-4).all()  # the floor under the diagonal
    assert torch.equal(found.kinks.sort(1).values, at.expand(3, -1))
    torch.testing.assert_close(
        found.slopes.sort(1).values, torch.tensor([-0.4, 0.7, 0.9]).double().expand(3, -1), atol=0.02, rtol=0
    )


def test_a_channel_without_spread_keeps_its_gate_and_gets_no_copy():
    sums = PlacementSums.zeros(2)
    z = torch.stack([torch.full((300,), 0.05), torch.linspace(-2, 2, 300)], 1)
    sums.add(z, F.gelu(z))
    fits = fit_kinks(sums, "line", 4)
    always_on, counts, copies = share_out(fits, sums.square, torch.zeros(0), 10)
    assert (always_on, counts.tolist()) == (0, [1, 4])
    assert copies.sources.tolist() == [1, 1, 1]
    first = first_of(fits, counts)
    assert (float(first.slopes[0]), float(first.kinks[0])) == (1.0, 0.0)
    assert (first.slopes[1], first.kinks[1]) == (fits[3].slopes[1, 0], fits[3].kinks[1, 0])


def test_units_go_where_they_take_the_most_away():
    """Against all ways to share them out; what is left falls by less with each, so the greatest gains are the best."""
    generator = torch.Generator().manual_seed(0)
    left = torch.rand(4, 5, generator=generator, dtype=torch.float64).sort(0, descending=True).values
    gains = (left[:-1] - left[1:]).sort(0, descending=True).values
    left = torch.cat([left[:1], left[:1] - gains.cumsum(0)])
    energies = torch.rand(5, generator=generator, dtype=torch.float64)
    linear = torch.tensor([0.9, 0.2, 0.05, 1e-4], dtype=torch.float64)
    fits = [_fit(count, share) for count, share in enumerate(left, 1)]
    always_on, counts, copies = share_out(fits, energies, linear, 8)
    assert 0 < always_on < 4
    assert len(copies.sources) == int((counts - 1).sum()) == 8 - always_on
    kept = [float(linear[on:].sum()) for on in range(5)]

    def all_left(on, way):
        return kept[on] + sum(float(left[count - 1, at] * energies[at]) for at, count in enumerate(way))

    ways = itertools.product(range(5), itertools.product(range(1, 5), repeat=5))
    best = min(all_left(on, way) for on, way in ways if on + sum(way) == 8 + 5)
    assert all_left(always_on, counts.tolist()) == pytest.approx(best, rel=1e-12)
    # Each copy has the slope and kink of its channel's fit that the unit itself does not take.
    for number, source in enumerate(copies.sources.tolist()):
        fit = fits[int(counts[source]) - 1]
        assert copies.slopes[number] in fit.slopes[source, 1:]
        assert copies.kinks[number] in fit.kinks[source, 1:]


def test_no_more_units_than_can_be_used():
    fits = [_fit(count, torch.tensor([0.1 / count, 0.2 / count], dtype=torch.float64)) for count in (1, 2, 3)]
    always_on, counts, copies = share_out(
        fits, torch.ones(2, dtype=torch.float64), torch.tensor([0.3, 0.1]).double(), 50
    )
    assert (always_on, counts.tolist(), len(copies.sources)) == (2, [3, 3], 4)


def _fit(count, unexplained):
    generator = torch.Generator().manual_seed(count)
    slopes, kinks = (torch.randn(len(unexplained), count, generator=generator).double() for _ in range(2))
    nothing = torch.zeros_like(unexplained)
    return Kinks(slopes.sort(1, descending=True).values, kinks, nothing, nothing, unexplained)
