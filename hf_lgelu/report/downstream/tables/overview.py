"""What each measurement came to, in a table for the README."""

from collections.abc import Sequence

from hf_lgelu.downstream.records import MeasurementRecord
from hf_lgelu.report.markup import Table


def overview_table(measurements: Sequence[MeasurementRecord]) -> Table:
    """A row per measurement and benchmark."""
    return Table("downstream", "What the ReLU networks allow", "", ("Benchmark", "Measured"), ())
