"""What Marabou proves, refutes and leaves open, and which networks it refuses."""

from collections.abc import Sequence

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.measurements import Row
from lgelu_lab.report.downstream.tables.columns import (
    Column,
    amount,
    constant,
    header_of,
    measured,
    quantity,
    refusals,
    rows_of,
    worst,
)
from lgelu_lab.report.markup import Cell, Table

_REFUSED = "refused"


def _epsilon(rows: Sequence[Row]) -> Cell | str:
    return Cell(_REFUSED, "warning") if rows[0]["refusal"] is not None else f"{rows[0]['epsilon']:g}"


_COLUMNS = (
    Column("ε", _epsilon),
    constant("Images", "points"),
    quantity("Proved", "proved", amount),
    quantity("by bounds alone", "proved_by_bounds", amount),
    quantity("Refuted", "refuted", amount),
    quantity("by attack", "refuted_by_attack", amount),
    quantity("Timeout", "timeout", amount),
    quantity("Unknown", "unknown", amount),
    quantity("Unconfirmed", "unconfirmed", amount),
    measured("Median time, s", "median_seconds", 2),
    worst("Longest, s", "max_seconds"),
)


def verification_table(measurements: Sequence[MeasurementRecord]) -> Table:
    """A row per network and ε, and one per network that is refused."""
    return Table(
        key="verification",
        title="Local robustness by Marabou, images proved and refuted per ε",
        caption="Of the first test images that each network classifies correctly: is the class the same everywhere in "
        "the L∞ ball of radius ε, a share of the pixels' range? Refuted: a counterexample that changes the class when "
        "replayed in torch; unconfirmed: one of the solver's that does not. A proof holds in the solver's arithmetic "
        "and up to a margin. Mean ± sample standard deviation over seeds.",
        header=header_of(_COLUMNS),
        rows=rows_of(measurements, "verification", ("model", "epsilon"), _COLUMNS),
        notes=_refusals(measurements),
        in_groups=True,
    )


def _refusals(measurements: Sequence[MeasurementRecord]) -> tuple[str, ...]:
    lines = refusals(measurements, "verification")
    return (*lines, "Other verifiers can bound a GELU network; the refusal is this solver's.") if lines else ()
