"""The table of the study of gates: every option of the gates and of hardening beside the paper's, and the rivals."""

from collections.abc import Iterator, Sequence

import pandas as pd

from lgelu_lab.report.difference import INTERVAL, difference_of
from lgelu_lab.report.frames import ReportData, last_evaluations, of_measurement
from lgelu_lab.report.markup import SEEDS_COLUMN, Column, Group, Row, TableSpec, score_column
from lgelu_lab.report.numbers import NONE, count, either, largest, metrics_in_words, number, present
from lgelu_lab.report.paper import DATA_READ, PAPER_RECIPES, Notes, data_folder, trained_on
from lgelu_lab.report.run_tables import ONE_SEED
from lgelu_lab.studies.experiments import REMOVED_OPTIONS, STUDIES, experiment_name

_STUDY = STUDIES["gates"]
_PAPER = 3  # which of the study's configurations is the paper's hardening
CONVERTED = "the first, converted without training"


def gate_runs(data: ReportData) -> pd.DataFrame:
    """The study's runs in their last epoch; `relu` is there for all, and `paper` is that of the paper's hardening."""
    runs = last_evaluations(data)
    runs = runs[runs["part"] == _STUDY.folder]
    always_relu = runs["activation"] == "relu"
    runs = runs.assign(
        score=runs["score"].where(~always_relu, runs["last_score"]),
        relu=runs["relu"].where(~always_relu, runs["last_score"]),
        parameters=[record.model.get("parameters") for record in runs["record"]],
    )
    return runs


def _key(benchmark: str, place: int) -> str:
    name = experiment_name(benchmark, _STUDY.configurations(benchmark)[place], 0)
    return name.removeprefix(f"{benchmark}/").removesuffix("-seed0")


def _rows(data: ReportData) -> Iterator[Group]:
    runs = gate_runs(data)
    for benchmark in _STUDY.benchmarks if len(runs) else ():
        there = runs[runs["benchmark"] == benchmark]
        if not len(there):
            yield (benchmark, "all"), None
            continue
        paper = there[there["key"] == _key(benchmark, _PAPER)].set_index("seed")["relu"]
        there = there.assign(paper=there["seed"].map(paper))
        for place, configuration in enumerate(_STUDY.configurations(benchmark)):
            seeds = there[there["key"] == _key(benchmark, place)]
            if len(seeds):
                yield (benchmark, seeds["label"].iloc[0]), seeds
            elif REMOVED_OPTIONS.isdisjoint(configuration.items()):
                yield (benchmark, _key(benchmark, place)), None
            if place == 0 and len(seeds) and len(converted := _converted(data, seeds)):
                yield (benchmark, CONVERTED), converted


def _converted(data: ReportData, smooth: pd.DataFrame) -> pd.DataFrame:
    """The rows of the smooth networks with what their conversion measured; those that were not converted leave."""
    rows = of_measurement(data, "gates").get(smooth["benchmark"].iloc[0])
    if rows is None:
        return smooth[:0]
    rows = rows[rows["way"] == "converted"].set_index("seed")
    found = smooth[smooth["seed"].isin(rows.index)]
    return found.assign(
        score=None,
        relu=found["seed"].map(rows["score"]).astype(float),
        logit_change=found["seed"].map(rows["max_logit_change"]).astype(float),
    )


def _against_paper(seeds: pd.DataFrame, notes: Notes) -> str:
    gain = difference_of(seeds["relu"], seeds["paper"], seeds["metric"].iloc[0], seeds["eval_samples"])
    if gain is None or seeds["key"].iloc[0] == _key(seeds["benchmark"].iloc[0], _PAPER):
        return NONE
    return str(gain)


def _hardness(seeds: pd.DataFrame, notes: Notes) -> str:
    values = [value for record in seeds["record"] for value in record.last.hardness.values()]
    ends = dict.fromkeys(number(value, 1) for value in (min(values), max(values))) if values else {}
    return " to ".join(ends) or NONE


def _notes(data: ReportData, rows: Sequence[Row]) -> Iterator[str]:
    runs = gate_runs(data)
    for benchmark, there in runs.groupby("benchmark", sort=False):
        read = [DATA_READ[folder] for record in there["record"] if (folder := data_folder(record)) in DATA_READ]
        if read and benchmark not in PAPER_RECIPES:  # of those the note on what is not as in the paper says it
            yield f"{benchmark}: {either(read)}."


GATES_TABLE = TableSpec(
    title="Every option of the gates and of hardening beside the paper's",
    caption=lambda data: (
        f"{metrics_in_words(gate_runs(data))} In the last epoch, as it is and with ReLU in the gates' place. "
        "Against the paper's: the score with ReLU minus that of hardening "
        f"as in the paper (fixed onset, linear, one target), seed by seed. {INTERVAL} λ: smallest and largest over "
        f"layers and seeds. Mean ± sample standard deviation over seeds; of logit changes the largest. {ONE_SEED}"
    ),
    rows=_rows,
    head=("Benchmark", "Way"),
    columns=(
        score_column("As is", "score"),
        score_column("ReLU", "relu"),
        Column("Against the paper's", _against_paper),
        Column("Largest logit change", lambda seeds, notes: largest(list(seeds["logit_change"]))),
        Column("λ, last epoch", _hardness),
        Column("Parameters", lambda seeds, notes: either(list(map(count, present(seeds["parameters"]))))),
        SEEDS_COLUMN,
        Column("Epochs × samples", trained_on),
    ),
    notes=_notes,
)
