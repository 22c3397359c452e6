"""Zeros of every layer's activations on training data."""

from collections.abc import Sequence

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.tables.columns import (
    amount,
    constant,
    header_of,
    measured,
    percentage,
    quantity,
    rows_of,
)
from lgelu_lab.report.markup import Table
from lgelu_lab.report.numbers import count

_COLUMNS = (
    constant("Layer", "layer"),
    constant("Units", "units", count),
    quantity("Zeros, %", "apoz", percentage),
    quantity("Outputs ≤ 0, %", "off_fraction", percentage),
    quantity("Close to zero, %", "near_zero_fraction", percentage),
    measured("Mean size", "mean_absolute"),
    quantity("Units never on", "never_on_units", amount),
    quantity("Units always zero", "dead_units", amount),
    constant("Outputs counted of each unit", "values", count),
)


def zeros_table(measurements: Sequence[MeasurementRecord]) -> Table:
    """A row per network and activation."""
    return Table(
        key="zeros",
        title="Zeros of the activations on training rows, layer by layer",
        caption="Zeros: outputs that are exactly zero, mean over the units (average percentage of zeros). A smooth "
        "gate has hardly any: beside them the share of outputs that are not positive, which is the same for ReLU, and "
        "of those close to zero (|a| at most the setting near_zero). A unit is never on where no output is positive. "
        "Zeros are a measurement; no speed-up is claimed. Mean ± sample standard deviation over seeds.",
        header=header_of(_COLUMNS),
        rows=rows_of(measurements, "zeros", ("model", "layer"), _COLUMNS),
        in_groups=True,
        text_columns=3,
    )
