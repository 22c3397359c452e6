"""The sections on what ReLU networks allow: one for all, one a measurement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.figures.conversion import draw_conversion_scores
from lgelu_lab.report.downstream.figures.conversion_finetuning import draw_finetuning
from lgelu_lab.report.downstream.figures.int8 import draw_int8
from lgelu_lab.report.downstream.figures.linear_pieces import draw_linear_pieces
from lgelu_lab.report.downstream.figures.pruning import draw_pruning
from lgelu_lab.report.downstream.figures.verification import draw_verification
from lgelu_lab.report.downstream.figures.zeros import draw_zeros
from lgelu_lab.report.downstream.path.draw import draw_path
from lgelu_lab.report.downstream.tables.basis import measured_with_table
from lgelu_lab.report.downstream.tables.certificate import certificate_table
from lgelu_lab.report.downstream.tables.conversion import conversion_table
from lgelu_lab.report.downstream.tables.conversion_finetuning import finetuning_table
from lgelu_lab.report.downstream.tables.int8 import int8_table
from lgelu_lab.report.downstream.tables.linear_pieces import linear_pieces_table
from lgelu_lab.report.downstream.tables.networks import networks_table
from lgelu_lab.report.downstream.tables.overview import overview_table
from lgelu_lab.report.downstream.tables.pruning import pruning_table
from lgelu_lab.report.downstream.tables.verification import verification_table
from lgelu_lab.report.downstream.tables.zeros import zeros_table
from lgelu_lab.report.figures.drawing import Drawing
from lgelu_lab.report.markup import Table
from lgelu_lab.report.section import Section
from lgelu_lab.studies.records import RunRecord

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
    "int8": Part(
        "Downstream: integer inference",
        "onnxruntime runs each network in float32 and in int8. A ReLU costs nothing there; a smooth gate needs its "
        "input back in float32.",
        (int8_table,),
        draw_int8,
    ),
    "verification": Part(
        "Downstream: proofs of robustness",
        "Marabou decides exactly, given the time, whether a ReLU network can be fooled near an input. It has no GELU.",
        (verification_table,),
        draw_verification,
    ),
    "zeros": Part(
        "Downstream: zeros",
        "A ReLU network computes many exact zeros, and some of its units never fire. A smooth gate has small negative "
        "outputs in their place.",
        (zeros_table,),
        draw_zeros,
    ),
    "pruning": Part(
        "Downstream: pruning",
        "Units that never fire can go without a trace; the next candidates are those that fire least, or those with "
        "the smallest weights.",
        (pruning_table,),
        draw_pruning,
    ),
    "linear_pieces": Part(
        "Downstream: exact linear pieces",
        "A ReLU network is linear around almost every input: W and b of that piece explain it there exactly. A smooth "
        "network has a first-order model alone, whose error grows with the square of the step.",
        (linear_pieces_table,),
        draw_linear_pieces,
    ),
    "certificate": Part(
        "Downstream: what the swap can change at most",
        "Before swapping: a bound on the change of every score, beside the change that was then measured.",
        (certificate_table,),
    ),
    "conversion": Part(
        "Downstream: ReLU without training",
        "The other road to a ReLU network: the gates of a finished GELU network become ReLU, and only the linear maps "
        "behind them are refitted, layer by layer, on unlabelled inputs. Hardening is the road for those who train.",
        (conversion_table,),
        draw_conversion_scores,
    ),
    "conversion-finetuning": Part(
        "Downstream: a few training steps around the swap",
        "Who can train for some steps may begin with the refit, with the direct swap, or anneal λ over the steps and "
        "swap at the end. The same steps with GELU, never swapped, show what the training alone gives.",
        (finetuning_table,),
        draw_finetuning,
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
