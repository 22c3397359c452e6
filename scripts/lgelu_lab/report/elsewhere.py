"""The networks that nobody here trained, in one line each: as they are, swapped, converted."""

from collections.abc import Iterator, Sequence

import pandas as pd

from lgelu_lab.report.frames import ReportData, of_measurement
from lgelu_lab.report.markup import Column, Group, Row, TableSpec
from lgelu_lab.report.numbers import LOWER_IS_BETTER, NONE, SAME_NEIGHBOUR, count, metric_with_direction, score_text
from lgelu_lab.report.paper import Notes
from lgelu_lab.report.results import DIRECT, OWN_SHAPE, SMOOTH, WIDER, records_of, results_from_elsewhere

_TITLES = {
    "minilm": "MiniLM-L6, sentence encoder (BERT, 6 × 384)",
    "reactions": "rxnfp, reaction classifier (BERT, 12 × 256)",
    "smollm2": "SmolLM2-135M, language model (LLaMA, 30 × 576)",
    "whisper": "Whisper tiny.en, speech recognizer",
}
_HEADINGS = {SMOOTH: "As it is", DIRECT: "ReLU swapped in", OWN_SHAPE: OWN_SHAPE, WIDER: WIDER}
_MEASURES = {SAME_NEIGHBOUR: "share with the same nearest neighbour", "word_error_rate": "share of words wrong"}


def _rows(data: ReportData) -> Iterator[Group]:
    for name in of_measurement(data, "real"):
        yield (_TITLES.get(name, name),), results_from_elsewhere(data, name)


def _measure(ways: dict[str, pd.DataFrame], notes: Notes) -> str:
    metric = ways[SMOOTH]["metric"].iloc[0]
    return metric_with_direction(_MEASURES.get(metric, metric), metric not in LOWER_IS_BETTER)


def _cell(way: str, heading: str) -> Column:
    def cell(ways: dict[str, pd.DataFrame], notes: Notes) -> str:
        seeds = ways[way]
        if not len(seeds):
            return NONE
        first, values = seeds.iloc[0], list(seeds["value"])
        if way == SMOOTH and first["metric"] == SAME_NEIGHBOUR:
            return "1, by definition"
        wider = f", {first['width']:g} times" if way == WIDER else ""
        return score_text(first["metric"], values, first["eval_samples"]) + wider

    return Column(heading, cell)


def _notes(data: ReportData, rows: Sequence[Row]) -> Iterator[str]:
    for name in of_measurement(data, "real"):
        record, ways = records_of(data, "real", name)[0], results_from_elsewhere(data, name)
        told, judged = record.models[name], ways[SMOOTH]["eval_samples"].iloc[0]
        fitted = "".join(
            f"; {way.lower()}: fitted on {row.units:,.0f} inputs, effort {row.effort}"
            for way in (OWN_SHAPE, WIDER)
            for row in ways[way][:1].itertuples()
        )
        of = f" of {read}" if (read := record.data.get("copy_of") or record.data.get("source")) else ""
        yield f"{name}: {told['run']} ({told['licence']}); judged on {count(judged)} inputs{of}{fitted}."


ELSEWHERE = TableSpec(
    title="Networks that nobody here trained",
    caption="Converted without training and without labels; “times” is how many hidden units each block then has "
    "against the original. One run each. An interval in brackets is what the inputs leave open that it was judged on "
    "(Wilson, 95 %).",
    rows=_rows,
    head=("Network",),
    columns=(Column("Measure", _measure), *(_cell(*column) for column in _HEADINGS.items())),
    notes=_notes,
)
