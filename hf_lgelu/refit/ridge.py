"""The change of a linear map's weights that brings its outputs to the original's: ridge towards the present weights."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Literal

import torch
from torch import Tensor

from hf_lgelu.refit.moments import Moments

# α, relative to the size of the features: the mean eigenvalue of their Gram matrix, or close to it. The floor is a
# safety device: duplicated rows and cross-validation on few rows choose strengths below it that are far off elsewhere.
STRENGTHS = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
# For maps that read the residual stream and no gate's output: these strengths were chosen in the middle of
# SmolLM2-135M.
WEAKER = (1e-5, 1e-4)
# From this width and these rows on, only one fold is held out: four would take four times the time and the memory. An
# MLP of 1,024 units, fitted on 112 rows, and SmolLM2's blocks came out as near as with each fold held out in turn. A
# GPT-2 of width 512 did not on 64 rows: a KL of 0.0072 in place of 0.0063.
_WIDE, _ROWS_TO_HOLD_OUT_ONCE = 512, 256
# Candidates are judged on so many of a map's outputs: a solve for all outputs takes longer than the factorization. One
# half are those that the change moves most, the other half stand for all others.
_JUDGED_ON = 256
# A unit that fires at 10⁴ times the others dominates the mean, and a penalty of that size would freeze all others.
# So the size is at most this many times the mean without the largest features.
_MOST_OF_REST = 100.0
_LARGEST = 0.01  # of the features
_FEWEST_FEATURES = 8
_NO_SPREAD = 1e-12  # variance relative to the mean square that is rounding, not information

Choice = Literal["unchanged", "bias only", "refit"]


@dataclass(frozen=True)
class RidgeFit:
    """The chosen change of a linear map of g groups, with m outputs and d features each; tensors are float64.

    The errors are ‖ŷ − y‖² / ‖y − ȳ‖² over the rows held out, with the weights kept and with the choice. They are
    estimates where there are many outputs, and None without cross-validation, or where the original does not vary.
    """

    choice: Choice
    strength: float | None  # α of a refit
    weight_change: Tensor  # (g, m, d)
    bias_change: Tensor  # (g, m)
    error_before: float | None
    error_after: float | None
    moments: Moments  # over the rows of all folds


@dataclass(frozen=True)
class _Deviations:
    """Second moments around the means; for a map without a bias, around zero, with means of zero."""

    count: int
    feature_mean: Tensor
    residual_mean: Tensor
    gram: Tensor
    cross: Tensor
    residual_square: Tensor
    eigenvalue: Tensor  # (g,) mean eigenvalue of gram, or 100 times that of most features; zero where no feature varies

    @classmethod
    def of(cls, moments: Moments, intercept: bool) -> "_Deviations":
        """The deviations in the memory of `moments`, which are used up."""
        n, square = moments.count, moments.residual_square
        gram, cross = moments.gram, moments.cross
        size = gram.diagonal(dim1=1, dim2=2).clone()  # around zero
        x, r = moments.feature_sum / n, moments.residual_sum / n
        if intercept:
            gram.baddbmm_(x[:, :, None], x[:, None, :], alpha=-n)
            cross.baddbmm_(x[:, :, None], r[:, None, :], alpha=-n)
            square = square - n * r.square()
        else:
            x, r = torch.zeros_like(x), torch.zeros_like(r)
        return cls(n, x, r, gram, cross, square, _mean_eigenvalue(gram.diagonal(dim1=1, dim2=2), size))

    def of_outputs(self, outputs: Tensor) -> "_Deviations":
        """The deviations with some outputs of each group."""
        some = (self.residual_mean[:, outputs], self.cross[..., outputs], self.residual_square[:, outputs])
        return replace(self, **dict(zip(("residual_mean", "cross", "residual_square"), some, strict=True)))

    def change(self, choice: Choice, strength: float | None) -> tuple[Tensor | None, Tensor]:
        """(weight change transposed (g, d, m) or None for zero, bias change (g, m)) of a candidate."""
        if strength is not None:
            return self.solve(strength)
        return None, torch.zeros_like(self.residual_mean) if choice == "unchanged" else self.residual_mean

    def solve(self, strength: float) -> tuple[Tensor, Tensor]:
        """(Δᵀ, δb) with the least Σ‖r − Δx − δb‖² + α·e·‖Δ‖² in each group, e the `eigenvalue` and α the strength.

        The intercept δb is not penalized. Features that do not vary (dead units) get no change.
        """
        varies = self.eigenvalue > 0
        penalty = torch.where(varies, strength * self.eigenvalue, 1.0)[:, None]
        system, right = self.gram * varies[:, None, None], self.cross * varies[:, None, None]
        system.diagonal(dim1=1, dim2=2).add_(penalty)
        factor, failed = torch.linalg.cholesky_ex(system)
        if failed.any():
            change = _solve_singular(self.gram * varies[:, None, None], right, penalty)
        else:
            change = torch.cholesky_solve(right, factor)
        return change, self.residual_mean - _apply(change, self.feature_mean)

    def squared_error(self, change: Tensor | None, bias_change: Tensor) -> Tensor:
        """Σ(r − Δx − δb)² over these rows of each output, (g, m); `change` is Δᵀ, None for Δ = 0."""
        error, gap = self.residual_square, self.residual_mean - bias_change
        if change is not None:
            error = error + (change * torch.baddbmm(self.cross, self.gram, change, beta=-2)).sum(1)
            gap = gap - _apply(change, self.feature_mean)
        return (error + self.count * gap.square()).clamp(min=0)


def _solve_singular(gram: Tensor, right: Tensor, penalty: Tensor) -> Tensor:
    """(gram + penalty)⁻¹ · right for a gram matrix with negative eigenvalues, which are errors of rounding.

    They occur with features whose spread is small relative to their mean. Along an eigenvector whose eigenvalue is
    below rounding, the data say nothing, and the weights stay unchanged.
    """
    values, vectors = torch.linalg.eigh(gram)
    rounding = torch.finfo(values.dtype).eps * gram.shape[-1] * values.amax(-1, keepdim=True)
    inverse = torch.where(values > rounding, 1 / (values + penalty), 0.0)
    return vectors @ ((vectors.mT @ right) * inverse[:, :, None])


def held_out_once(width: int, rows: int) -> bool:
    """Whether `fit_ridge` holds out only the first fold: then the other folds may be added up."""
    return width >= _WIDE and rows >= _ROWS_TO_HOLD_OUT_ONCE


@torch.no_grad()
def fit_ridge(folds: list[Moments], *, intercept: bool, strengths: Sequence[float] = STRENGTHS) -> RidgeFit:
    """The best candidate, fitted on all folds: no change, a change of only the bias, or a ridge of some strength.

    Each candidate is fitted on all folds but one and scored on the fold held out, in turn; of a wide map only the first
    fold is held out (`held_out_once`). Of equal scores the lesser change wins. Without `strengths` the weights stay,
    and the bias may change. A single fold can score nothing: it gets the weakest strength, or without strengths no
    change. The list is emptied, and its sums are used up: they take most of the memory.
    """
    total = reduce(operator.add, folds) if len(folds) > 1 else folds[0]
    best: tuple[Choice, float | None] = ("refit", strengths[0]) if strengths else ("unchanged", None)
    before = after = None
    if len(folds) > 1:
        best, before, after = _choose(folds, total, intercept, strengths)
    folds.clear()
    everything = _Deviations.of(total.copy(), intercept)
    change, bias_change = everything.change(*best)
    change = torch.zeros_like(everything.cross) if change is None else change
    return RidgeFit(*best, change.mT.contiguous(), bias_change, before, after, total)


def _choose(
    folds: list[Moments], total: Moments, intercept: bool, strengths: Sequence[float]
) -> tuple[tuple[Choice, float | None], float | None, float | None]:
    """(the candidate of the least error on the folds held out, the error without a change, the candidate's error)."""
    wide = held_out_once(total.gram.shape[-1], total.count)
    scored = folds[0] if wide else total
    rests = [reduce(operator.add, folds[1:])] if wide else [total - fold for fold in folds]  # before folds are used up
    whole = [
        (_Deviations.of(rest, intercept), _Deviations.of(fold, intercept))
        for rest, fold in zip(rests, folds[: len(rests)], strict=True)
    ]
    outputs, stand_for = _judged_outputs([fitted for fitted, _ in whole])
    parts = [(fitted.of_outputs(outputs), unseen.of_outputs(outputs)) for fitted, unseen in whole]
    square = scored.original_square[:, outputs]
    around_mean = square - scored.original_sum[:, outputs].square() / scored.count
    square, spread = (float((sums * stand_for).sum()) for sums in (square, around_mean))
    del rests, whole, scored
    folds.clear()

    @cache
    def error_of(choice: Choice, strength: float | None) -> float:
        errors = [unseen.squared_error(*fitted.change(choice, strength)) for fitted, unseen in parts]
        return float((sum(errors) * stand_for).sum())

    # The error is taken to fall and then rise with the strength: each step halves the strengths that are left.
    low, high = 0, len(strengths) - 1
    while low < high:
        middle = (low + high) // 2
        # Of equal errors the stronger wins, which changes less.
        is_higher = error_of("refit", strengths[middle + 1]) <= error_of("refit", strengths[middle])
        low, high = (middle + 1, high) if is_higher else (low, middle)
    candidates: list[tuple[Choice, float | None]] = [("unchanged", None)]
    if intercept:
        candidates.append(("bias only", None))
    if strengths:
        candidates.append(("refit", strengths[low]))
    best = min(candidates, key=lambda candidate: error_of(*candidate))  # the first of equal errors
    if spread <= _NO_SPREAD * square:
        return best, None, None
    return best, error_of("unchanged", None) / spread, error_of(*best) / spread


def _judged_outputs(parts: Sequence[_Deviations]) -> tuple[Tensor, Tensor]:
    """(outputs to judge candidates on, how many outputs each stands for): those that features move most, others evenly.

    Where there are few outputs, these are all of them.
    """
    loud = torch.stack([part.cross.square().sum((0, 1)) for part in parts]).sum(0)
    order, half = loud.argsort(descending=True), _JUDGED_ON // 2
    if len(order) <= _JUDGED_ON:
        return order, torch.ones_like(loud)
    rest = order[half:]
    evenly = rest[torch.arange(half, device=rest.device) * len(rest) // half]
    stand_for = torch.ones_like(loud[:_JUDGED_ON])
    stand_for[half:] = len(rest) / half
    return torch.cat([order[:half], evenly]), stand_for


@torch.no_grad()
def nearest_features(sums: Sequence[Sequence[Moments]], *, intercept: bool) -> tuple[list[Moments], Tensor]:
    """(the folds with the features of least held-out error in each group, the number (g,) of these features).

    `sums` are the folds with one kind of features after another. Each fold's rows are judged by a ridge of the weakest
    strength on the other folds.
    """
    errors = []
    for folds in sums:
        total, error = reduce(operator.add, folds), torch.zeros_like(folds[0].residual_square)
        for held_out in folds:
            fitted = _Deviations.of(total - held_out, intercept).solve(STRENGTHS[0])
            error += _Deviations.of(held_out.copy(), intercept).squared_error(*fitted)
        errors.append(error.sum(1))
    nearest = torch.stack(errors).argmin(0)
    groups = torch.arange(len(nearest), device=nearest.device)
    chosen = []
    for fold in zip(*sums, strict=True):
        alike = zip(*(features.sums for features in fold), strict=True)
        chosen.append(Moments(fold[0].count, *(torch.stack(features)[nearest, groups] for features in alike)))
    return chosen, nearest


def _mean_eigenvalue(spread: Tensor, size: Tensor) -> Tensor:
    """(g,) from the diagonals (g, d) of a Gram matrix: the mean, at most 100 times that without the largest hundredth.

    `size` is the diagonal around zero. A spread that is tiny relative to it is rounding, and counts as 0.
    """
    mean, width = spread.mean(1), spread.shape[1]
    eigenvalue = mean
    if width >= _FEWEST_FEATURES:
        rest = spread.sort(1).values[:, : width - math.ceil(_LARGEST * width)].mean(1)
        eigenvalue = torch.where(rest > _NO_SPREAD * mean, torch.minimum(mean, _MOST_OF_REST * rest), mean)
    return torch.where(mean > _NO_SPREAD * size.mean(1), eigenvalue, 0.0)


def _apply(change: Tensor, mean: Tensor) -> Tensor:
    """Δx of (g, d, m) and (g, d): (g, m)."""
    return (change.mT @ mean[:, :, None]).squeeze(2)
