"""Records → data frames: a row a run, a row of each measurement, all in the order of the tables."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.paper import PAPER_LR_MULTIPLIER, PaperValues, data_read
from lgelu_lab.studies.experiments import PAPER_TEMPERATURE, SEEDS, STUDIES, experiment_name
from lgelu_lab.studies.records import EARLIER_DEFAULTS, RunRecord

_ACTIVATION_LABELS = {
    "gelu": "GELU",
    "relu": "ReLU",
    "silu": "SiLU",
    "mish": "Mish",
    "prelu": "PReLU",
    "learnable_swish": "Swish, learnable β",
}
_ORDER = (*_ACTIVATION_LABELS.values(), "λ-GELU uniform", "λ-GELU increasing", "λ-GELU decreasing")
_GATE_LABELS = {"lambda_gelu": "λ-GELU", "lambda_gelu_tanh": "λ-GELU (tanh)", "lambda_silu": "λ-SiLU"}
_PARTS = frozenset(study.folder for study in STUDIES.values()) - {""}
"""Folders of studies that have runs of their own."""

MODEL_LABELS = {
    "gelu": "GELU",
    "relu": "ReLU from the start",
    "lambda_gelu": "λ-GELU as learned",
    "hardened": "λ-GELU hardened",
    "hardened_relu": "hardened, swapped",
}
"""What the tables call the networks that were measured."""

_RECIPE = (
    *("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "learning_rate", "weight_decay"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_grad_norm", "label_smoothing_factor"),
    *("train_batch_size", "dataloader_drop_last", "num_train_epochs", "max_steps", "bf16", "fp16"),
    *("pretrained", "image_size", "patch_size", "num_layers", "width"),
    *("num_heads", "context_length", "vocabulary_size"),
)
"""What two runs have in common that differ in their activation alone."""


@dataclass(frozen=True)
class ReportData:
    """What a report is made of.

    Args:
        runs: a row a run, with its `record`, `benchmark`, `part` (of _PARTS or ""), `label`,
            `seed`, ...; benchmarks in the paper's order, baselines first.
        measured: a row of a measurement's record, with `measurement`, `benchmark`, `seed`, and `metric` of its network.
        measurements: the measurements' records.
        paper: the paper's values.
    """

    runs: pd.DataFrame
    measured: pd.DataFrame
    measurements: Sequence[MeasurementRecord] = ()
    paper: PaperValues = field(default_factory=PaperValues)

    def part(self, name: str) -> pd.DataFrame:
        """The runs of one part; "" are those of the paper's tables."""
        return self.runs[self.runs["part"] == name]


def read_frames(
    records: Sequence[RunRecord],
    measurements: Sequence[MeasurementRecord] = (),
    *,
    paper: PaperValues | None = None,
) -> ReportData:
    """The frames of some records.

    Raises ValueError without any, where a run or a measurement is there twice, where the seeds of a configuration were
    evaluated on different numbers of rows, and where a measurement is of another network than the run's record.
    """
    if not records:
        raise ValueError("a report needs at least one record")
    runs = run_frame(records)
    scores = {run.name: run.record.saved.score for run in runs.itertuples()}
    for record in measurements:
        for model in record.models.values():
            score = scores.get(model["run"], model["score"])
            if not math.isclose(score, model["score"]):
                raise ValueError(
                    f"{record.measurement} of {record.benchmark}, seed {record.seed}, is of a network that scores "
                    f"{model['score']}, and the record of {model['run']} has {score}: measure it again"
                )
    return ReportData(runs, measurement_frame(measurements, runs), measurements, paper or PaperValues())


def run_frame(records: Iterable[RunRecord]) -> pd.DataFrame:
    """A row a run.

    Raises ValueError where two records are the same seed of the same configuration, or its seeds were evaluated on
    different numbers of rows.
    """
    frame = pd.DataFrame([_run_row(record) for record in records])
    frame["place"] = _places(frame["benchmark"], STUDIES["profiles"].benchmarks)
    frame = frame.sort_values(["place", "rank", "label", "seed"], kind="stable", ignore_index=True)
    _check_seeds(frame)
    return frame


def _check_seeds(frame: pd.DataFrame) -> None:
    """Raise where the mean over the seeds of a configuration would count one twice or be of different rows."""
    of = ["part", "benchmark", "label"]
    twice = frame[frame.duplicated([*of, "seed"], keep=False)]
    if len(twice):
        first = twice.iloc[0]
        same = frame[(frame[of] == first[of]).all(axis=1)]
        raise ValueError(
            f"{first['benchmark']}, {first['label']}: more than one record of a seed "
            f"({', '.join(map(str, same['seed']))}). Their mean would count it twice; report on a folder that holds "
            "each run once"
        )
    for (_, benchmark, label), seeds in frame.groupby(of, sort=False):
        if seeds["eval_samples"].nunique() > 1:
            told = ", ".join(f"seed {run.seed} on {run.eval_samples:,}" for run in seeds.itertuples())
            raise ValueError(
                f"{benchmark}, {label}: the seeds were not evaluated on the same number of rows ({told}), so their "
                "mean says nothing; run them again with the same --max_eval_samples, or leave the others out"
            )


