"""The results in README.md and tables.md are what the committed records say."""

from pathlib import Path

from lgelu_lab.report.downstream.inputs import read_downstream
from lgelu_lab.report.readme import put_results
from lgelu_lab.report.sections import build_sections
from lgelu_lab.report.write import markdown_tables, readme_tables
from lgelu_lab.studies.records import read_records

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tables_are_what_the_report_makes_of_the_committed_records():
    cards = ROOT / "model_cards"
    records, measurements = read_downstream(cards / "downstream", read_records(cards / "records"))
    assert put_results(README, readme_tables(records, measurements)) == README
    committed = (cards / "report" / "tables.md").read_text(encoding="utf-8")
    assert committed == markdown_tables(build_sections(records, measurements=measurements))
