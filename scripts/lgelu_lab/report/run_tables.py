"""The tables of the training runs, one specification each."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import pandas as pd

from lgelu_lab.report.difference import INTERVAL, Difference, difference_of
from lgelu_lab.report.frames import ReportData, hardness_path, last_evaluations, of_label, paired
from lgelu_lab.report.markup import SEEDS_COLUMN, Column, Group, Row, TableSpec, mean_column, score_column
from lgelu_lab.report.numbers import (
    MISSING,
    NONE,
    count,
    digits_of,
    either,
    largest,
    listed,
    mean_and_deviation,
    metric_with_direction,
    metrics_in_words,
    number,
    present,
)
from lgelu_lab.report.paper import PAPER_RECIPES, Notes, data_read, differences, marked, model_size, trained_on
from lgelu_lab.studies.experiments import INIT_MODES, SEEDS, STUDIES

LEARNED_LABELS = tuple(f"λ-GELU {mode}" for mode in INIT_MODES)
PROFILE_LABELS = ("GELU", "ReLU", *LEARNED_LABELS)
HARDENED = "λ-GELU uniform, hardened"
SUBSTITUTION_LABELS = ("GELU", HARDENED, "GELU → ReLU at 25%, trained on")
RELATED_LABELS = ("ReLU", "GELU", "SiLU", "Mish", "PReLU", "Swish, learnable β", *LEARNED_LABELS)
_OTHERS = ("silu", "mish", "prelu", "learnable_swish")

ONE_SEED = "An interval in brackets: one seed; Wilson's 95 % interval for its number of evaluation samples."


# Which rows


def profile_runs(data: ReportData) -> pd.DataFrame:
    """The runs of Table I: GELU, ReLU and λ-GELU as learned and hardened; neither grid nor other activations."""
    runs = data.part("")
    return runs[~runs["relufied"] & runs["activation"].isin(("gelu", "relu", "lambda_gelu"))]


def related_runs(data: ReportData) -> pd.DataFrame:
    """The runs beside other activations, on the benchmarks where one of those was trained."""
    runs = data.part("")
    runs = runs[~runs["hardens"] & ~runs["relufied"] & runs["label"].isin(RELATED_LABELS)]
    return runs[runs["benchmark"].isin(runs.loc[runs["activation"].isin(_OTHERS), "benchmark"])]


def substituted_runs(data: ReportData, learned: bool = False) -> pd.DataFrame:
    """The runs of Table II in their last epoch, or those of λ-GELU swapped as learned."""
    runs = last_evaluations(data)
    runs = runs[runs["part"] == ""]
    if learned:
        return runs[(runs["activation"] == "lambda_gelu") & ~runs["hardens"]]
    return runs[(runs["activation"] == "gelu") | runs["hardens"]]


def expected_benchmarks(runs: pd.DataFrame) -> list[str]:
    """Those with a run and, where one of the paper's is among them, all of the paper's."""
    found = list(dict.fromkeys(runs["benchmark"]))
    return list(dict.fromkeys([*PAPER_RECIPES, *found])) if PAPER_RECIPES.keys() & set(found) else found


def _asked(
    benchmarks: Sequence[str], runs: pd.DataFrame, study: str = "", labels: Sequence[str] = ()
) -> Iterator[Group]:
    """The labels that a study asks for, whether they are there or not, then the others that are."""
    for benchmark in benchmarks:
        found = of_label(runs, benchmark)
        wanted = labels if study and benchmark in STUDIES[study].benchmarks else ()
        if wanted and not found:
            yield (benchmark, "all"), None
        for label in dict.fromkeys([*wanted, *found]) if found else ():
            yield (benchmark, label), found.get(label)


def _substituted(data: ReportData, learned: bool) -> Iterator[Group]:
    asked = ("substitution", SUBSTITUTION_LABELS) if not learned else ()
    for head, seeds in _asked(expected_benchmarks(data.part("")), substituted_runs(data, learned), *asked):
        if seeds is None or seeds["relu"].notna().all():
            yield head, seeds


# Which columns


def _of_paper(data: ReportData, runs: pd.DataFrame, heading: str, quantity: str) -> tuple[Column, ...]:
    """The column of the paper's own value, where it has one for a benchmark of the table."""

    def cell(seeds: pd.DataFrame, notes: Notes) -> str:
        return data.paper.text(seeds["benchmark"].iloc[0], seeds["key"].iloc[0], quantity)

    there = data.paper.has(expected_benchmarks(runs), quantity)
    return (Column(f"{heading}, paper", cell),) if there else ()


