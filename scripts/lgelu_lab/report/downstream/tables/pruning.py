"""Networks without dead units, and pruned by APoZ and by magnitude, before and after fine-tuning."""

from collections.abc import Sequence

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.measurements import Row, over_seeds
from lgelu_lab.report.downstream.tables.columns import (
    Column,
    constant,
    header_of,
    percentage,
    refusals,
    rows_of,
    score,
    worst,
)
from lgelu_lab.report.markup import Cell, Table

CRITERIA = {"none": "nothing", "dead": "dead units", "apoz": "by APoZ", "magnitude": "by magnitude"}
"""What the tables call the criteria of `downstream.pruning`."""


def parameters_left(row: Row) -> float | None:
    """Share of the parameters; None where nothing was pruned."""
    return None if row["parameters"] is None else row["parameters"] / row["parameters_before"]


def _pruned(rows: Sequence[Row]) -> Cell | str:
    row = rows[0]
    words = CRITERIA.get(row["criterion"], row["criterion"])
    if row["fraction"] is not None:
        words += f", {row['fraction']:.0%}"
    elif row["rule"] is not None:
        words += f", {row['rule']}"
    return Cell(words, "warning") if all(row["refusal"] is not None for row in rows) else words


_COLUMNS = (
    Column("Removed", _pruned),
    constant("Units left per layer", "widths"),
    Column("Parameters left, %", lambda rows: over_seeds([parameters_left(row) for row in rows], percentage)),
    score("Score before", "score_before"),
    score("Score pruned", "score_pruned"),
    score("Score fine-tuned", "score_finetuned"),
    worst("Largest logit change, calibration rows", "calibration_max_logit_change"),
    worst("Largest logit change, evaluation split", "eval_max_logit_change"),
)


def pruning_table(measurements: Sequence[MeasurementRecord]) -> Table:
    """A row per network, criterion and rule."""
    return Table(
        key="pruning",
        title="Units removed by APoZ and by magnitude",
        caption="Dead units never fire on the calibration rows: without them every logit there is the same but for "
        "rounding. APoZ: the units with the most zeros go. Magnitude: those with the smallest L1 norm of incoming "
        "weights. Every row is fine-tuned alike, also the network from which nothing was removed. A dash: refused. "
        "Mean ± sample standard deviation over seeds.",
        header=header_of(_COLUMNS),
        rows=rows_of(measurements, "pruning", ("model", "criterion", "rule", "fraction"), _COLUMNS),
        notes=refusals(measurements, "pruning"),
        in_groups=True,
        text_columns=4,
    )
