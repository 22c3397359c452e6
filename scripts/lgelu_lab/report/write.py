"""Records → a folder with tables, figures and a page. No torch: a report is made where the records are."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.configurations import benchmarks_of, is_downstream, is_grid
from lgelu_lab.report.downstream.tables.conversion import conversion_overview_table
from lgelu_lab.report.downstream.tables.conversion_finetuning import finetuning_overview_table
from lgelu_lab.report.downstream.tables.overview import overview_table
from lgelu_lab.report.markup import LATEX_PREAMBLE, to_latex, to_markdown
from lgelu_lab.report.numbers import listed
from lgelu_lab.report.page import render_page
from lgelu_lab.report.paper_values import NOT_AT_HAND, PaperValues
from lgelu_lab.report.section import Section
from lgelu_lab.report.sections import build_sections
from lgelu_lab.report.tables.basis import basis_table
from lgelu_lab.report.tables.glance import glance_table
from lgelu_lab.report.tables.profiles import profile_table
from lgelu_lab.report.tables.substitution import substitution_table
from lgelu_lab.studies.records import RunRecord

__all__ = ["failed_runs", "markdown_tables", "readme_tables", "summarize", "write_report"]

TITLE = "λ-GELU: what the gates learn, and what ReLU costs in their place"
ERROR_FILE = "error.txt"
_MEASURED = (overview_table, conversion_overview_table, finetuning_overview_table)  # without rows where not measured


def write_report(
    records: Sequence[RunRecord],
    folder: str | os.PathLike,
    *,
    paper: PaperValues | None = None,
    failed: Mapping[str, str] | None = None,
    measurements: Sequence[MeasurementRecord] = (),
) -> list[Path]:
    """Write tables.md, tables.tex, figures/*.png, figures/*.svg and report.html, and return their paths.

    Args:
        records: all runs; a run twice is refused.
        folder: made if it is not there.
        paper: the paper's values, shown beside ours.
        failed: {run: last line of its error} of runs without a record.
        measurements: of scripts/downstream.py.

    Raises:
        ValueError: there is no record, or one is there twice.
        ImportError: matplotlib or scipy is not installed.
    """
    sections = build_sections(records, paper, failed, measurements)
    folder = Path(folder)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    saved = {d.key: d.save(folder / "figures") for section in sections for d in section.drawings}
    pictures = {key: svg for key, (_, svg) in saved.items()}
    texts = {
        "tables.md": markdown_tables(sections),
        "tables.tex": _latex(sections),
        "report.html": render_page(TITLE, _introduction(records, paper), sections, pictures),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [*(folder / name for name in texts), *(path for pair in saved.values() for path in pair)]


def readme_tables(records: Sequence[RunRecord], measurements: Sequence[MeasurementRecord] = ()) -> str:
    """The README's results in Markdown: at a glance, Table I, Table II in the last epoch, what the ReLU networks
    allow and how one is had without training, where that was measured, and the basis.
    """
    runs = [record for record in records if not is_grid(record) and not is_downstream(record)]
    tables = [
        *((glance_table(runs), profile_table(runs), substitution_table(runs, "last")) if runs else ()),
        *(make(measurements) for make in _MEASURED if measurements),
        basis_table(records),
    ]
    return "\n\n".join(to_markdown(table) for table in tables if table.rows)


def failed_runs(folder: str | os.PathLike) -> dict[str, str]:
    """{run: last line of its error} of the runs below a folder that a study could not finish."""
    found = {}
    for path in sorted(Path(folder).rglob(ERROR_FILE)):
        lines = path.read_text(encoding="utf-8").strip().splitlines()
        found[path.parent.relative_to(folder).as_posix()] = lines[-1] if lines else "no message"
    return found


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
            f"{last.relu_unchanged_predictions:.2%} of the predictions unchanged"
        )
    if last.hardness:
        lines.append("λ: " + ", ".join(f"{site} {value:.4g}" for site, value in last.hardness.items()))
    return "\n".join([*lines, f"Record: {os.path.join(folder, 'record.json')}"])


def markdown_tables(sections: Sequence[Section]) -> str:
    """Every table of the report, under the titles of its sections."""
    parts = []
    for section in sections:
        if section.tables:
            parts += [f"## {section.title}", *filter(None, [section.text])]
            parts += [to_markdown(table, level=3) for table in section.tables]
    return "\n\n".join(parts) + "\n"


def _latex(sections: Sequence[Section]) -> str:
    tables = [to_latex(table) for section in sections for table in section.tables]
    return "\n\n".join(["% Written by scripts/report.py from the run records.\n" + LATEX_PREAMBLE, *tables]) + "\n"


def _introduction(records: Sequence[RunRecord], paper: PaperValues | None) -> list[str]:
    hours = sum(record.seconds for record in records) / 3600
    lines = [
        f"{len(records)} runs, {hours:.1f} hours of training and evaluation, on {listed(benchmarks_of(records))}. "
        "Every number and figure here is made from their records by scripts/report.py. The method is that of "
        "Pérez-Corral et al., arXiv:2603.21991.",
        "Tables and figures say on how many seeds, epochs and samples they rest; a letter in brackets leads to what is "
        "not as in the paper. Green is better, red is worse, and a run that is missing is called missing.",
    ]
    return lines if paper is not None and paper.values else [*lines, NOT_AT_HAND]
