"""Records → a folder with tables and figures, and the results on the pages. Where the records are, no torch."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_lgelu.formats import percent
from lgelu_lab.measurements.records import MeasurementRecord, read_measurements
from lgelu_lab.report.claims import CLAIMS_TABLE, RULES_TABLE
from lgelu_lab.report.drawing import save
from lgelu_lab.report.frames import ReportData
from lgelu_lab.report.law import LAW_TABLE, draw_law
from lgelu_lab.report.markup import TableSpec, build_table, to_markdown
from lgelu_lab.report.measured_tables import MEASURED_TABLES
from lgelu_lab.report.pretrained_table import PRETRAINED_TABLE, draw_profiles
from lgelu_lab.report.results import DIFFERENCE_TABLE, RESULTS, ROADS, draw_path
from lgelu_lab.report.run_tables import TABLES
from lgelu_lab.studies.folder import write_whole
from lgelu_lab.studies.records import RECORD_FILE, RunRecord, read_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

START = "<!-- results: written by scripts/report.py -->"
END = "<!-- end of results -->"
"""Between these marks of a page stands what is made of the records."""

ALL_TABLES: dict[str, TableSpec] = {
    "roads": ROADS,
    "results": RESULTS,
    "differences": DIFFERENCE_TABLE,
    "claims": CLAIMS_TABLE,
    "rules": RULES_TABLE,
    "pretrained": PRETRAINED_TABLE,
    **TABLES,
    **MEASURED_TABLES,
    "law": LAW_TABLE,
}
FIGURES: "dict[str, Callable[[ReportData], Figure | None]]" = {
    "path": draw_path,
    "depth": draw_profiles,
    "law": draw_law,
}
"""{file name: what draws it, or None where there is nothing to show}."""

README_TABLES = ("roads",)
WRITTEN_PAGES = {"README.md": README_TABLES, "docs/results.md": ("claims",), "docs/lab/conversion.md": ("law",)}
"""{page: the tables between its marks}."""
MAIN_TABLES = ("roads", "results")
"""What is printed."""


@dataclass(frozen=True)
class SectionSpec:
    """One part of the report: which tables stand in it, and what is said above them."""

    title: str
    text: str
    tables: tuple[str, ...] = ()


SECTIONS: dict[str, SectionSpec] = {
    "glance": SectionSpec(
        "At a glance",
        "λ-GELU is x·Φ(λx): λ = 1 is GELU, and a large λ is ReLU. Hardening trains a network while every λ grows to "
        "about 160, so that ReLU can take its place with the same weights. Its plain rivals: swap ReLU into a finished "
        "GELU network, refit that without training, swap it in early and train on, or train with ReLU from the start.",
        ("roads", "results", "pretrained", "differences"),
    ),
    "claims": SectionSpec("What holds", "The paper's claims beside these runs.", ("claims", "rules")),
    "profiles": SectionSpec(
        "The gates as learned",
        "The same network with GELU, with ReLU, and with a hardness λ per layer that is learned from three starts: "
        "uniform (every λ close to 1), increasing over depth (1 to 2), and decreasing.",
        ("profiles", "correlation"),
    ),
    "substitution": SectionSpec(
        "ReLU in the gates' place",
        "Every smooth gate of a checkpoint is replaced by ReLU, the weights stay, and the network is measured again.",
        ("substitution-last", "substitution-learned-last"),
    ),
    "grid": SectionSpec(
        "Temperature and learning-rate multiplier",
        "How the temperature t of λ = 1 + softplus(s/t) and the factor c on the learning rate of s move the gates.",
        ("grid",),
    ),
    "related": SectionSpec(
        "Other activations",
        "The same network, seeds and steps with other activations; PReLU and learnable-β Swish learn theirs as well.",
        ("related",),
    ),
    "downstream-int8": SectionSpec(
        "Downstream: integer inference",
        "onnxruntime runs each network in float32 and in int8. A ReLU costs nothing there; a smooth gate needs its "
        "input back in float32.",
        ("int8",),
    ),
    "downstream-conversion": SectionSpec(
        "Downstream: ReLU without training",
        "The other road to a ReLU network: the gates of a finished GELU network become ReLU, and only the linear maps "
        "behind them are refitted, layer by layer, on unlabelled inputs. Hardening is the road for those who train.",
        ("conversion",),
    ),
    "downstream-real": SectionSpec(
        "Downstream: networks that nobody here trained",
        "Trained networks from the package registry or the Hub, swapped and converted, by their own measure.",
        ("real", "law"),
    ),
    "basis": SectionSpec("What the numbers rest on", "", ("basis",)),
}
"""{key: one part of the report}, in its order."""


def write_report(data: ReportData, folder: str | os.PathLike) -> list[Path]:
    """Write tables.md and figures/*.png, and return their paths.

    Raises ImportError without matplotlib, before anything is written.
    """
    sections, drawings = markdown_sections(data), {key: draw(data) for key, draw in FIGURES.items()}
    folder = Path(folder)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    write_whole(folder / "tables.md", sections)
    made = [save(figure, folder / "figures" / f"{key}.png") for key, figure in drawings.items() if figure]
    return [folder / "tables.md", *made]


def markdown_sections(data: ReportData) -> str:
    """Every table that has rows, under the titles of the sections that have a table."""
    parts = []
    for section in SECTIONS.values():
        tables = [build_table(ALL_TABLES[name], data) for name in section.tables]
        shown = [to_markdown(table, level=3) for table in tables if table.rows]
        parts += [f"## {section.title}", *filter(None, [section.text]), *shown] if shown else []
    return "\n\n".join(parts) + "\n"


def page_tables(data: ReportData, keys: Sequence[str] = MAIN_TABLES) -> str:
    """Tables in Markdown, with their notes, those that have rows."""
    tables = (build_table(ALL_TABLES[key], data) for key in keys)
    return "\n\n".join(to_markdown(table) for table in tables if table.rows)


def put_results(page: str, results: str) -> str:
    """The text with `results` between its two marks.

    Raises ValueError unless each of `START` and `END` is there once, in that order.
    """
    if page.count(START) != 1 or page.count(END) != 1 or page.index(START) > page.index(END):
        raise ValueError(f"the page must have {START!r} and, behind it, {END!r}, once each, to put the results between")
    before, after = page.partition(START)[0], page.partition(END)[2]
    return f"{before}{START}\n\n{results}\n\n{END}{after}"


def read_downstream(
    folder: str | os.PathLike, records: Sequence[RunRecord] = ()
) -> tuple[list[RunRecord], list[MeasurementRecord]]:
    """(records and those of the runs below `folder`, each once; the measurements below `folder`).

    Raises FileNotFoundError where there is no measurement.
    """
    measurements = read_measurements(folder)
    if not measurements:
        raise FileNotFoundError(
            f"no measurement below {folder}; make them with: python scripts/measure.py --runs RUNS "
            f"--output_dir {folder}"
        )
    networks = read_records(folder) if any(Path(folder).rglob(RECORD_FILE)) else []
    return [*records, *(record for record in networks if record not in records)], measurements


def summarize(record: RunRecord, folder: str | os.PathLike) -> str:
    """What one run came to, in a few lines."""
    last, name = record.last, record.metric
    lines = [
        f"{record.name}: best {name} {record.best.score:.4f} in epoch {record.best.epoch:g}, "
        f"{last.score:.4f} in the last"
    ]
    if last.relu_score is not None:
        lines.append(
            f"ReLU substituted in the last epoch: {name} {last.relu_score:.4f} ({last.relu_score - last.score:+.4f})"
        )
    if last.relu_max_logit_change is not None:  # of the weights that were saved
        lines[-1] += (
            f", largest logit change {last.relu_max_logit_change:.2g}, "
            f"{percent(last.relu_unchanged_predictions)} of the predictions unchanged"
        )
    if last.hardness:
        lines.append("λ: " + ", ".join(f"{site} {value:.4g}" for site, value in last.hardness.items()))
    return "\n".join([*lines, f"Record: {os.path.join(folder, RECORD_FILE)}"])