def _run_row(record: RunRecord) -> dict:
    config, last = record.config, record.last
    label = configuration_label(record)
    part = folder if (folder := record.name.partition("/")[0]) in _PARTS else ""
    return {
        **{name: config.get(name) for name in ("benchmark", "activation", "init_mode", "seed")},
        **{"record": record, "name": record.name, "part": part, "label": label, "key": configuration_key(record)},
        "rank": _rank(record, label),
        "temperature": config.get("temperature"),
        "multiplier": config.get("hardness_lr_multiplier"),
        "hardens": bool(config["harden"]),
        "relufied": bool(config.get("relufication")),
        "metric": record.metric,
        "greater_is_better": record.greater_is_better,
        "train_samples": record.data["train_samples"],
        "eval_samples": record.data["eval_samples"],
        "recipe": json.dumps(recipe_of(record)),
        "best_score": record.best.score,
        "best_epoch": record.best.epoch,
        "last_score": last.score,
        "last_epoch": last.epoch,
        "mean_hardness": last.mean_hardness,
        "drift": record.drift,
        "hours": None if record.whole_seconds is None else record.whole_seconds / 3600,
    }


def recipe_of(record: RunRecord) -> dict[str, Any]:
    """{setting: value} of what decides a run's score beside activation and seed, the rows it was judged on too."""
    config = EARLIER_DEFAULTS | record.config
    rows = {name: record.data[name] for name in ("train_samples", "eval_samples", "eval_split")}
    if not str(config.get("optim")).startswith("adam"):  # early records name what timm's optimizers were not given
        config = config | dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"))
    if str(config["benchmark"]).startswith("resnet"):  # whose BatchNorm sees what one process runs at once
        steps = (config.get("gradient_accumulation_steps") or 1) * record.hardware.get("processes", 1)
        rows["normalized_together"] = _normal(config["train_batch_size"] / steps)
    return {name: _normal(config.get(name)) for name in _RECIPE} | rows | {"data": data_read(record)}


def _normal(value: Any) -> Any:
    """6.0 as 6; and what an earlier record does not have, as what it was then: nothing."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value or None


def last_evaluations(data: ReportData) -> pd.DataFrame:
    """The runs with their last evaluation: `score`, and `relu`, that of the ReLU network with its weights.

    A run that swapped ReLU in during training is a ReLU network from then on: its own score is both (`is_relu`). NaN
    where none was swapped.
    """
    rows = {}
    for run in data.runs.itertuples():
        last = run.record.last
        swapped = run.relufied and last.relu_score is None
        if swapped or last.relu_score is not None:
            rows[run.Index] = {
                **{"epoch": last.epoch, "score": last.score, "is_relu": swapped},
                "relu": last.score if swapped else last.relu_score,
                "smallest_hardness": min(last.hardness.values(), default=None),
                "logit_change": 0.0 if swapped else last.relu_max_logit_change,
                "unchanged": 1.0 if swapped else last.relu_unchanged_predictions,
            }
    columns = ["epoch", "score", "is_relu", "relu", "smallest_hardness", "logit_change", "unchanged"]
    last = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    return data.runs.join(last.astype({"relu": float, "smallest_hardness": float}))


def measurement_frame(measurements: Iterable[MeasurementRecord], runs: pd.DataFrame) -> pd.DataFrame:
    """A row of each measurement's record; None where a row has no such column. One seed after the other.

    Raises ValueError where a measurement is there twice for a seed.
    """
    records = list(measurements)
    columns = ["measurement", "benchmark", "seed", "model", "metric", "samples"]
    samples = runs.groupby("name")["eval_samples"].first()
    rows, seen = [], set()
    for record in records:
        key = (record.measurement, record.benchmark, record.seed)
        if key in seen:
            seeds = sorted(r.seed for r in records if (r.measurement, r.benchmark) == key[:2])
            raise ValueError(
                f"{key[0]} of {key[1]}: more than one record of a seed ({', '.join(map(str, seeds))}). Their mean "
                "would count it twice; report on a folder that holds each measurement once"
            )
        seen.add(key)
        for row in record.rows:
            model = record.models.get(row.get("model"), {})
            known = {"metric": model.get("metric"), "samples": samples.get(model.get("run"))}
            rows.append({**dict(zip(columns[:3], key, strict=True)), **known, **row})
    frame = pd.DataFrame(rows, dtype=object, columns=None if rows else columns)
    frame = frame.where(frame.notna(), None)
    frame["place"] = _places(frame["benchmark"], STUDIES["downstream"].benchmarks)
    return frame.sort_values(["place", "seed"], kind="stable", ignore_index=True)


def rows_by(frame: pd.DataFrame, *keys: str) -> dict[tuple, pd.DataFrame]:
    """{values of `keys`: that row of each seed that has it}, in the order of the first seed that has one.

    Raises ValueError where a record has two rows with the same values.
    """
    found: dict[tuple, list] = {}
    seen = set()
    for index, benchmark, seed, *raw in frame[["benchmark", "seed", *keys]].itertuples():
        values = tuple(None if pd.isna(value) else value for value in raw)
        if (benchmark, seed, values) in seen:
            pairs = ", ".join(f"{key} = {value!r}" for key, value in zip(keys, values, strict=True))
            raise ValueError(f"{frame['measurement'].iloc[0]} of {benchmark}, seed {seed}: two rows with {pairs}")
        seen.add((benchmark, seed, values))
        found.setdefault(values, []).append(index)
    return {values: frame.loc[indices] for values, indices in found.items()}


def of_measurement(data: ReportData, name: str) -> dict[str, pd.DataFrame]:
    """{benchmark: its rows, one seed after the other} of one measurement, in the study's order."""
    frame = data.measured[data.measured["measurement"] == name]
    return dict(iter(frame.groupby("benchmark", sort=False)))