_TRAINED = Column("Epochs × samples", trained_on)


def _profile_columns(data: ReportData) -> tuple[Column, ...]:
    paper = partial(_of_paper, data, data.part(""))
    return (
        *(
            score_column("Best validation score", "best_score"),
            *paper("Best validation score", "best_validation_score"),
        ),
        *(mean_column("Its epoch", "best_epoch", 0), *paper("Its epoch", "best_epoch")),
        *(mean_column("Mean λ, last epoch", "mean_hardness", 2), *paper("Mean λ, last epoch", "mean_hardness")),
        *(mean_column("Drift V_λ", "drift", 2), *paper("Drift V_λ", "drift")),
        *(SEEDS_COLUMN, _TRAINED),
    )


_SUBSTITUTION_COLUMNS = (
    score_column("As is", "score"),
    score_column("ReLU substituted", "relu"),
    Column("Change", lambda seeds, notes: _change(seeds, notes)),
    mean_column("Epoch", "epoch", 0),
    mean_column("Smallest λ", "smallest_hardness", 1),
    Column("Largest logit change", lambda seeds, notes: _unless_relu(seeds, largest(list(seeds["logit_change"])))),
    Column(
        "Unchanged predictions",
        lambda seeds, notes: _unless_relu(seeds, mean_and_deviation(list(seeds["unchanged"]), 4)),
    ),
    *(SEEDS_COLUMN, _TRAINED),
)


def _unless_relu(seeds: pd.DataFrame, cell: str) -> str:
    return NONE if seeds["is_relu"].astype(bool).all() else cell


def _change(seeds: pd.DataFrame, notes: Notes) -> str:
    text = mean_and_deviation(list(seeds["relu"] - seeds["score"]), digits_of(seeds["metric"].iloc[0]), signed=True)
    return _unless_relu(seeds, text)


def _substitution_notes(data: ReportData, rows: Sequence[Row]) -> Iterator[str]:
    if any("→ ReLU" in row[1] for row in rows):
        yield (
            "→ ReLU: from the switch on this is a ReLU network that trains on. Its score is both, as is and "
            "substituted; there is nothing left to exchange."
        )


def _substitution_caption(data: ReportData, learned: bool) -> str:
    runs = substituted_runs(data, learned)
    text = f"{metrics_in_words(runs)} Change: ReLU substituted minus as is".lstrip()
    lower = dict.fromkeys(runs.loc[~runs["greater_is_better"].astype(bool), "metric"])
    if lower:
        text += f"; of {' and '.join(lower)} lower is better, so there a change above zero is a loss"
    return f"{text}. Logits and predictions are compared on every evaluation sample. {ONE_SEED}"


def _substitution(learned: bool = False) -> TableSpec:
    what = "λ-GELU as learned, swapped without hardening, " if learned else "ReLU in the gates' place, same weights, "
    return TableSpec(
        title=f"{what}in the last epoch",
        caption=partial(_substitution_caption, learned=learned),
        rows=partial(_substituted, learned=learned),
        columns=_SUBSTITUTION_COLUMNS,
        notes=_substitution_notes,
    )


def _related_gain(data: ReportData, rival: str, seeds: pd.DataFrame, notes: Notes) -> str:
    runs = related_runs(data)
    pairs = paired(seeds, runs[runs["label"] == rival])
    gain = best_minus(pairs)
    return NONE if gain is None or seeds["label"].iloc[0] == rival else str(gain)


def best_minus(pairs: pd.DataFrame) -> Difference | None:
    """Best validation scores of `paired` runs minus those of their baselines; None for no pair."""
    if not len(pairs):
        return None
    metric = pairs["metric"].iloc[0]
    return difference_of(pairs["best_score"], pairs["best_score_base"], metric, pairs["eval_samples"])


