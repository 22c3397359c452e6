"""The tables of what was measured on trained networks, one specification each."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from lgelu_lab.report.frames import MODEL_LABELS, ReportData, of_measurement, rows_by
from lgelu_lab.report.markup import SEEDS_COLUMN, Column, Group, Row, TableSpec, mean_column, score_column
from lgelu_lab.report.numbers import (
    LOWER_IS_BETTER,
    NONE,
    count,
    digits_of,
    either,
    largest,
    listed,
    mean_and_deviation,
    number,
    percentage,
    present,
)
from lgelu_lab.report.paper import Notes

INT8 = "int8-all"
PRECISIONS = {"float32": "float32", "int8-layers": "int8, layers alone", INT8: "int8"}
METHODS = {
    "direct": "plain swap",
    "statistics": "plain swap, BatchNorm's statistics anew",
    "bias-fold": "bias fold",
    "place-wider": "place, wider",
    "hardened": "hardened in training",
}
"""{method: in words}, where these are others."""
# Which rows


def _rows(data: ReportData, name: str, keys: Sequence[str]) -> Iterator[Group]:
    """A row per network and other keys."""
    for benchmark, frame in of_measurement(data, name).items():
        for values, seeds in rows_by(frame, "model", *keys).items():
            yield (benchmark, MODEL_LABELS.get(values[0], values[0])), seeds


def _refusals(data: ReportData, rows: Sequence[Row], name: str) -> Iterator[str]:
    """A line for each different refusal in the rows of a measurement, in the tool's own words."""
    said: dict[str, dict[str, None]] = {}
    for frame in of_measurement(data, name).values():
        for model, words in frame.loc[frame["refusal"].notna(), ["model", "refusal"]].values:
            said.setdefault(words, {})[MODEL_LABELS.get(model, model)] = None
    yield from (f"Refused, {listed(models)}: “{words}”." for words, models in said.items())


# Which columns


def _significant(heading: str, key: str, digits: int = 3) -> Column:
    """With as many digits after the point as give the mean so many significant ones."""

    def cell(seeds: pd.DataFrame, notes: Notes) -> str:
        values = present(list(seeds[key]))
        size = abs(statistics.fmean(values)) if values else 0
        places = max(0, digits - 1 - math.floor(math.log10(size))) if size else digits - 1
        return mean_and_deviation(list(seeds[key]), places)

    return Column(heading, cell)


def _largest(heading: str, key: str) -> Column:
    return Column(heading, lambda seeds, notes: largest(list(seeds[key])))


def _constant(heading: str, key: str, show: Callable[[Any], str] = str) -> Column:
    """What is the same in every seed; "4 or 5" where it is not."""
    return Column(heading, lambda seeds, notes: either([NONE if v is None else show(v) for v in seeds[key]]))


_ONE_NETWORK = ["benchmark", "seed", "model", "precision"]


def _int8_rows(data: ReportData) -> Iterator[Group]:
    """A row per network and precision, whose latencies are a column per batch size ("median_ms, 64")."""
    frame = data.measured[data.measured["measurement"] == "int8"]
    if len(frame):
        latencies = frame.pivot(index=_ONE_NETWORK, columns="batch_size", values="median_ms").add_prefix("median_ms, ")
        wide = frame.drop_duplicates(_ONE_NETWORK).join(latencies, on=_ONE_NETWORK)
        wide["megabytes"] = wide["file_bytes"] / 1e6
        yield from _rows(replace(data, measured=wide), "int8", ("precision",))


def _int8_columns(data: ReportData) -> tuple[Column, ...]:
    sizes = sorted({size for frame in of_measurement(data, "int8").values() for size in frame["batch_size"]})
    return (
        _constant("Precision", "precision", lambda name: PRECISIONS.get(name, name)),
        score_column("Score", "score"),
        *(_significant(f"Median ms, batch {size}", f"median_ms, {size}") for size in sizes),
        _constant("Activations", "activations"),
        _constant("of these in float", "float_activations"),
        _constant("Integer layers", "integer_layers"),
        _constant("To integers", "quantize_nodes"),
        _constant("Back to float", "dequantize_nodes"),
        mean_column("Same predictions, %", "same_argmax", percentage),
        _largest("Largest logit difference", "max_logit_difference"),
        _constant("Rows evaluated", "evaluated_rows", count),
        _constant("File, MB", "megabytes", lambda value: number(value, 2)),
        SEEDS_COLUMN,
    )


