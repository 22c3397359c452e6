"""How exact the linear piece around an input is, and what a first-order model of a smooth network misses."""

from collections.abc import Sequence

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.measurements import Row
from lgelu_lab.report.downstream.tables.columns import (
    Column,
    amount,
    constant,
    header_of,
    measured,
    percentage,
    quantity,
    refusals,
    rows_of,
    worst,
)
from lgelu_lab.report.markup import Cell, Table


def _model(rows: Sequence[Row]) -> Cell | str:
    return Cell("first order", "warning") if rows[0]["refusal"] is not None else "exact piece"


_COLUMNS = (
    Column("Linear model", _model),
    constant("Step, L2", "perturbation", lambda value: f"{value:g}"),
    quantity("Still inside the region, %", "inside", percentage),
    worst("Largest error, float64", "max_error_float64"),
    worst("Largest error, float32", "max_error_float32"),
    worst("Inside or not, float64", "max_error_everywhere"),
    quantity("Regions", "distinct_regions", amount),
    constant("Points", "points"),
    measured("Seconds for all", "seconds"),
)


def linear_pieces_table(measurements: Sequence[MeasurementRecord]) -> Table:
    """A row per network and length of the step."""
    return Table(
        key="linear-pieces",
        title="Exact linear pieces, and first-order models of smooth networks",
        caption="W and b with f(z) = W·z + b around each test row, and random steps away from it in standardized "
        "features. Of a ReLU network the error is the largest over the steps that stay inside the row's region; of a "
        "smooth one, which has no regions, over all steps, with its Jacobian as W. Errors in units of the scores, the "
        "largest over seeds; the others mean ± sample standard deviation.",
        header=header_of(_COLUMNS),
        rows=rows_of(measurements, "linear_pieces", ("model", "perturbation"), _COLUMNS),
        notes=refusals(measurements, "linear_pieces"),
        in_groups=True,
        text_columns=3,
    )
