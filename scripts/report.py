"""Tables, figures and a page from the records below a folder: `python scripts/report.py --runs runs/profiles`."""

from dataclasses import dataclass, field
from pathlib import Path

from lgelu_lab.report.downstream.inputs import read_downstream
from lgelu_lab.report.paper_values import read_paper_values
from lgelu_lab.report.readme import put_results
from lgelu_lab.report.write import failed_runs, readme_tables, write_report
from lgelu_lab.studies.records import read_records
from transformers import HfArgumentParser


@dataclass
class ReportArguments:
    """Where the records are, and where the report goes."""

    runs: str = field(metadata={"help": "Folder with records in it or below it."})
    output_dir: str | None = field(default=None, metadata={"help": "Folder of the report; default: the runs' own."})
    readme: str | None = field(
        default=None, metadata={"help": "Put the main tables into this file, between its marks (report/readme.py)."}
    )
    downstream: str | None = field(
        default=None,
        metadata={
            "help": "Folder with the records of scripts/downstream.py in it or below it, and of the runs that trained "
            "their networks, unless those lie below --runs; default: the report has no part on them."
        },
    )
    paper_values: str | None = field(
        default=None,
        metadata={"help": "JSON file with the paper's values, shown beside ours (format: report/paper_values.py)."},
    )


def main() -> None:
    """Write tables.md, tables.tex, report.html and the figures, and print the tables that matter most."""
    (arguments,) = HfArgumentParser(ReportArguments).parse_args_into_dataclasses()
    records, measurements = read_records(arguments.runs), []
    if arguments.downstream:
        records, measurements = read_downstream(arguments.downstream, records)
    paper = read_paper_values(arguments.paper_values) if arguments.paper_values else None
    folder = Path(arguments.output_dir or arguments.runs)
    failed = failed_runs(arguments.runs)
    written = write_report(records, folder, paper=paper, failed=failed, measurements=measurements)
    tables = readme_tables(records, measurements)
    if arguments.readme:
        readme = Path(arguments.readme)
        readme.write_text(put_results(readme.read_text(encoding="utf-8"), tables), encoding="utf-8")
    print(tables)
    figures = sum(path.suffix == ".png" for path in written)
    print(f"\nWritten to {folder}: tables.md, tables.tex, report.html, and {figures} figures in figures/")


if __name__ == "__main__":
    main()