# Rank correlation between the profiles of two init modes


def correlation_curve(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Spearman's ρ over the layers of two configurations, by epoch (rows) and shared seed (columns).

    Equal λ share their average rank; NaN where every layer of a side has the same λ, which has no ranks.
    """
    others = second.set_index("seed")["record"]
    curves = {}
    for run in first.itertuples():
        if run.seed in others.index:
            one, other = hardness_path(run.record), hardness_path(others[run.seed])
            shared = [epoch for epoch in one.index if epoch in other.index]
            ranks = [path.loc[shared].rank(axis=1) for path in (one, other)]
            curves[run.seed] = ranks[0].corrwith(ranks[1].set_axis(ranks[0].columns, axis=1), axis=1)
    return pd.DataFrame(curves).loc[lambda frame: frame.index] if curves else pd.DataFrame()


def correlation_curves(data: ReportData, benchmark: str) -> dict[tuple[str, str], pd.DataFrame]:
    """{(init mode, init mode): ρ_S by epoch and seed} for the pairs of which there are runs."""
    seeds = of_label(profile_runs(data), benchmark)
    pairs = {
        pair: correlation_curve(*(seeds[f"λ-GELU {mode}"] for mode in pair))
        for pair in combinations(INIT_MODES, 2)
        if all(f"λ-GELU {mode}" in seeds for mode in pair)
    }
    return {pair: curve for pair, curve in pairs.items() if len(curve)}


def _correlations(data: ReportData) -> Iterator[Group]:
    for benchmark in dict.fromkeys(profile_runs(data)["benchmark"]):
        for (first, second), curve in correlation_curves(data, benchmark).items():
            yield (benchmark, f"{first} and {second}"), curve


def _rho(at: Callable[[int], int], named: bool = True) -> Callable[[pd.DataFrame, Notes], str]:
    def cell(curve: pd.DataFrame, notes: Notes) -> str:
        place = at(len(curve) - 1)
        values = present(list(curve.iloc[place]))
        text = UNDEFINED
        if values:
            low, high = (number(value, 2, signed=True) for value in (min(values), max(values)))
            text = number(sum(values) / len(values), 2, signed=True)
            text += f" ({low} to {high})" if min(values) != max(values) else ""
        return f"{text}, epoch {curve.index[place]:g}" if named else text

    return cell


UNDEFINED = "undefined"

# The study of temperature t and learning-rate multiplier c

EXPECTED_RUNS = len(INIT_MODES) * len(SEEDS)
"""Init modes × seeds behind a complete cell of the grid."""


def grid_cells(data: ReportData, benchmark: str) -> dict[tuple[float, float], pd.DataFrame]:
    """{(t, c): its runs} of one benchmark, for every pair that the study asks for or a run has.

    `drift` is V_λ, `best_score_base` the best validation score of the GELU baseline with the same seed and recipe, NaN
    for a run without one, and `gain` what a run's is above it.
    """
    runs = data.part("grid")
    runs = runs[runs["benchmark"] == benchmark]
    learned, baselines = runs[runs["activation"] == "lambda_gelu"], runs[runs["activation"] == "gelu"]
    if not len(learned):
        return {}
    pairs = paired(learned, baselines).set_index("name")
    learned = learned.assign(best_score_base=learned["name"].map(pairs["best_score_base"]))
    learned = learned.assign(gain=learned["best_score"] - learned["best_score_base"])
    study = STUDIES["grid"]
    planned = study.build((benchmark,)) if benchmark in study.benchmarks else []
    points = {
        (e.arguments["temperature"], e.arguments["hardness_lr_multiplier"])
        for e in planned
        if "temperature" in e.arguments
    }
    points |= set(zip(learned["temperature"], learned["multiplier"], strict=True))
    temperatures, multipliers = (sorted(set(values)) for values in zip(*points, strict=True))
    return {
        (t, c): learned[(learned["temperature"] == t) & (learned["multiplier"] == c)]
        for t in temperatures
        for c in multipliers
    }


def _grid_rows(data: ReportData) -> Iterator[Group]:
    for benchmark, runs in data.part("grid").groupby("benchmark", sort=False):
        for (t, c), cell in grid_cells(data, benchmark).items():
            yield (), {"benchmark": benchmark, "runs": runs, "t": t, "c": c, "cell": cell}


def _grid_runs(point: dict[str, Any], notes: Notes) -> str:
    there = len(point["cell"])
    if not there:
        return MISSING
    return str(there) if there >= EXPECTED_RUNS else f"{there} of {EXPECTED_RUNS}"


def _grid_gain(mode: str) -> Column:
    """ΔBVS of one init mode: where the gates begin counts as well as how they move."""

    def cell(point: dict[str, Any], notes: Notes) -> str:
        seeds = point["cell"]
        seeds = seeds[seeds["init_mode"] == mode]
        if not len(seeds):
            return NONE
        return str(best_minus(seeds) or "baseline missing")

    return Column(f"ΔBVS, {mode}", cell)


# What is there, and what it rests on

_PART_ORDER = ("", "grid", "downstream")
_VERSIONS = ("torch", "transformers", "accelerate", "timm", "hf-lgelu")


def _basis(data: ReportData) -> Iterator[Group]:
    for part in _PART_ORDER:
        for benchmark, runs in data.part(part).groupby("benchmark", sort=False):
            yield (", ".join(filter(None, (benchmark, part))),), runs


def _unlike(runs: pd.DataFrame, notes: Notes) -> str:
    found = dict.fromkeys(text for record in runs["record"] for text in differences(record))
    return "; ".join(found) or NONE


def _evaluated_on(runs: pd.DataFrame, notes: Notes) -> str:
    metric = metric_with_direction(runs["metric"].iloc[0], bool(runs["greater_is_better"].iloc[0]))
    splits = either([record.data["eval_split"] for record in runs["record"]])
    return f"{metric} on {either(runs['eval_samples'].map(count))} rows of {splits}"


def _recipe_of(config: dict[str, Any]) -> str:
    parts = [f"{config['optim']}, learning rate {config['learning_rate']:g}"]
    if "weight_decay" in config:
        parts.append(f"weight decay {config['weight_decay']:g}")
    if "lr_scheduler_type" in config:
        parts.append(f"schedule {config['lr_scheduler_type']}")
    parts.append(f"batch {config['train_batch_size']}")
    if config.get("label_smoothing_factor"):
        parts.append(f"label smoothing {config['label_smoothing_factor']:g}")
    parts += ["bf16"] * bool(config.get("bf16"))
    if config.get("pretrained"):
        parts.append(f"fine-tuned from {config['pretrained']}")
    return listed(filter(None, [*parts, model_size(config)]))


def machine_of(hardware: dict[str, Any]) -> str:
    """ "AMD EPYC, 1 thread", an accelerator's name, and "2 × ..." for so many processes."""
    threads, processes = hardware["threads_per_process"], hardware["processes"]
    where = listed(hardware["accelerators"]) or f"{hardware['cpu']}, {threads} thread{'s' * (threads > 1)}"
    return where if processes == 1 else f"{processes} × {where}"


def _runs_and_hours(runs: pd.DataFrame, notes: Notes) -> str:
    """How many runs, and how long those took of which the whole time is known."""
    timed = int(runs["hours"].notna().sum())
    text = f"{len(runs)}, {runs['hours'].sum():.1f} h"
    return text if timed == len(runs) else f"{text} for the {timed} that were timed whole"


def _basis_notes(data: ReportData, rows: Sequence[Row]) -> Iterator[str]:
    versions = [record.versions for record in data.runs["record"]]
    told = [name for name in _VERSIONS if any(name in found for found in versions)]
    shown = [f"{name} {either([found[name] for found in versions if name in found])}" for name in told]
    yield f"Versions: {listed(shown)}. ± is the sample standard deviation over seeds."


TABLES: dict[str, TableSpec] = {
    "profiles": TableSpec(
        title="The gates as learned (the paper's Table I)",
        caption=lambda data: (
            f"{metrics_in_words(profile_runs(data))} Mean ± sample standard deviation over seeds. {ONE_SEED} The best "
            "validation score is that of each run's best epoch; λ is averaged over layers, and the drift V_λ is each "
            "layer's way over the epochs, averaged likewise."
        ),
        rows=lambda data: _asked(expected_benchmarks(data.part("")), profile_runs(data), "profiles", PROFILE_LABELS),
        columns=_profile_columns,
    ),
    "correlation": TableSpec(
        title="Do the init modes end at the same profile? Spearman's ρ_S over layers",
        caption="Mean over the seeds that both init modes have, with the lowest and highest in brackets. Layers with "
        f"equal λ share their average rank; where every layer has the same λ, as in a uniform start, ρ_S is "
        f"{UNDEFINED}: such seeds are left out, and the curves have a gap.",
        rows=_correlations,
        head=("Benchmark", "Init modes"),
        columns=(
            Column("Seeds", lambda curve, notes: str(curve.shape[1])),
            Column("Before training", _rho(lambda last: 0, named=False)),
            Column("Halfway", _rho(lambda last: last // 2)),
            Column("Last epoch", _rho(lambda last: last)),
        ),
    ),
    "substitution-last": _substitution(),
    "substitution-learned-last": _substitution(learned=True),
    "grid": TableSpec(
        title="Temperature t and learning-rate multiplier c",
        caption="Δλ: drift V_λ averaged over seeds and init modes, ± the sample standard deviation. ΔBVS: best "
        "validation score minus that of the GELU baseline with the same seed and recipe, for each start. Where Δλ is "
        f"next to nothing, ΔBVS is what the start alone is worth. {INTERVAL}",
        rows=_grid_rows,
        head=(),
        columns=(
            Column("Benchmark", lambda point, notes: point["benchmark"] + marked(point["runs"], notes)),
            Column("t", lambda point, notes: f"{point['t']:g}"),
            Column("c", lambda point, notes: f"{point['c']:g}"),
            Column("Runs", _grid_runs),
            Column("Δλ", lambda point, notes: mean_and_deviation(list(point["cell"]["drift"]), 2)),
            *map(_grid_gain, INIT_MODES),
        ),
        text_columns=1,
    ),
    "related": TableSpec(
        title="Best validation score beside other activations",
        caption=lambda data: (
            f"{metrics_in_words(related_runs(data))} Minus GELU, minus ReLU: the mean difference from that run of the "
            f"same seed and recipe. {INTERVAL}"
        ),
        rows=lambda data: _asked(
            list(dict.fromkeys(related_runs(data)["benchmark"])), related_runs(data), "related", RELATED_LABELS
        ),
        columns=lambda data: (
            score_column("Best validation score", "best_score"),
            *(Column(f"Minus {rival}", partial(_related_gain, data, rival)) for rival in ("GELU", "ReLU")),
            *(SEEDS_COLUMN, _TRAINED),
        ),
    ),
    "basis": TableSpec(
        title="Seeds, epochs, samples, recipes and machines",
        caption="The paper gives optimizer, learning rate, weight decay, t, c and the hardening schedule, and no batch "
        "size, learning-rate schedule, momentum, number of epochs or λ₀ of the uniform start; those are ours. "
        "Epochs are compared with the latest best epoch that it names.",
        rows=_basis,
        head=("Benchmark",),
        columns=(
            Column("Unlike the paper", _unlike),
            Column("Runs", _runs_and_hours),
            Column("Seeds", lambda runs, notes: listed(sorted(set(runs["seed"])))),
            Column("Epochs", lambda runs, notes: either([f"{epoch:g}" for epoch in runs["last_epoch"]])),
            Column("Training samples", lambda runs, notes: either(runs["train_samples"].map(count))),
            Column("Evaluated on", _evaluated_on),
            Column("Data read", lambda runs, notes: either([data_read(record) for record in runs["record"]])),
            Column("Recipe", lambda runs, notes: either([_recipe_of(record.config) for record in runs["record"]])),
            Column("Machine", lambda runs, notes: either([machine_of(record.hardware) for record in runs["record"]])),
        ),
        notes=_basis_notes,
        text_columns=10,
    ),
}
