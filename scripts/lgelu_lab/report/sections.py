"""Records → the sections of the report: what stands in it, in which order, whatever the format."""

from collections.abc import Callable, Mapping, Sequence

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.configurations import benchmarks_of, is_downstream, is_grid
from lgelu_lab.report.downstream.sections import downstream_sections
from lgelu_lab.report.figures.drawing import Drawing
from lgelu_lab.report.figures.glance import draw_glance
from lgelu_lab.report.figures.grid import draw_grid
from lgelu_lab.report.figures.hardness import draw_hardness
from lgelu_lab.report.figures.related import draw_related
from lgelu_lab.report.figures.substitution import draw_substitution
from lgelu_lab.report.figures.trajectories import draw_trajectories
from lgelu_lab.report.paper_values import PaperValues
from lgelu_lab.report.section import NONE_THERE, Section
from lgelu_lab.report.tables.basis import basis_table
from lgelu_lab.report.tables.correlation import correlation_table
from lgelu_lab.report.tables.coverage import coverage_table
from lgelu_lab.report.tables.glance import glance_table
from lgelu_lab.report.tables.grid import grid_table, grids
from lgelu_lab.report.tables.profiles import profile_table
from lgelu_lab.report.tables.related import related_table
from lgelu_lab.report.tables.substitution import substitution_table
from lgelu_lab.studies.records import RunRecord


def build_sections(
    records: Sequence[RunRecord],
    paper: PaperValues | None = None,
    failed: Mapping[str, str] | None = None,
    measurements: Sequence[MeasurementRecord] = (),
) -> list[Section]:
    """Every section, those without runs too.

    Args:
        records: all runs.
        paper: the paper's values, if they are at hand.
        failed: {run: last line of its error} of runs that left no record.
        measurements: of scripts/downstream.py. Without any, and without the runs that train its networks, the report
            has no part on them.

    Raises ValueError without records, or where one is there twice.
    """
    if not records:
        raise ValueError("a report needs at least one record")
    trained = [record for record in records if is_downstream(record)]
    runs = [record for record in records if not is_grid(record) and not is_downstream(record)]
    return [
        *((_glance(runs), _profiles(runs, paper), _hardness(runs), _substitution(runs, paper)) if runs else ()),
        *((_grid(records),) if len(trained) < len(records) else ()),
        *((_related(runs),) if runs else ()),
        *(downstream_sections(trained, measurements) if trained or measurements else ()),
        Section("coverage", "What is there and what is missing", "", tables=(coverage_table(records, failed),)),
        Section("basis", "What the numbers rest on", "", tables=(basis_table(records),)),
    ]


def _glance(runs: Sequence[RunRecord]) -> Section:
    drawing = draw_glance(runs)
    return Section(
        "glance",
        "At a glance",
        "λ-GELU is x·Φ(λx): λ = 1 is GELU, and a large λ is ReLU. Hardening trains a network while every λ grows to "
        "about 160, so that ReLU can take its place with the same weights. Its plain rivals: swap ReLU into a "
        "finished GELU network, swap it in early and train on, or train with ReLU from the start.",
        (drawing,) if drawing else (),
        (glance_table(runs),),
    )


def _profiles(runs: Sequence[RunRecord], paper: PaperValues | None) -> Section:
    correlation = correlation_table(runs)
    return Section(
        "profiles",
        "The gates as learned",
        "The same network with GELU, with ReLU, and with a hardness λ per layer that is learned from three starts: "
        "uniform (every λ close to 1), increasing over depth (1 to 2), and decreasing.",
        _per_benchmark(draw_trajectories, runs),
        (profile_table(runs, paper), *((correlation,) if correlation else ())),
    )


def _hardness(runs: Sequence[RunRecord]) -> Section:
    drawings = _per_benchmark(draw_hardness, runs)
    text = "How hard each layer's gate becomes when nothing drives it but the loss."
    return Section("hardness", "Hardness over depth and epochs", text if drawings else NONE_THERE, drawings)


def _substitution(runs: Sequence[RunRecord], paper: PaperValues | None) -> Section:
    tables = [substitution_table(runs, at, paper) for at in ("best", "best_substituted", "last")]
    tables.append(substitution_table(runs, "last", learned=True))
    return Section(
        "substitution",
        "ReLU in the gates' place",
        "Every smooth gate of a checkpoint is replaced by ReLU, the weights stay, and the network is measured again. "
        "Which checkpoint matters: the best epoch as trained may lie before the gates are hard.",
        _per_benchmark(draw_substitution, runs),
        tuple(table for table in tables if table.rows),
    )


def _grid(records: Sequence[RunRecord]) -> Section:
    table = grid_table(records)
    text = "How the temperature t of λ = 1 + softplus(s/t) and the factor c on the learning rate of s move the gates."
    return Section(
        "grid",
        "Temperature and learning-rate multiplier",
        text if table else NONE_THERE,
        tuple(draw_grid(grid) for grid in grids(records)),
        (table,) if table else (),
    )


def _related(runs: Sequence[RunRecord]) -> Section:
    table = related_table(runs)
    text = "The same network, seeds and steps with other activations; PReLU and learnable-β Swish learn theirs as well."
    return Section(
        "related",
        "Other activations",
        text if table else NONE_THERE,
        _per_benchmark(draw_related, runs),
        (table,) if table else (),
    )


def _per_benchmark(
    draw: Callable[[Sequence[RunRecord], str], Drawing | None], runs: Sequence[RunRecord]
) -> tuple[Drawing, ...]:
    drawn = (draw(runs, benchmark) for benchmark in benchmarks_of(runs))
    return tuple(drawing for drawing in drawn if drawing is not None)
