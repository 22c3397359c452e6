"""Tables and figures from the records below a folder: `python scripts/report.py --runs runs/profiles`."""

import argparse
import sys
from pathlib import Path

from lgelu_lab.report.frames import read_frames
from lgelu_lab.report.paper import read_paper_values
from lgelu_lab.report.write import WRITTEN_PAGES, page_tables, put_results, read_downstream, write_report
from lgelu_lab.studies.folder import write_whole
from lgelu_lab.studies.records import read_records


def parse_arguments() -> argparse.Namespace:
    """Where the records are, and where the report goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", required=True, help="folder with records in it or below it")
    parser.add_argument("--output_dir", help="folder of the report; without it, that of the runs")
    parser.add_argument("--pages", help="put results into the pages below this folder (README.md, …), between marks")
    parser.add_argument(
        "--downstream",
        help="folder with the records of scripts/measure.py in it or below it, and of the runs that trained their "
        "networks, unless those lie below --runs; without it, the report has no part on them",
    )
    parser.add_argument(
        "--cards", help="also write the cards of model_cards/ anew, from the records below this folder (loads torch)"
    )
    return parser.parse_args()


def main() -> int:
    """Write tables.md and the figures, print the results; 1, with the reason, if refused."""
    arguments = parse_arguments()
    try:
        _write(arguments)
    except (ValueError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _write(arguments: argparse.Namespace) -> None:
    records, measurements = read_records(arguments.runs), []
    if arguments.downstream:
        records, measurements = read_downstream(arguments.downstream, records)
    data = read_frames(records, measurements, paper=read_paper_values())
    folder = Path(arguments.output_dir or arguments.runs)
    written = write_report(data, folder)
    for name, keys in WRITTEN_PAGES.items() if arguments.pages else ():
        page = (Path(arguments.pages) / name).resolve()  # a link stays one
        write_whole(page, put_results(page.read_text(encoding="utf-8"), page_tables(data, keys)))
    if arguments.cards:
        from lgelu_lab.studies.cards import write_committed_cards

        write_committed_cards(arguments.cards, arguments.cards)
    print(page_tables(data))
    figures = sum(path.suffix == ".png" for path in written)
    print(f"\nWritten to {folder}: tables.md and {figures} figures in figures/")


if __name__ == "__main__":
    sys.exit(main())
