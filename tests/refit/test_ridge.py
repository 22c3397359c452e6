"""The ridge and its strength, against float64 least squares on the rows themselves."""

import math

import numpy as np
import pytest
import torch

from hf_lgelu.refit import ridge as module
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.ridge import STRENGTHS, fit_ridge


def solve_ridge(moments, strength, *, intercept):
    """(Δ (g, m, d), δb (g, m)) of one strength."""
    change, bias_change = module._Deviations.of(moments, intercept).solve(strength)
    return change.mT, bias_change


def drawn(rows, groups=1, width=6, outputs=3, noise=1.0, seed=0):
    """Features as a ReLU gives them, residuals partly linear in them with a mean, targets; float64 (n, g, ·)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, groups, width, generator=generator, dtype=torch.float64)
    x = (x + 0.3).relu() * torch.linspace(0.5, 2, width, dtype=torch.float64)
    weight = torch.randn(groups, outputs, width, generator=generator, dtype=torch.float64)
    error = torch.randn(rows, groups, outputs, generator=generator, dtype=torch.float64)
    r = torch.einsum("ngd,gmd->ngm", x, weight) + noise * error + 2
    return x, r, r + torch.randn(rows, groups, outputs, generator=generator, dtype=torch.float64) * 3


def moments_of(x, r, t):
    moments = Moments.zeros(x.shape[1], x.shape[2], r.shape[2])
    moments.add(x, r, t)
    return moments


def folds_of(x, r, t, count=4):
    return [moments_of(*part) for part in zip(*(rows.tensor_split(count) for rows in (x, r, t)), strict=True)]


def least_squares(x, r, strength, intercept):
    """(Δ (m, d), δb (m,)) of one group from its rows: lstsq on the rows with √(α·s)·I below, s the mean eigenvalue."""
    x, r = (np.asarray(rows, dtype=np.float64) for rows in (x, r))
    x_mean, r_mean = (rows.mean(0) if intercept else np.zeros(rows.shape[1]) for rows in (x, r))
    centred, width = x - x_mean, x.shape[1]
    scale = np.linalg.svd(centred, compute_uv=False) ** 2
    below = math.sqrt(strength * scale.sum() / width) * np.eye(width)
    solution = np.linalg.lstsq(
        np.vstack([centred, below]), np.vstack([r - r_mean, np.zeros((width, r.shape[1]))]), rcond=None
    )[0]
    return solution.T, r_mean - x_mean @ solution


def solved_by_hand(x, r, strength, intercept):
    """The same for (n, g, ·): ((g, m, d), (g, m))."""
    pairs = [least_squares(x[:, g], r[:, g], strength, intercept) for g in range(x.shape[1])]
    return tuple(torch.from_numpy(np.stack(part)) for part in zip(*pairs, strict=True))


def chosen_by_hand(parts, intercept, held_out_folds):
    """((choice, strength), error of keeping, error of the choice) by fitting and predicting on rows."""
    candidates = [("unchanged", None)] + [("bias only", None)] * intercept
    candidates += [("refit", strength) for strength in sorted(STRENGTHS, reverse=True)]
    errors = dict.fromkeys(candidates, 0.0)
    unseen = torch.cat([parts[k][2] for k in held_out_folds]).flatten(1)
    for k in held_out_folds:
        x, r = (torch.cat([part[i] for j, part in enumerate(parts) if j != k]) for i in (0, 1))
        for choice, strength in candidates:
            change, bias_change = torch.zeros(x.shape[1], r.shape[2], x.shape[2], dtype=torch.float64), r.mean(0)
            if choice == "unchanged":
                bias_change = torch.zeros_like(bias_change)
            elif choice == "refit":
                change, bias_change = solved_by_hand(x, r, strength, intercept)
            for features, residuals in zip(parts[k][0], parts[k][1], strict=True):
                for g in range(len(features)):
                    left = residuals[g] - change[g] @ features[g] - bias_change[g]
                    errors[choice, strength] += float(left @ left)
    spread = float((unseen - unseen.mean(0)).square().sum())
    best = min(candidates, key=errors.get)
    return best, errors["unchanged", None] / spread, errors[best] / spread


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("strength", [1e-3, 0.1, 100.0])
@pytest.mark.parametrize(("rows", "groups"), [(40, 1), (40, 3), (4, 1), (5, 2), (1, 1)])
def test_the_ridge_is_least_squares_with_rows_below(rows, groups, strength, intercept):
    """4 and 5 rows are fewer than the width of 6; of one, with an intercept, only the bias moves."""
    x, r, t = drawn(rows, groups)
    change, bias_change = solve_ridge(moments_of(x, r, t), strength, intercept=intercept)
    expected_change, expected_bias = solved_by_hand(x, r, strength, intercept)
    torch.testing.assert_close(change, expected_change, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(bias_change, expected_bias, rtol=1e-9, atol=1e-10)
    assert intercept or not bias_change.any()
    assert change.is_contiguous()


CASES = {
    # name: (rows, groups, noise, expected choice where it is plain)
    "many rows, little noise": (400, 1, 0.1, "refit"),
    "few rows, much noise": (28, 1, 6.0, None),
    "rows of four folds fewer than the width": (16, 1, 1.0, None),
    "groups": (60, 3, 2.0, "refit"),
    "unequal folds": (49, 2, 3.0, None),
}


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_the_choice_is_that_of_fitting_and_predicting_on_rows(case, seed, intercept):
    rows, groups, noise, choice = CASES[case]
    x, r, t = drawn(rows, groups, noise=noise, seed=seed)
    parts = list(zip(*(values.tensor_split(4) for values in (x, r, t)), strict=True))
    expected, before, after = chosen_by_hand(parts, intercept, range(4))
    fit = fit_ridge([moments_of(*part) for part in parts], intercept=intercept)
    assert (fit.choice, fit.strength) == expected
    assert choice is None or fit.choice == choice
    assert fit.error_before == pytest.approx(before, rel=1e-9)
    assert fit.error_after == pytest.approx(after, rel=1e-9)
    assert fit.error_after < fit.error_before
    if fit.choice == "refit":
        change, bias_change = solved_by_hand(x, r, fit.strength, intercept)
        torch.testing.assert_close(fit.weight_change, change, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(fit.bias_change, bias_change, rtol=1e-9, atol=1e-10)


def test_the_choice_goes_from_no_change_to_the_least_strength_as_the_signal_grows():
    seen = set()
    x, r, t = drawn(32, width=4, outputs=2, noise=0.0)
    noise = torch.randn(32, 1, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    constant = r.mean(0)
    for linear in (0.0, 0.03, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0, 3.0, 30.0, 100.0):
        for bias in (0.0, 3.0):
            residuals = linear * (r - constant) + bias + noise
            parts = list(zip(*(values.tensor_split(4) for values in (x, residuals, t)), strict=True))
            expected, _, after = chosen_by_hand(parts, True, range(4))
            fit = fit_ridge([moments_of(*part) for part in parts], intercept=True)
            assert (fit.choice, fit.strength) == expected
            assert fit.error_after == pytest.approx(after, rel=1e-9)
            seen.add(expected)
            if fit.choice == "bias only":
                assert not fit.weight_change.any()
                torch.testing.assert_close(fit.bias_change, residuals.mean(0))
            if fit.choice == "unchanged":
                assert not fit.weight_change.any()
                assert not fit.bias_change.any()
                assert fit.weight_change.shape == (1, 2, 4)
    assert {("unchanged", None), ("bias only", None)} <= seen
    assert {("refit", strength) for strength in (1e-3, 1e-2, 1.0, 10.0)} <= seen


def test_of_equal_candidates_the_lesser_change_is_taken():
    x, r, t = drawn(40)
    fit = fit_ridge(folds_of(x, torch.zeros_like(r), t), intercept=True)
    assert fit.choice == "unchanged"
    assert fit.error_before == fit.error_after == 0
    constant = torch.full_like(r, 0.5)  # sums of it do not round
    dead = torch.zeros_like(x)
    assert fit_ridge(folds_of(dead, constant, t), intercept=True).choice == "bias only"
    assert fit_ridge(folds_of(dead, constant, t), intercept=False).choice == "unchanged"


@pytest.mark.parametrize("intercept", [True, False])
def test_a_wide_map_is_scored_on_its_first_fold_and_fitted_on_all(monkeypatch, intercept):
    x, r, t = drawn(28, noise=4.0)
    x[:7] *= 1.7  # the first fold is unlike the others
    parts = list(zip(*(values.tensor_split(4) for values in (x, r, t)), strict=True))
    monkeypatch.setattr(module, "_ROWS_TO_HOLD_OUT_ONCE", 28)
    monkeypatch.setattr(module, "_WIDE", 7)
    narrow = fit_ridge([moments_of(*part) for part in parts], intercept=intercept)
    assert narrow.error_before == pytest.approx(chosen_by_hand(parts, intercept, range(4))[1], rel=1e-9)
    monkeypatch.setattr(module, "_WIDE", 6)
    wide = fit_ridge([moments_of(*part) for part in parts], intercept=intercept)
    expected, before, after = chosen_by_hand(parts, intercept, [0])
    assert (wide.choice, wide.strength) == expected
    assert wide.error_before == pytest.approx(before, rel=1e-9)
    assert wide.error_after == pytest.approx(after, rel=1e-9)
    assert wide.error_before != pytest.approx(narrow.error_before, rel=1e-3)
    assert wide.choice == "refit"
    torch.testing.assert_close(wide.weight_change, solved_by_hand(x, r, wide.strength, intercept)[0])


def test_strengths_are_halved_until_one_is_left(monkeypatch):
    x, r, t = drawn(28, noise=0.1)
    parts = list(zip(*(values.tensor_split(4) for values in (x, r, t)), strict=True))
    tried, solve = [], module._Deviations.solve
    monkeypatch.setattr(module, "_ROWS_TO_HOLD_OUT_ONCE", 28)
    monkeypatch.setattr(module, "_WIDE", 6)
    monkeypatch.setattr(
        module._Deviations, "solve", lambda self, strength: (tried.append(strength), solve(self, strength))[1]
    )
    fit = fit_ridge([moments_of(*part) for part in parts], intercept=True)
    assert (fit.choice, fit.strength) == chosen_by_hand(parts, True, [0])[0] == ("refit", 1e-3)
    assert tried == [1.0, 0.1, 1e-2, 1e-3, 1e-3]  # the last on all rows


@pytest.mark.parametrize("groups", [1, 2])
def test_candidates_are_judged_on_some_outputs_that_stand_for_all(monkeypatch, groups):
    """Of 12 outputs on the three that move most, and on three others that count three times."""
    x, r, t = drawn(40, groups, outputs=12, noise=2.0)
    order = torch.tensor([4, 7, 1, 0, 2, 3, 5, 6, 8, 9, 10, 11])
    r *= 4.0 ** -order.argsort()  # output 4 moves most, then 7
    parts = list(zip(*(values.tensor_split(4) for values in (x, r, t)), strict=True))
    seen, solve = [], module._Deviations.solve
    monkeypatch.setattr(module, "_JUDGED_ON", 6)
    monkeypatch.setattr(
        module._Deviations,
        "solve",
        lambda self, strength: (seen.append(self.cross.shape[-1]), solve(self, strength))[1],
    )
    fit = fit_ridge([moments_of(*part) for part in parts], intercept=True)
    assert set(seen[:-1]) == {6}
    assert seen[-1] == 12
    stand = [4, 7, 1, *[0, 5, 9] * 3]
    expected, before, after = chosen_by_hand([(x, r[..., stand], t[..., stand]) for x, r, t in parts], True, range(4))
    assert (fit.choice, fit.strength) == expected
    assert [fit.error_before, fit.error_after] == pytest.approx([before, after], rel=1e-9)
    change, _ = solved_by_hand(x, r, fit.strength, True)
    torch.testing.assert_close(fit.weight_change, change, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("strength", [0.0, 1e-3])
def test_moments_that_are_singular_to_rounding(strength):
    """Features twice: the solution of least norm, by NumPy's pseudo-inverse, and the ridge's, by `least_squares`."""
    x, r, t = drawn(60)
    twice = torch.cat((x, x), dim=-1)
    sums = module._Deviations.of(moments_of(twice, r, t), intercept=True)
    change = module._solve_singular(sums.gram, sums.cross, strength * sums.eigenvalue[:, None])[0].T
    if strength:
        expected, _ = least_squares(twice[:, 0], r[:, 0], strength, True)
    else:
        around = (twice - twice.mean(0))[:, 0].numpy()
        expected = (np.linalg.pinv(around, rcond=1e-10) @ (r - r.mean(0))[:, 0].numpy()).T
    np.testing.assert_allclose(change, expected, rtol=1e-6, atol=1e-8)


def test_a_spread_at_the_edge_of_rounding_is_fitted_without_an_error():
    """As of a network whose BatchNorm has never seen data: means of 1, and a spread of a few units of rounding."""
    x, r, t = drawn(60)
    for spread in (1e-5, 1e-6, 1e-7):
        change, bias_change = solve_ridge(moments_of(1 + spread * x, r, t), 1e-3, intercept=True)
        assert torch.isfinite(change).all()
        assert torch.isfinite(bias_change).all()


def test_one_huge_feature_leaves_the_others_as_free_as_they_were():
    """One unit at 10⁵ times the others in one row of 128 is most of the mean variance."""
    torch.manual_seed(4)
    x, change = torch.randn(4000, 1, 20), torch.randn(1, 3, 20).double()
    r = torch.einsum("gmd,ngd->ngm", change.float(), x)
    fired = (torch.arange(4000) % 128 == 0)[:, None] * 1e5
    with_huge = torch.cat([x, fired[:, :, None].to(x) * torch.randn(4000, 1, 1).sign()], 2)
    for intercept in (False, True):
        plain, _ = solve_ridge(moments_of(x, r, r), 1e-3, intercept=intercept)
        beside, _ = solve_ridge(moments_of(with_huge, r, r), 1e-3, intercept=intercept)
        assert (plain - change).abs().max() < 0.01
        assert (beside[:, :, :20] - change).abs().max() < 0.5  # α is then of 100 variances: a tenth is taken away
        assert (beside[:, :, :20] - change).norm() < 0.15 * change.norm()
