"""How far the swap can move the scores: certified bounds beside the measured change."""

from collections.abc import Sequence

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.tables.columns import (
    constant,
    header_of,
    measured,
    percentage,
    quantity,
    rows_of,
    worst,
)
from lgelu_lab.report.markup import Table
from lgelu_lab.report.numbers import count

_COLUMNS = (
    constant("Rows", "rows", count),
    worst("Gate bound κ/λ", "gate_bound"),
    worst("Gate, measured", "measured_gate_error"),
    measured("Bound, any input", "bound"),
    measured("Bound, these rows", "input_bound"),
    measured("Measured change", "measured"),
    measured("Bound ÷ measured", "ratio", 2),
    measured("These rows ÷ measured", "input_ratio", 2),
    quantity("Predictions certified, %", "certified_fraction", percentage),
    quantity("Predictions unchanged, %", "unchanged_predictions", percentage),
)


def certificate_table(measurements: Sequence[MeasurementRecord]) -> Table:
    """A row per network with smooth gates."""
    return Table(
        key="certificate",
        title="Change of the scores by the swap: certified and measured",
        caption="A gate moves by at most κ/λ when ReLU takes its place; the following layers carry that to the scores. "
        "Bounds hold in exact arithmetic, for any input and for the test rows; changes are the largest over scores and "
        "rows, in units of the scores. Certified: the bound is smaller than the lead of the predicted class. Mean ± "
        "sample standard deviation over seeds; of the gates the largest.",
        header=header_of(_COLUMNS),
        rows=rows_of(measurements, "certificate", ("model",), _COLUMNS),
        in_groups=True,
        text_columns=2,
    )
