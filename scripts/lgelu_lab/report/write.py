"""Records → a folder with tables, figures and a page, and the results in a README. Where the records are, no torch."""

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_lgelu.formats import percent
from lgelu_lab.measurements.records import MeasurementRecord, read_measurements
from lgelu_lab.report.claims import CLAIMS_TABLE
from lgelu_lab.report.drawing import Drawing, FigureSpec, draw_all
from lgelu_lab.report.frames import ReportData
from lgelu_lab.report.gates_table import GATES_TABLE
from lgelu_lab.report.markup import TEMPLATES, Table, TableSpec, build_table, to_markdown
from lgelu_lab.report.measured_tables import MEASURED_TABLES
from lgelu_lab.report.numbers import listed
from lgelu_lab.report.results import DIFFERENCE_TABLE, ELSEWHERE, PATH, RESULTS, ROADS
from lgelu_lab.report.run_figures import FIGURES
from lgelu_lab.report.run_tables import TABLES
from lgelu_lab.studies.folder import write_whole
from lgelu_lab.studies.records import RECORD_FILE, RunRecord, read_records

TITLE = "λ-GELU: what the gates learn, and what ReLU costs in their place"
START = "<!-- results: written by scripts/report.py -->"
END = "<!-- end of results -->"
"""Between these marks of a page stands what is made of the records."""

ALL_TABLES: dict[str, TableSpec] = {
    "roads": ROADS,
    "results": RESULTS,
    "elsewhere": ELSEWHERE,
    "differences": DIFFERENCE_TABLE,
    "claims": CLAIMS_TABLE,
    **TABLES,
    "gates": GATES_TABLE,
    **MEASURED_TABLES,
}
ALL_FIGURES: dict[str, FigureSpec] = {"path": PATH, **FIGURES}

README_TABLES = ("roads",)
MAIN_TABLES = ("results", "elsewhere")
"""What is printed."""


@dataclass(frozen=True)
class SectionSpec:
    """One part of the report: which tables and figures stand in it, and what is said above them."""

    title: str
    text: str
    tables: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()


