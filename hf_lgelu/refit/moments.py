"""Sums over rows from which a ridge is solved and scored: memory does not grow with the rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_lgelu.environment import matmul_backends
from hf_lgelu.processes import summed

_BLOCK = 512
_ROWS = 8192  # of one GEMM in the features' dtype; between GEMMs the sums are float64


@dataclass(eq=False)
class Moments:
    """Sums over rows of features x, residuals r and the original's values t, for each of g groups; all float64."""

    count: int  # rows
    feature_sum: Tensor  # Σx, (g, d)
    residual_sum: Tensor  # Σr, (g, m)
    original_sum: Tensor  # Σt, (g, m)
    gram: Tensor  # Σxxᵀ, (g, d, d)
    cross: Tensor  # Σxrᵀ, (g, d, m)
    residual_square: Tensor  # Σr², (g, m)
    original_square: Tensor  # Σt², (g, m)

    @classmethod
    def zeros(cls, groups: int, features: int, outputs: int, device: torch.device | str = "cpu") -> "Moments":
        """Sums over no rows."""
        of_features, of_outputs = (groups, features), (groups, outputs)
        products = (groups, features, features), (groups, features, outputs)
        shapes = (of_features, of_outputs, of_outputs, *products, of_outputs, of_outputs)
        return cls(0, *(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    @torch.no_grad()
    def add(self, features: Tensor, residuals: Tensor, originals: Tensor, counted: Tensor | None = None) -> None:
        """Add rows: features (n, g, d), residuals and originals (n, g, m); only those that are `counted` (n,), or all.

        Products are taken in the features' dtype, half precision as float32, and never with TF32 or under autocast.
        """
        if counted is not None:
            features, residuals, originals = (rows[counted] for rows in (features, residuals, originals))
        if not len(features):
            return
        with _full_precision(features.device):
            for rows in zip(*(rows.split(_ROWS) for rows in (features, residuals, originals)), strict=True):
                self._add(*map(widened, rows))

    def _add(self, features: Tensor, residuals: Tensor, originals: Tensor) -> None:
        # Centred before the product: in float32 a mean much larger than the spread would drown the spread.
        # Around a shift c = x̄ - δ, Σxrᵀ = Σ(x - c)(r - c')ᵀ + n(x̄r̄ᵀ - δδ'ᵀ).
        n, device = len(features), self.gram.device
        self.residual_square += _square(residuals.to(device))
        self.original_square += _square(originals.to(device))
        features, of_features = self._centred(features)
        residuals, of_residuals = self._centred(residuals)
        _, of_originals = self._centred(originals)
        transposed, residuals = features.permute(1, 2, 0), residuals.to(features.dtype).transpose(0, 1)
        _add_gram(self.gram, features.transpose(0, 1))
        self.cross += (transposed @ residuals).to(device)
        signed = of_features.mT * of_features.new_tensor([n, -n])
        self.gram.baddbmm_(signed, of_features)
        self.cross.baddbmm_(signed, of_residuals)
        self.count += n
        self.feature_sum += n * of_features[:, 0]
        self.residual_sum += n * of_residuals[:, 0]
        self.original_sum += n * of_originals[:, 0]

    def _centred(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(rows minus almost their mean, (g, 2, d) float64: the mean, and the part of it that is still in the rows)."""
        shift = rows.mean(0)
        rows = rows - shift
        shift, left = (mean.to(self.gram.device, torch.float64) for mean in (shift, rows.mean(0)))
        return rows, torch.stack((shift + left, left), dim=1)

    @property
    def sums(self) -> list[Tensor]:
        """All but the count, in the order of the fields."""
        return [*vars(self).values()][1:]

    def __add__(self, other: "Moments") -> "Moments":
        """The sums over the rows of both."""
        return Moments(self.count + other.count, *map(torch.add, self.sums, other.sums))

    def __sub__(self, other: "Moments") -> "Moments":
        """The sums over the rows that are not in `other`; all rows of `other` must be in `self`."""
        return Moments(self.count - other.count, *map(torch.sub, self.sums, other.sums))

    def __iadd__(self, other: "Moments") -> "Moments":
        """These sums with those over the rows of `other` added."""
        self.count += other.count
        for own, theirs in zip(self.sums, other.sums, strict=True):
            own += theirs
        return self

    def copy(self) -> "Moments":
        """The same sums in memory of their own."""
        return Moments(self.count, *map(torch.clone, self.sums))

    def is_finite(self) -> bool:
        """Whether all sums are finite."""
        return all(bool(total.isfinite().all()) for total in self.sums)

    def reduce_over_processes(self) -> "Moments":
        """The sums over the rows of all processes, the same on each process."""
        count = torch.tensor(self.count, device=self.gram.device)
        return Moments(int(summed(count)), *map(summed, self.sums))


def _add_gram(total: Tensor, rows: Tensor) -> None:
    """Add XᵀX of (g, n, d) to (g, d, d), block by block: the upper half is computed, the lower half is its mirror.

    So float32 products of a block's rows stand in memory, and not those of the whole matrix, nor their float64 copy.
    """
    for start in range(0, total.shape[1], _BLOCK):
        stop = start + _BLOCK
        product = (rows.mT[:, start:stop] @ rows[..., start:]).to(total.device)
        total[:, start:stop, start:] += product
        total[:, stop:, start:stop] += product[..., _BLOCK:].mT


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """A block in which float32 products are exact float32: the error of TF32 is too large for the weakest ridge."""
    backends = matmul_backends()
    chosen = [backend.fp32_precision for backend in backends]
    try:
        overall = torch.get_float32_matmul_precision()
    except RuntimeError:  # the backends are set to different precisions
        overall = "highest"
    try:
        # This also sets the backends; if they contradict it, cuBLAS may refuse to multiply.
        torch.set_float32_matmul_precision("highest")
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(overall)
        for backend, precision in zip(backends, chosen, strict=True):
            backend.fp32_precision = precision


def _square(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=0, dtype=torch.float64) ** 2


def widened(value: Tensor) -> Tensor:
    """A tensor in half precision as float32; any wider tensor unchanged."""
    return value.float() if value.dtype.itemsize < 4 else value


class FitRows(NamedTuple):
    """The rows of a layer on one batch, and a mask of the rows that count; None means that all rows count."""

    features: Tensor  # (n, g, d)
    residuals: Tensor  # (n, g, m), originals minus the student's values: what the ridge fits
    originals: Tensor  # (n, g, m), the original's values at the layer's aim
    counted: Tensor | None
