"""Δλ and ΔBVS over temperature t and learning-rate multiplier c, as a table."""

from collections.abc import Sequence

from lgelu_lab.report.configurations import benchmarks_of, is_grid
from lgelu_lab.report.grid import EXPECTED_RUNS, Grid, GridCell, grid_of
from lgelu_lab.report.markup import Cell, Table
from lgelu_lab.report.numbers import MISSING, NONE, digits_of, mean_and_deviation, tone
from lgelu_lab.report.paper import marked, note_lines
from lgelu_lab.studies.records import RunRecord


def grids(records: Sequence[RunRecord]) -> list[Grid]:
    """The grid of every benchmark that has runs of it."""
    found = [grid_of(records, benchmark) for benchmark in benchmarks_of(filter(is_grid, records))]
    return [grid for grid in found if grid is not None]


def grid_table(records: Sequence[RunRecord]) -> Table | None:
    """One row per (t, c) of every benchmark; None where there is no run of the grid."""
    found = grids(records)
    if not found:
        return None
    notes: dict[str, str] = {}
    rows = []
    for grid in found:
        runs = [record for record in records if is_grid(record) and record.config["benchmark"] == grid.benchmark]
        name = grid.benchmark + marked(runs, notes)
        rows += [_row(grid, name, t, c, cell) for (t, c), cell in grid.cells.items()]
    return Table(
        key="grid",
        title="Temperature t and learning-rate multiplier c",
        caption="Δλ: drift V_λ averaged over seeds and init modes. ΔBVS: best validation score minus that of the GELU "
        "baseline with the same seed and recipe, averaged likewise, ± the sample standard deviation.",
        header=("Benchmark", "t", "c", "Runs", "Δλ", "ΔBVS"),
        rows=tuple(rows),
        in_groups=True,
        notes=note_lines(notes),
        text_columns=1,
    )


def _row(grid: Grid, name: str, t: float, c: float, cell: GridCell) -> tuple[Cell | str, ...]:
    place = (name, f"{t:g}", f"{c:g}")
    if not cell.drifts:
        return (*place, Cell(MISSING, "missing"), Cell(NONE, "missing"), Cell(NONE, "missing"))
    complete = len(cell.drifts) >= EXPECTED_RUNS
    digits = digits_of(grid.metric)
    gain = Cell("baseline missing", "missing")
    if cell.gains:
        gain = Cell(
            mean_and_deviation(cell.gains, digits, signed=True), tone(cell.gains, digits, grid.greater_is_better)
        )
    return (
        *place,
        Cell(
            str(len(cell.drifts)) if complete else f"{len(cell.drifts)} of {EXPECTED_RUNS}",
            "" if complete else "warning",
        ),
        mean_and_deviation(cell.drifts, 2),
        gain,
    )
