"""What a conversion of a LLaMA needs, computed from its sizes; nothing here is measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from lgelu_lab.report.drawing import PALETTE, head, new_figure, style
from lgelu_lab.report.frames import ReportData
from lgelu_lab.report.markup import Column, TableSpec
from lgelu_lab.report.numbers import NONE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = Path(__file__).parents[3] / "docs" / "lab" / "convert" / "law.csv"
# GB of memory, float32 and float64 operations a second: cores as measured here, GPUs by data sheets, less a fifth.
_MACHINES = {
    "32 cores": (1024, 32 * 50e9, 32 * 28e9),
    "GPU, 24 GB": (24, 60e12, 1e12),
    "GPU, 80 GB": (80, 50e12, 50e12),
}
_JUDGED_ON, _TRIED = 256, 4  # outputs and strengths; see ridge.py


@dataclass(frozen=True)
class Law:
    """A LLaMA with weights in bfloat16, fitted on four tokens a unit; an eighth of all tokens is held out."""

    model: str
    blocks: int
    hidden: int
    units: int
    key_values: int
    vocabulary: int

    @property
    def maps(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of each map that is refitted."""
        d, f, k = self.hidden, self.units, self.key_values
        return [(d, d), (d, k), (d, k), (d, d), (d, f), (d, f), (f, d)] * self.blocks + [(d, self.vocabulary)]

    @property
    def memory(self) -> dict[str, float]:
        """{what is held: GB}; of the widest map, five matrices of second moments and four of cross moments."""
        weights = self.vocabulary * self.hidden + sum(width * outputs for width, outputs in self.maps)
        sums = 5 * self.units**2 + 4 * self.units * self.hidden
        return {"both networks": 4 * weights / 1e9, "sums and solves": 8 * sums / 1e9, "values of tokens": 4.0}

    @property
    def operations(self) -> dict[str, float]:
        """{what is computed: operations}; solves are in float64, all others in float32."""
        tokens = 4 * self.units
        found = {"forward passes": 0.0, "sums": 0.0, "solves": 0.0}
        for width, outputs in self.maps:
            found["forward passes"] += 3 * 8 / 7 * tokens * 2 * width * outputs  # the student's runs twice
            found["sums"] += tokens * width * (width + 2 * outputs)
            found["solves"] += _TRIED * (width**3 / 3 + 4 * width**2 * min(outputs, _JUDGED_ON))
            found["solves"] += width**3 / 3 + 2 * width**2 * outputs
        return found

    def hours(self, machine: str) -> str:
        """Hours of work; a dash where the memory does not hold it."""
        memory, single, double = _MACHINES[machine]
        passes, sums, solves = self.operations.values()
        hours = ((passes + sums) / single + solves / double) / 3600
        return f"{hours:.2g}" if sum(self.memory.values()) < memory else NONE


def laws(data: ReportData) -> list[Law]:
    """The models of law.csv; none in a report without measurements."""
    return [Law(**row) for row in pd.read_csv(SIZES).to_dict("records")] if len(data.measured) else []


LAW_TABLE = TableSpec(
    title="What a large LLaMA needs",
    caption="Computed from the law, not measured: refit, weights in bfloat16, four tokens a unit; hours of arithmetic "
    "only, on GPUs at assumed rates. A dash: too little memory.",
    rows=lambda data: [((law.model,), law) for law in laws(data)],
    head=("Weights",),
    text_columns=1,
    columns=(
        Column("Memory, GB", lambda law, notes: f"{sum(law.memory.values()):.0f}"),
        Column("Operations, 10¹⁵", lambda law, notes: f"{sum(law.operations.values()) / 1e15:.2g}"),
        *(Column(f"Hours, {name}", lambda law, notes, name=name: law.hours(name)) for name in _MACHINES),
    ),
)


def draw_law(data: ReportData) -> "Figure | None":
    """Memory by what it holds, and operations by what they compute."""
    figure, found = new_figure(9, 3.4), laws(data)
    if not found:
        return None
    for axis, part, unit in zip(figure.subplots(1, 2), ("memory", "operations"), (1, 1e15), strict=True):
        below = [0.0] * len(found)
        for name, colour in zip(getattr(found[0], part), list(PALETTE.values())[4:], strict=False):
            sizes = [getattr(law, part)[name] / unit for law in found]
            axis.bar([law.model for law in found], sizes, bottom=below, label=name, color=colour)
            below = [sum(pair) for pair in zip(below, sizes, strict=True)]
        style(axis, title="Memory, GB" if part == "memory" else "Operations, 10¹⁵")
        axis.legend(frameon=False)
    head(figure, "What a LLaMA's conversion needs: computed from the law, not measured", fontsize=11)
    return figure
