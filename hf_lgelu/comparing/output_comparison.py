"""The distance of one network's output from another's on the same samples."""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_lgelu.comparing.distance import Distance
from hf_lgelu.networks.outputs import Kind

_VARIES = 1e-9  # least variance, as a share of the mean square, of an output that is not constant up to rounding
_NUMBERS_AT_ONCE = 2**21  # compared in float64
_TIE = 1e-7  # of cosines: rounding may part equally near samples by this much
MOST_NEIGHBOURS = 2048
"""The most samples among which nearest neighbours are searched: the products of all pairs are in memory."""


class OutputComparison:
    """The distance of one network's output from another's on the same samples, added up over predictions.

    A prediction is a row of numbers along the last axis (`classes_last`). Numbers are compared in float64, in large
    outputs a few rows at a time. An infinity that both networks give at one place is no change.

    Class scores have a `kl`, embeddings an `embedding`, and all values a `relative_error`.
    """

    def __init__(self) -> None:
        self.rows = self._unchanged = self._rows_of_scores = 0
        self.largest_change = self.largest_output = self._squares = 0.0
        self._columns: dict[int, tuple[int, Tensor]] = {}  # {columns: (rows with as many, sum of each column)}
        self._kls: list[float] = []  # of each sample, like the errors
        self._errors: list[float] = []
        self._cosines: list[float] = []
        self._vectors: list[Tensor] = []  # (2, samples, columns) of both networks, for the neighbours

    def add(
        self, original: Tensor, changed: Tensor, counted: Tensor | None = None, *, kind: Kind = "values"
    ) -> "OutputComparison":
        """This comparison, with a batch of outputs added, (samples, ..., columns).

        `counted` (samples, ...) says which predictions count; None for all. If a sample's embedding has several
        positions, it is the mean of the positions that count, as sentence-transformers pools by default. Probabilities
        must come as scores (`Outputs.scores`).
        """
        samples = torch.arange(len(original)).reshape(-1, *[1] * (original.ndim - 2)).expand(original.shape[:-1])
        if counted is None:
            rows = [samples.flatten(), original.reshape(-1, original.shape[-1]), changed.reshape(-1, changed.shape[-1])]
        else:
            rows = [samples[counted.cpu()], original[counted], changed[counted]]
        kls, errors = torch.zeros(2, len(original), dtype=torch.float64)
        size = max(1, _NUMBERS_AT_ONCE // original.shape[-1])
        for owners, wanted, found in zip(*(part.split(size) for part in rows), strict=True):
            if not len(owners):
                continue
            wanted, found = ((part.cpu() if part.device.type == "mps" else part).double() for part in (wanted, found))
            change, finite = difference(found, wanted), wanted.nan_to_num(0.0, 0.0, 0.0)
            self.rows += len(owners)
            self._unchanged += int(same_classes(wanted, found).sum())
            self.largest_change = float(np.maximum(self.largest_change, change.abs().max().item()))
            self.largest_output = max(self.largest_output, finite.abs().max().item())
            self._squares += finite.square().sum().item()
            self._add_columns(len(owners), finite.sum(0).cpu())
            errors.index_add_(0, owners, change.square().sum(-1).cpu())
            if kind in ("scores", "probabilities"):
                self._rows_of_scores += len(owners)
                kls.index_add_(0, owners, kl_terms(wanted, found).sum(-1).cpu())
        self._kls += kls.tolist()
        self._errors += errors.tolist()
        if kind == "embeddings":
            vectors = torch.stack([_vectors(outputs, counted) for outputs in (original, changed)])
            self._vectors.append(vectors[:, : max(0, MOST_NEIGHBOURS - len(self._cosines))])
            self._cosines += F.cosine_similarity(*vectors.double(), dim=-1).tolist()
        return self

    def merge(self, other: "OutputComparison") -> None:
        """Add the sums of another comparison: of the same networks in another process, or of another output."""
        for sums in ("rows", "_unchanged", "_rows_of_scores", "_squares", "_kls", "_errors", "_cosines", "_vectors"):
            setattr(self, sums, getattr(self, sums) + getattr(other, sums))
        self.largest_change = float(np.maximum(self.largest_change, other.largest_change))  # with NaN, not as max
        self.largest_output = max(self.largest_output, other.largest_output)
        for count, total in other._columns.values():
            self._add_columns(count, total)

    def _add_columns(self, count: int, total: Tensor) -> None:
        before, sum_before = self._columns.get(len(total), (0, torch.zeros_like(total)))
        self._columns[len(total)] = before + count, sum_before + total

    @property
    def agreement(self) -> float | None:
        """The share of predictions whose largest score stays where it is; None without scores of classes."""
        return self._unchanged / self.rows if self._are_scores else None

    def distance(self, output: str = "") -> Distance:
        """The distance as a record of the output of this name."""
        return Distance(
            output,
            self.rows,
            self.kl,
            self.agreement,
            self.largest_change,
            self.largest_output,
            self.relative_error,
            self.embedding,
        )

    @property
    def embedding(self) -> dict[str, float]:
        """Measures of the distance of embeddings, by samples; empty for other outputs.

        "cosine" is the mean cosine of a sample's two embeddings, "least_cosine" the least. "same_neighbour" is the
        share of samples whose nearest other sample by cosine stays the nearest, among the first `MOST_NEIGHBOURS`. With
        fewer than three samples it is left out. Of equally near samples any is the nearest.
        """
        if not self._cosines:
            return {}
        cosines = torch.tensor(self._cosines, dtype=torch.float64)
        found = {"cosine": cosines.mean().item(), "least_cosine": cosines.min().item()}
        units = F.normalize(torch.cat(self._vectors, 1)[:, :MOST_NEIGHBOURS].double(), dim=-1)
        if units.shape[1] > 2:
            original, changed = ((each @ each.T).fill_diagonal_(-math.inf) for each in units)
            of_chosen = original.gather(1, changed.argmax(1, keepdim=True))
            found["same_neighbour"] = (of_chosen >= original.amax(1, keepdim=True) - _TIE).double().mean().item()
        return found

    @property
    def kl(self) -> float | None:
        """The mean over predictions of KL(original ‖ changed), in nats; None unless all rows are scores of classes."""
        return sum(self._kls) / self.rows if self._are_scores else None

    @property
    def relative_error(self) -> float:
        """Σ(changed − original)² / Σ(original − its mean)²: a share of squares, with a mean for each column.

        If an output does not vary, as with a single row, its error is relative to Σ original².
        """
        error = sum(self._errors)
        if not self._scale:  # the original is 0 everywhere, or NaN
            return error if math.isnan(error) else float(error > 0)
        return error / self._scale

    @property
    def _scale(self) -> float:
        varying = self._squares - sum((total.square().sum() / count).item() for count, total in self._columns.values())
        return varying if varying > _VARIES * self._squares else self._squares

    @property
    def gaps(self) -> tuple[float, ...]:
        """Each sample's part of the KL, or of an output without scores of classes its part of the relative error."""
        terms, whole = (self._kls, self.rows) if self._are_scores else (self._errors, self._scale)
        return tuple(term / (whole or 1.0) for term in terms)

    @property
    def _are_scores(self) -> bool:
        return 0 < self._rows_of_scores == self.rows


def _vectors(output: Tensor, counted: Tensor | None) -> Tensor:
    """(samples, columns) float32 on the CPU: the mean over a sample's positions; a sample without one is left out."""
    if counted is None:
        rows = list(output.reshape(len(output), -1, output.shape[-1]))
    else:
        rows = [sample[kept] for sample, kept in zip(output, counted, strict=True)]
    means = [row.float().mean(0).cpu() for row in rows if len(row)]
    return torch.stack(means) if means else torch.empty(0, output.shape[-1])


def difference(output: Tensor, other: Tensor) -> Tensor:
    """`output - other`, with 0 where both are the same infinity, which models give for impossible classes."""
    return torch.where(output == other, 0.0, output - other)


def same_classes(output: Tensor, other: Tensor) -> Tensor:
    """The mask (...) of rows of (..., classes) without NaN in which both have the largest score at the same class."""
    (largest, classes), (other_largest, other_classes) = output.max(-1), other.max(-1)
    return (classes == other_classes) & ~largest.isnan() & ~other_largest.isnan()  # the largest of a NaN is NaN


def kl_terms(reference: Tensor, output: Tensor) -> Tensor:
    """p·log(p/q) of every class, (..., classes), from logits; an impossible class (p = 0) adds nothing."""
    expected, given = F.log_softmax(reference, dim=-1), F.log_softmax(output, dim=-1)
    terms = F.kl_div(given, expected, reduction="none", log_target=True)
    return terms.masked_fill(expected == -math.inf, 0.0)
