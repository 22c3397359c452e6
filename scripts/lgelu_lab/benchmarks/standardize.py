"""Zero mean and unit variance, by the statistics of the training rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Standardizer:
    """(x − mean) / standard deviation (population, divided by N); a constant becomes 0 everywhere.

    `mean` and `deviation` are float64, of shape (F,) for a statistic a column or () for one overall.
    """

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def fit(cls, rows: np.ndarray, *, per_column: bool) -> "Standardizer":
        """Take the statistics of (N, F) numbers: of each column, or of all of them together."""
        axis = 0 if per_column else None
        mean = np.mean(rows, axis=axis, dtype=np.float64)
        deviation = np.std(rows, axis=axis, dtype=np.float64)
        # Of a constant like 0.1 the rounded mean is not exact, and the deviation comes out near 1e-17.
        constant = np.min(rows, axis=axis) == np.max(rows, axis=axis)
        return cls(np.asarray(mean), np.where(constant, 0.0, deviation))

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """(N, F) numbers → (N, F) float32."""
        # float64 only where a column needs it: fnlwgt's 1e6 minus its mean would lose digits in float32.
        working = np.float32 if rows.dtype == np.uint8 else np.float64
        scale = np.divide(1.0, self.deviation, out=np.zeros_like(self.deviation), where=self.deviation > 0)
        standardized = rows.astype(working)
        standardized -= self.mean.astype(working)
        standardized *= scale.astype(working)
        return standardized.astype(np.float32, copy=False)

    def describe(self) -> dict[str, Any]:
        """{"mean": ..., "deviation": ...}, numbers or lists of numbers."""
        return {"mean": self.mean.tolist(), "deviation": self.deviation.tolist()}