SECTIONS: dict[str, SectionSpec] = {
    "glance": SectionSpec(
        "At a glance",
        "λ-GELU is x·Φ(λx): λ = 1 is GELU, and a large λ is ReLU. Hardening trains a network while every λ grows to "
        "about 160, so that ReLU can take its place with the same weights. Its plain rivals: swap ReLU into a finished "
        "GELU network, refit that without training, swap it in early and train on, or train with ReLU from the start.",
        ("roads", "results", "elsewhere", "differences"),
    ),
    "claims": SectionSpec("What holds", "The paper's claims beside these runs.", ("claims",)),
    "profiles": SectionSpec(
        "The gates as learned",
        "The same network with GELU, with ReLU, and with a hardness λ per layer that is learned from three starts: "
        "uniform (every λ close to 1), increasing over depth (1 to 2), and decreasing.",
        ("profiles", "correlation"),
    ),
    "hardness": SectionSpec(
        "Hardness over depth and epochs",
        "How hard each layer's gate becomes when nothing drives it but the loss.",
        (),
        ("hardness",),
    ),
    "substitution": SectionSpec(
        "ReLU in the gates' place",
        "Every smooth gate of a checkpoint is replaced by ReLU, the weights stay, and the network is measured again. "
        "Which checkpoint matters: the best epoch as trained may lie before the gates are hard.",
        ("substitution-best", "substitution-last", "substitution-learned-last"),
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
    "gates": SectionSpec(
        "Gates and hardening, option by option",
        "Each option of the gates and of hardening beside the paper's way, and beside the ways that need no λ, all "
        "trained for as many steps from the same weights.",
        ("gates",),
    ),
    "downstream-int8": SectionSpec(
        "Downstream: integer inference",
        "onnxruntime runs each network in float32 and in int8. A ReLU costs nothing there; a smooth gate needs its "
        "input back in float32.",
        ("int8",),
    ),
    "downstream-verification": SectionSpec(
        "Downstream: proofs of robustness",
        "Marabou takes ReLU networks, and no GELU. Given the time it decides exactly whether one can be fooled near an "
        "input; in these rows its bounds proved, an attack refuted, and splitting cases decided nothing in time. Other "
        "verifiers bound GELU too. Each network is asked about its own first images that it classifies correctly, and "
        "these are not the same for all.",
        ("verification",),
    ),
    "downstream-zeros": SectionSpec(
        "Downstream: zeros",
        "A ReLU network computes many exact zeros, and some of its units never fire. A smooth gate has small negative "
        "outputs in their place.",
        ("zeros",),
    ),
    "downstream-pruning": SectionSpec(
        "Downstream: pruning",
        "Units that never fire can go without a trace; the next candidates are those that fire least, or those with "
        "the smallest weights.",
        ("pruning",),
    ),
    "downstream-linear-pieces": SectionSpec(
        "Downstream: exact linear pieces",
        "A ReLU network is linear around almost every input: W and b of that piece explain it there exactly. A smooth "
        "network has a first-order model alone, whose error grows with the square of the step.",
        ("linear-pieces",),
    ),
    "downstream-conversion": SectionSpec(
        "Downstream: ReLU without training",
        "The other road to a ReLU network: the gates of a finished GELU network become ReLU, and only the linear maps "
        "behind them are refitted, layer by layer, on unlabelled inputs. Hardening is the road for those who train.",
        ("conversion",),
    ),
    "downstream-conversion-finetuning": SectionSpec(
        "Downstream: a few training steps around the swap",
        "Who can train for some steps may begin with the refit, with the plain swap, or anneal λ over the steps and "
        "swap at the end. The same steps with GELU, never swapped, show what the training alone gives.",
        ("conversion-finetuning",),
    ),
    "downstream-real": SectionSpec(
        "Downstream: networks that nobody here trained",
        "Trained networks from the package registry or the Hub, swapped and converted, by their own measure.",
        ("real",),
    ),
    "basis": SectionSpec("What the numbers rest on", "", ("basis",)),
}
"""{key: one part of the report}, in its order."""


@dataclass(frozen=True)
class Section:
    """One part of the report, made."""

    key: str
    title: str
    text: str
    drawings: tuple[Drawing, ...]
    tables: tuple[Table, ...]


def build_sections(data: ReportData) -> list[Section]:
    """The sections that have a table or a figure."""
    made = []
    for key, spec in SECTIONS.items():
        tables = [build_table(name, ALL_TABLES[name], data) for name in spec.tables]
        drawings = [drawing for name in spec.figures for drawing in draw_all(name, ALL_FIGURES[name], data)]
        tables = [table for table in tables if table.rows]
        if tables or drawings:
            made.append(Section(key, spec.title, spec.text, tuple(drawings), tuple(tables)))
    return made


def write_report(data: ReportData, folder: str | os.PathLike) -> list[Path]:
    """Write tables.md, figures/*.png and report.html, and return their paths.

    Raises ImportError without matplotlib, before anything is written.
    """
    sections = build_sections(data)
    hero = draw_all("path", PATH, data)
    folder = Path(folder)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    drawings = [*hero, *(drawing for section in sections for drawing in section.drawings)]
    saved = {drawing.key: drawing.save(folder / "figures") for drawing in drawings}
    texts = {"tables.md": markdown_tables(sections), "report.html": _page(data, sections, hero, saved)}
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [*(folder / name for name in texts), *saved.values()]


def _page(data: ReportData, sections: Sequence[Section], hero: Sequence[Drawing], saved: Mapping[str, Path]) -> str:
    """One HTML page that needs nothing else: no network, no script, every figure inside."""
    pictures = {key: base64.b64encode(path.read_bytes()).decode("ascii") for key, path in saved.items()}
    return TEMPLATES.get_template("page.html.j2").render(
        title=TITLE,
        basis=_basis(data),
        hero=hero,
        sections=sections,
        pictures=pictures,
    )


def _basis(data: ReportData) -> str:
    runs = data.runs.drop_duplicates("name")
    untimed = int(runs["hours"].isna().sum())
    beside = f" (beside {untimed} that were resumed and not timed whole)" if untimed else ""
    return (
        f"{len(runs)} runs, {runs['hours'].sum():.1f} hours of training and evaluation{beside}, on "
        f"{listed(dict.fromkeys(data.runs['benchmark']))}. Every number and figure here is made from their records by "
        "scripts/report.py. The method is that of Pérez-Corral et al., arXiv:2603.21991. Tables and figures say on how "
        "many seeds, epochs and samples they rest; a letter in brackets leads to what is not as in the paper."
    )


def markdown_tables(sections: Sequence[Section]) -> str:
    """Every table of the report, under the titles of its sections."""
    parts = []
    for section in sections:
        if section.tables:
            parts += [f"## {section.title}", *filter(None, [section.text])]
            parts += [to_markdown(table, level=3) for table in section.tables]
    return "\n\n".join(parts) + "\n"


def page_tables(data: ReportData, keys: Sequence[str] = MAIN_TABLES) -> str:
    """Tables in Markdown, with their notes, those that have rows."""
    tables = (build_table(key, ALL_TABLES[key], data) for key in keys)
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
            f"ReLU substituted in the last epoch: {name} {last.relu_score:.4f} ({last.relu_score - last.score:+.4f}), "
            f"largest logit change {last.relu_max_logit_change:.2g}, "
            f"{percent(last.relu_unchanged_predictions)} of the predictions unchanged"
        )
    if last.hardness:
        lines.append("λ: " + ", ".join(f"{site} {value:.4g}" for site, value in last.hardness.items()))
    return "\n".join([*lines, f"Record: {os.path.join(folder, RECORD_FILE)}"])
