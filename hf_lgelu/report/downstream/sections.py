"""The sections on what ReLU networks allow: one for all, one a measurement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_lgelu.downstream.records import MeasurementRecord
from hf_lgelu.report.downstream.figures.verification import draw_verification
from hf_lgelu.report.downstream.path.draw import draw_path
from hf_lgelu.report.downstream.tables.basis import measured_with_table
from hf_lgelu.report.downstream.tables.networks import networks_table
from hf_lgelu.report.downstream.tables.overview import overview_table
from hf_lgelu.report.downstream.tables.verification import verification_table
from hf_lgelu.report.figures.drawing import Drawing
from hf_lgelu.report.markup import Table
from hf_lgelu.report.section import Section
from hf_lgelu.studies.records import RunRecord

Measurements = Sequence[MeasurementRecord]
NONE_THERE = "This was not measured yet: missing, not zero."


@dataclass(frozen=True)
class Part:
    """What the report shows of one measurement; the key in PARTS is the measurement's name."""

    title: str
    text: str
    tables: tuple[Callable[[Measurements], Table], ...]
    draw: Callable[[Measurements], Drawing | None] | None = None


PARTS: dict[str, Part] = {
    "verification": Part(
        "Downstream: proofs of robustness",
        "Marabou decides exactly whether a ReLU network can be fooled near an input. It has no smooth gate.",
        (verification_table,),
        draw_verification,
    ),
}
"""{measurement: its part of the report}, in the report's order."""


def downstream_sections(runs: Sequence[RunRecord], measurements: Measurements) -> list[Section]:
    """A section on all measurements and one on each, those that were not made too.

    Args:
        runs: those of the study "downstream", which trained the networks.
        measurements: of those networks.

    Raises ValueError where a measurement is there twice for a seed.
    """
    return [_overview(runs, measurements), *(_section(name, part, measurements) for name, part in PARTS.items())]


def _overview(runs: Sequence[RunRecord], measurements: Measurements) -> Section:
    drawing = draw_path(runs, measurements)
    tables = (overview_table(measurements), networks_table(measurements), measured_with_table(measurements))
    return Section(
        "downstream",
        "Downstream: what a ReLU network allows",
        "The reason to harden: tools that take piecewise-linear networks. Each was run on the same networks with GELU, "
        "with ReLU from the start, and with hardened λ-GELU as it is and swapped.",
        (drawing,) if drawing else (),
        tuple(table for table in tables if table.rows),
    )


def _section(name: str, part: Part, measurements: Measurements) -> Section:
    key = f"downstream-{name.replace('_', '-')}"
    if all(record.measurement != name for record in measurements):
        return Section(key, part.title, f"{part.text} {NONE_THERE}")
    drawing = part.draw(measurements) if part.draw else None
    return Section(
        key, part.title, part.text, (drawing,) if drawing else (), tuple(make(measurements) for make in part.tables)
    )