def _against_original(seeds: pd.DataFrame, notes: Notes) -> str:
    """Score less the original's: of perplexity in per cent of it."""
    first = seeds.iloc[0]
    if first["method"] == "original":
        return NONE
    relative, originals = first["metric"] in LOWER_IS_BETTER, seeds["original_score"].astype(float)
    changes = list((seeds["score"].astype(float) - originals) * (100 / originals if relative else 1))
    text = mean_and_deviation(changes, 2 if relative else digits_of(first["metric"]), signed=True)
    return f"{text} %" if relative and present(changes) else text


def _real(data: ReportData) -> Iterator[Group]:
    for name, frame in of_measurement(data, "real").items():
        for (method, effort, *_), seeds in rows_by(frame, "method", "effort", "fitted_on", "precision").items():
            how = METHODS.get(method, method) + (f", {effort}" if effort else "")
            yield (name, how), seeds


def _real_notes(data: ReportData, rows: Sequence[Row]) -> Iterator[str]:
    """Where each network and what it was judged on is from, then what was refused."""
    for record in data.measurements:
        if record.measurement == "real":
            told, samples = record.models[record.benchmark], record.settings["evaluation_samples"]
            of = f" of {read}" if (read := record.data.get("copy_of") or record.data.get("source")) else ""
            judged = f"judged on at most {count(samples)} inputs{of}"
            yield f"{record.benchmark}: {told['run']} ({told['licence']}); {judged}."
    yield from _refusals(data, rows, "real")


_NETWORK = ("Benchmark", "Network")
_OVER_SEEDS = "Mean ± sample standard deviation over seeds."


MEASURED_TABLES: dict[str, TableSpec] = {
    "int8": TableSpec(
        title="float32 and int8 by onnxruntime",
        caption="Records of hf-lgelu 0.1.0 have files of layers alone that round what Gemm gives as well, which those "
        "of today do not. Static int8: weights per channel, activations unsigned, ranges from calibration rows of the "
        "training split; of every operation that can be, or of convolutions and matrix products alone. Score in "
        "onnxruntime on "
        "the rows evaluated; predictions and logits against torch in float32. Latency of one call on one thread, every "
        "file timed in turn in each round; the median over the rounds. Activations in float stand between a step back "
        "to float and one to integers; a ReLU is the lower end of the integers' range and vanishes. "
        f"{_OVER_SEEDS}",
        rows=_int8_rows,
        head=_NETWORK,
        columns=_int8_columns,
        text_columns=3,
    ),
    "conversion": TableSpec(
        title="ReLU without training: score and distance from the GELU network",
        caption="Everything is measured on the evaluation split, against the same network with its GELU. Calibration "
        "rows are drawn from the training rows, without labels: of text tokens, else rows of features or images; all "
        "where there are fewer than asked. Bias fold: only the biases behind the gates are fitted. Place: each ReLU's "
        "kink and slope are placed before the refit, wider: of more units. Hardened: another "
        "network, trained with λ-GELU to become ReLU, so its distance from the GELU network is that of two "
        "trainings. Differences from the original are taken seed by seed. Mean ± sample "
        "standard deviation over seeds; of logit changes the largest.",
        rows=partial(_rows, name="conversion", keys=("method", "rows")),
        head=_NETWORK,
        columns=(
            Column("Way", lambda s, notes: METHODS.get(s["method"].iloc[0], s["method"].iloc[0])),
            _constant("Calibration rows", "rows", count),
            score_column("Score", "score"),
            Column("Against the original", _against_original),
            _significant("KL, nats", "kl"),
            mean_column("Same prediction, %", "agreement", percentage),
            _largest("Largest logit change", "max_logit_change"),
            SEEDS_COLUMN,
        ),
        notes=partial(_refusals, name="conversion"),
        text_columns=3,
    ),
    "real": TableSpec(
        title="Networks that nobody here trained: as they are, swapped and converted",
        caption="Each judged on held-out samples of its own task; converted: on so many samples "
        "without labels, with that effort. int8: convolutions and matrix products, in "
        "onnxruntime; a call is of 8 samples on one thread. KL and predictions against the original; of an embedding "
        "the share of samples with the same nearest neighbour, and cosines to the original's.",
        rows=_real,
        head=("Network", "Way"),
        columns=(
            _constant("Fitted on", "fitted_on", count),
            _constant("Rows", "rows", count),
            _constant("Width", "width", lambda width: f"{width:g}"),
            _constant("Precision", "precision"),
            _constant("Metric", "metric"),
            score_column("Score", "score"),
            _significant("KL, nats", "kl"),
            mean_column("Same prediction, %", "agreement", percentage),
            _significant("Mean cosine", "cosine", 4),
            _significant("Least cosine", "least_cosine", 4),
            _significant("Seconds", "seconds"),
            _significant("Call, ms", "call_ms"),
        ),
        notes=_real_notes,
    ),
}