def of_label(runs: pd.DataFrame, benchmark: str) -> dict[str, pd.DataFrame]:
    """{label: its seeds} of one benchmark."""
    return dict(iter(runs[runs["benchmark"] == benchmark].groupby("label", sort=False)))


def paired(runs: pd.DataFrame, baselines: pd.DataFrame) -> pd.DataFrame:
    """Each run beside the baseline with the same seed and `recipe_of` (columns …_base); those without are left out."""
    on = ["benchmark", "seed", "recipe"]
    return runs.merge(baselines, on=on, suffixes=("", "_base"), how="inner")


def configuration_label(record: RunRecord) -> str:
    """What the seeds of one configuration have in common, in words: "λ-GELU uniform, hardened".

    t, c and the schedule are named where they are not the paper's.
    """
    config = record.config
    name = _ACTIVATION_LABELS.get(config["activation"], config["activation"])
    if config.get("relufication"):
        return f"{name} → ReLU at {config.get('switch_fraction', 0.25):.0%}, trained on"
    gate = config["activation"]
    if gate not in _GATE_LABELS:
        return name
    parts = [f"{_GATE_LABELS[gate]} {config['init_mode']}"]
    if config.get("temperature", PAPER_TEMPERATURE) != PAPER_TEMPERATURE:
        parts.append(f"t = {config['temperature']:g}")
    if config.get("hardness_lr_multiplier", PAPER_LR_MULTIPLIER) != PAPER_LR_MULTIPLIER:
        parts.append(f"c = {config['hardness_lr_multiplier']:g}")
    parts += ["geometric"] * (config.get("hardening_schedule") == "geometric")
    return ", ".join([*parts, *["hardened"] * config["harden"]])


def configuration_key(record: RunRecord) -> str:
    """The same as in a run's folder name, without the seed: "lambda_gelu-uniform-hardened"."""
    config = record.config
    named = {
        "activation": config["activation"],
        "harden": config["harden"],
        "relufication": bool(config.get("relufication")),
        "hardening_schedule": config.get("hardening_schedule"),
    }
    if config["activation"].startswith("lambda_"):
        named["init_mode"] = config["init_mode"]
    return experiment_name("", named, 0).removeprefix("/").removesuffix("-seed0")


def seed_count(seeds: Iterable[int]) -> str:
    """How many of the paper's seeds are there: "3", "2 of 3", or "1 of 3: 42", named where it is none of SEEDS."""
    there = sorted(seeds)
    if len(there) >= len(SEEDS):
        return str(len(there))
    named = "" if set(there) <= set(SEEDS) else f": {', '.join(map(str, there))}"
    return f"{len(there)} of {len(SEEDS)}{named}"


def hardness_path(record: RunRecord) -> pd.DataFrame:
    """λ by epoch (rows, from 0 for the initial profile) and layer (columns, in the order of depth)."""
    sites = list(record.initial_hardness)
    rows = {0.0: record.initial_hardness} | {epoch.epoch: epoch.hardness for epoch in record.epochs}
    return pd.DataFrame([[row[site] for site in sites] for row in rows.values()], index=list(rows), columns=sites)


def _rank(record: RunRecord, label: str) -> int:
    base = label.removesuffix(", hardened")
    place = _ORDER.index(base) if base in _ORDER else len(_ORDER)
    return place + 100 * bool(record.config["harden"]) + 200 * bool(record.config.get("relufication"))


def _places(names: pd.Series, order: Sequence[str]) -> pd.Series:
    others = [name for name in dict.fromkeys(names) if name not in order]
    places = {name: place for place, name in enumerate((*order, *others))}
    return names.map(places)
