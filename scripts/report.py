"""Tables and figures from the records below a folder: `python scripts/report.py --runs runs/mlp`."""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

from hf_lgelu.studies.figures import draw_hardness, draw_substitution
from hf_lgelu.studies.records import read_records
from hf_lgelu.studies.report import all_tables


@dataclass
class ReportArguments:
    """Where the records are, and where the report goes."""

    runs: str = field(metadata={"help": "Folder with records in it or below it."})
    output_dir: str | None = field(default=None, metadata={"help": "Folder of the report; default: the runs' own."})


def main() -> None:
    """Write tables.md, hardness.png and substitution.png, and print the tables."""
    (arguments,) = HfArgumentParser(ReportArguments).parse_args_into_dataclasses()
    records = read_records(arguments.runs)
    folder = Path(arguments.output_dir or arguments.runs)
    folder.mkdir(parents=True, exist_ok=True)
    tables = all_tables(records)
    (folder / "tables.md").write_text(tables + "\n", encoding="utf-8")
    draw_hardness(records, folder / "hardness.png")
    draw_substitution(records, folder / "substitution.png")
    print(tables)
    print(f"\nWritten: {folder}/tables.md, {folder}/hardness.png, {folder}/substitution.png")


if __name__ == "__main__":
    main()
