"""The main results: every way to a ReLU network beside the smooth one, as a table and as a picture."""

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pandas as pd

from lgelu_lab.report.difference import INTERVAL, Difference, difference_of
from lgelu_lab.report.drawing import PALETTE, head, new_figure, plain, style
from lgelu_lab.report.frames import ReportData, last_evaluations, of_label, of_measurement, paired, rows_by, seed_count
from lgelu_lab.report.markup import Column, Group, TableSpec
from lgelu_lab.report.numbers import (
    LOWER_IS_BETTER,
    MISSING,
    NONE,
    SAME_NEIGHBOUR,
    digits_of,
    listed,
    metric_with_direction,
    metrics_in_words,
    number,
    sampled,
    score_text,
)
from lgelu_lab.report.paper import Notes, marked, trained_on
from lgelu_lab.report.run_tables import HARDENED, LEARNED_LABELS, ONE_SEED, expected_benchmarks, profile_runs
from lgelu_lab.studies.experiments import SEEDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTH, DIRECT, CONVERTED = "GELU, smooth", "GELU, then swapped", "Converted, no training"
HARD, EARLY, FROM_START = "λ-GELU hardened, swapped", "Swapped early, trained on", "ReLU from the start"
WAYS = (DIRECT, CONVERTED, HARD, EARLY, FROM_START)
"""The ways to a ReLU network."""

OWN_SHAPE, WIDER = "Converted, own shape", "Converted, more hidden units"
"""Of a network from elsewhere."""


def results_of(data: ReportData, benchmark: str) -> dict[str, pd.DataFrame]:
    """{way: its seeds} of one benchmark, the smooth network first; empty frames for what is not there.

    `value` is the score in the last epoch with ReLU in place, of the smooth network as it is, of converted networks
    that after the refit on the most calibration rows; `before` is what these scored with smooth gates.
    """
    runs = last_evaluations(data)
    runs = runs[(runs["part"] == "") & (runs["benchmark"] == benchmark)]
    value = runs["relu"].where(runs["activation"] != "relu", runs["last_score"])
    found = of_label(runs.assign(value=value), benchmark)
    early = (seeds for label, seeds in found.items() if label.startswith("GELU → ReLU"))
    none = runs[:0].assign(value=0.0)
    gelu = found.get("GELU", none)
    chosen = {
        SMOOTH: gelu.assign(value=gelu["last_score"]),
        DIRECT: gelu,
        CONVERTED: _converted(data, benchmark),
        HARD: found.get(HARDENED, none),
        EARLY: next(early, none),
        FROM_START: found.get("ReLU", none),
    }
    return {way: seeds.dropna(subset="value") for way, seeds in chosen.items()}


def _converted(data: ReportData, benchmark: str) -> pd.DataFrame:
    frame = of_measurement(data, "conversion").get(benchmark)
    refits = {} if frame is None else rows_by(frame[frame["method"] == "refit"], "rows")
    if not refits:
        return pd.DataFrame(columns=["benchmark", "seed", "metric", "value", "before", "eval_samples"])
    (rows,) = max(refits)
    return refits[rows,].rename(columns={"score": "value", "original_score": "before", "samples": "eval_samples"})


def results_from_elsewhere(data: ReportData, network: str) -> dict[str, pd.DataFrame]:
    """The same of a network that nobody here trained: as it is, swapped, converted with the most inputs and effort."""
    frame = of_measurement(data, "real")[network].rename(columns={"score": "value"})
    frame = frame[frame["precision"] == "float32"]
    converted = frame[(frame["method"] == "converted") & frame["value"].notna()]
    is_wider = converted["width"].fillna(1) > 1
    return {
        SMOOTH: frame[frame["method"] == "original"],
        DIRECT: frame[frame["method"] == "direct"],
        # Inputs, then efforts, ascend.
        OWN_SHAPE: converted[~is_wider].groupby("seed").tail(1),
        WIDER: converted[is_wider].groupby("seed").tail(1),
    }


def tuned_ways(data: ReportData, benchmark: str) -> dict[str, pd.DataFrame]:
    """The same of a network that others trained and that was fine-tuned here, hardened, or swapped."""
    runs = data.part("pretrained")
    runs = runs[runs["benchmark"] == benchmark]
    last = [record.last for record in runs["record"]]
    runs = runs.assign(score=[epoch.score for epoch in last], relu=[epoch.relu_score for epoch in last])
    hard = runs["hardens"] & ~runs["label"].str.contains("geometric")
    smooth = runs[~runs["hardens"] & runs["relu"].notna()]
    made = of_measurement(data, "conversion").get(benchmark)
    ways = {SMOOTH: smooth.assign(value=smooth["score"]), DIRECT: smooth.assign(value=smooth["relu"])}
    ways |= {HARD: runs[hard].assign(value=runs["relu"])}
    for way, method in ((OWN_SHAPE, "refit"), (WIDER, "place-wider")) if made is not None else ():
        rows = made[(made["method"] == method) & made["score"].notna()].rename(columns={"score": "value"})
        ways[way] = rows.groupby("seed").tail(1)
    return ways


def trained_here(data: ReportData) -> dict[str, dict[str, pd.DataFrame]]:
    """{benchmark: `results_of` it} of those that were trained in one of the ways."""
    found = {name: results_of(data, name) for name in dict.fromkeys(data.part("")["benchmark"])}
    return {name: ways for name, ways in found.items() if any(len(ways[way]) for way in ways if way != CONVERTED)}


def way_text(seeds: pd.DataFrame) -> str:
    """The score of a way, with the interval of a single seed, or the number of seeds where it is not the paper's."""
    first, values = seeds.iloc[0], list(seeds["value"])
    few = f"{seed_count(seeds['seed'])} seeds" if len(seeds) < len(SEEDS) else ""
    return score_text(first["metric"], values, first["eval_samples"], otherwise=few)


def way_difference(ways: dict[str, pd.DataFrame], way: str, rival: str) -> Difference | None:
    """A way's scores minus a rival's, where seed and recipe are the same; None for no pair.

    Converted networks are compared with what they were before, and with no other rival.
    """
    seeds, others = ways[way], ways[rival]
    if not len(seeds) or way == rival:
        return None
    metric = seeds["metric"].iloc[0]
    if way == CONVERTED:
        pairs = seeds if rival == SMOOTH else seeds[:0]
        return difference_of(pairs["value"], pairs["before"], metric, pairs["eval_samples"])
    if "recipe" not in seeds or not len(others):
        return None
    pairs = paired(seeds, others[["benchmark", "seed", "recipe", "value"]])
    return difference_of(pairs["value"], pairs["value_base"], metric, pairs["eval_samples"])


def _benchmark(ways: dict[str, pd.DataFrame], notes: Notes) -> str:
    trained = _trained(ways)
    return trained["benchmark"].iloc[0] + marked(trained, notes)


def _trained(ways: dict[str, pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([seeds for way, seeds in ways.items() if way != CONVERTED and len(seeds)])


def _cell(way: str) -> Column:
    return Column(way, lambda ways, notes: way_text(ways[way]) if len(ways[way]) else NONE)


def _columns(data: ReportData) -> tuple[Column, ...]:
    def paper(ways: dict[str, pd.DataFrame], notes: Notes) -> str:
        name = _trained(ways)["benchmark"].iloc[0]
        gelu = data.paper.text(name, "gelu", "as_is")
        first = gelu if gelu != NONE else data.paper.text(name, "gelu", "best_validation_score").partition(" ")[0]
        swapped = data.paper.text(name, "gelu", "substituted")
        texts = [first, swapped, data.paper.text(name, "lambda_gelu-uniform-hardened", "substituted")]
        return NONE if set(texts) == {NONE} else listed(texts)

    there = data.paper.has(expected_benchmarks(data.part("")), "substituted")
    beside = (Column("Paper: GELU, swapped, hardened and swapped", paper),) if there else ()
    return (Column("Benchmark", _benchmark), *map(_cell, (SMOOTH, *WAYS)), *beside)


RESULTS = TableSpec(
    title="Every way to a ReLU network, score in the last epoch",
    caption=lambda data: (
        f"{metrics_in_words(data.part(''))} The columns behind the smooth network are networks with ReLU alone. Mean ± "
        f"sample standard deviation over three seeds; fewer are counted in brackets. {ONE_SEED} “{CONVERTED}”: the "
        "linear maps behind the gates are refitted on unlabelled rows. "
        f"{NONE}: not measured, or not in the paper. The paper's scores are of its best epochs."
    ),
    rows=lambda data: (((), ways) for ways in trained_here(data).values()),
    head=(),
    columns=_columns,
    text_columns=1,
)


# The ways told apart: each minus the smooth network and minus its rivals, seed by seed

_RIVALS = {"GELU, smooth": SMOOTH, "ReLU from the start": FROM_START, "swapped early": EARLY}
"""{heading: the way that is taken away}."""


Ways = dict[str, pd.DataFrame]


def _different_rows(data: ReportData) -> Iterator[Group]:
    for benchmark in dict.fromkeys(data.part("")["benchmark"]):
        ways = results_of(data, benchmark)
        learned = of_label(profile_runs(data), benchmark)
        for label in LEARNED_LABELS:
            if label in learned:
                ways[f"{label}, smooth"] = learned[label].assign(value=learned[label]["last_score"])
        for way, seeds in ways.items():
            if way != SMOOTH and len(seeds):
                yield (benchmark, way), (way, ways)


def _minus(heading: str, rival: str) -> Column:
    def cell(row: tuple[str, Ways], notes: Notes) -> str:
        way, ways = row
        difference = way_difference(ways, way, rival)
        return NONE if difference is None else str(difference)

    return Column(f"Minus {heading}", cell)


def _seeds_of(row: tuple[str, Ways]) -> pd.DataFrame:
    way, ways = row
    return ways[way]


def _trained_on(row: tuple[str, Ways], notes: Notes) -> str:
    return trained_on(_seeds_of(row), notes) if "record" in _seeds_of(row) else NONE


DIFFERENCE_TABLE = TableSpec(
    title="Which differences are more than chance, last epoch",
    caption=lambda data: (
        f"{metrics_in_words(data.part(''))} Each way's score minus that of the run with the same seed and recipe that "
        f"the heading names, mean over the seeds; of converted networks minus what they were before. {INTERVAL}"
    ),
    rows=_different_rows,
    head=("Benchmark", "Way"),
    columns=(
        *(_minus(heading, rival) for heading, rival in _RIVALS.items()),
        Column("Seeds", lambda row, notes: seed_count(_seeds_of(row)["seed"])),
        Column("Epochs × samples", _trained_on),
    ),
)


# Gain beside price: what each road keeps of the score, and what the ReLU network's int8 form costs

SHORT_NAMES = {
    "mlp-adult": "MLP, Adult",
    "mlp-fmnist": "MLP, Fashion-MNIST",
    "resnet18-cifar10": "ResNet-18, CIFAR-10",
    "resnet18-cifar100": "ResNet-18, CIFAR-100",
    "deit-tiny-imagenet": "DeiT-Tiny, Tiny ImageNet",
    "gpt2-wikitext2": "GPT-2 4 × 128, WikiText-2",
    "minilm": "MiniLM-L6",
    "reactions": "rxnfp classifier",
    "smollm2": "SmolLM2-135M",
    "whisper": "Whisper tiny.en",
}
_MEASURES = {SAME_NEIGHBOUR: "same nearest neighbour", "word_error_rate": "share of words wrong"}
_PRICED_BATCH = 64  # of the benchmarks: rows a call


def _road_rows(data: ReportData) -> Iterator[Group]:
    elsewhere = {name: results_from_elsewhere(data, name) for name in of_measurement(data, "real")}
    for name, ways in (trained_here(data) | elsewhere).items():
        yield (SHORT_NAMES.get(name, name),), ways | {"int8": _int8_time(data, name)}
    for name in dict.fromkeys(data.part("pretrained")["benchmark"]):
        yield (f"{SHORT_NAMES.get(name, name)}, fine-tuned",), tuned_ways(data, name)


def _int8_time(data: ReportData, name: str) -> pd.DataFrame:
    """Time of the ReLU network's int8 form over the smooth network's, by seed: hardened, or converted, by width."""
    elsewhere, trained = of_measurement(data, "real").get(name), of_measurement(data, "int8").get(name)
    if elsewhere is not None:
        frame = elsewhere[(elsewhere["precision"] != "float32") & elsewhere["score"].notna()]
        smooth, relu, time = frame[frame["method"] == "original"], frame[frame["method"] == "converted"], "call_ms"
    elif trained is not None:
        frame = trained[(trained["precision"] == "int8-all") & (trained["batch_size"] == _PRICED_BATCH)].assign(width=1)
        smooth, relu, time = frame[frame["model"] == "gelu"], frame[frame["model"] == "hardened_relu"], "median_ms"
    else:
        return pd.DataFrame(columns=["width"])
    pairs = relu.merge(smooth, on="seed", suffixes=("", "_smooth"))
    return pairs.assign(value=pairs[time] / pairs[f"{time}_smooth"])


def _measure(ways: dict[str, pd.DataFrame], notes: Notes) -> str:
    metric = next(seeds["metric"].iloc[0] for seeds in ways.values() if len(seeds))  # of some way there are runs
    return metric_with_direction(_MEASURES.get(metric, metric), metric not in LOWER_IS_BETTER)


def _road_cell(heading: str, *ways: str) -> Column:
    def cell(found: dict[str, pd.DataFrame], notes: Notes) -> str:
        seeds = next((found[way] for way in ways if way in found and len(found[way])), None)
        if seeds is None:
            return NONE
        width = seeds["width"].iloc[0] if "width" in seeds else None
        return _of_width(seeds, digits_of(seeds["metric"].iloc[0]), width or 1)

    return Column(heading, cell)


def _of_width(seeds: pd.DataFrame, digits: int, width: float) -> str:
    return number(statistics.fmean(seeds["value"]), digits) + (f" ({width:g} ×)" if width > 1 else "")


def _int8_cell(found: dict[str, pd.DataFrame], notes: Notes) -> str:
    widths = found["int8"].groupby("width") if "int8" in found else ()
    return "; ".join(_of_width(seeds, 2, width) for width, seeds in widths) or NONE


ROADS = TableSpec(
    title="What each road keeps, and what it costs",
    caption="Scores of the smooth network and of its ReLU networks, the mean over the seeds. “2 ×”: with twice the "
    "hidden units. “int8 time”: that of the hardened network, else the converted one, divided by the smooth "
    "network's.",
    rows=_road_rows,
    head=("Network",),
    columns=(
        Column("Measure", _measure),
        _road_cell("Smooth", SMOOTH),
        _road_cell("ReLU swapped in", DIRECT),
        _road_cell("Converted", OWN_SHAPE, CONVERTED),
        _road_cell("Converted, wider", WIDER),
        _road_cell("Hardened", HARD),
        Column("int8 time", _int8_cell),
    ),
)


# The picture


HERO = {
    "resnet18-cifar10": "ResNet-18 on CIFAR-10",
    "gpt2-wikitext2": "Small GPT-2 on WikiText-2",
    "mlp-adult": "MLP on Adult",
}
"""{benchmark: its panel's title}; the first two that are there get a panel."""

_HERO_WAYS = {
    DIRECT: ("ReLU swapped in as it is", PALETTE["plain swap"]),
    CONVERTED: ("converted, no training", PALETTE["converted"]),
    HARD: ("hardened, then swapped", PALETTE["hardened, swapped"]),
    EARLY: ("swapped early, trained on", PALETTE["swapped early"]),
    FROM_START: ("ReLU from the start", PALETTE["ReLU"]),
}


def draw_path(data: ReportData) -> "Figure | None":
    """The picture that the README opens with: a panel a network, a bar a way, from the smooth network's line on.

    A bar reaches to the mean over the seeds, thin lines from the lowest to the highest, of one seed over the 95 %
    interval of its evaluation samples. ± is half of the difference's interval. The bar of the swap leaves the panel.
    """
    results = ((title, results_of(data, benchmark)) for benchmark, title in HERO.items())
    found = [(title, ways) for title, ways in results if len(ways[SMOOTH])][:2]
    if not found:
        return None
    figure = new_figure(1.8 + 4.2 * len(found), 3.7)
    axes = list(figure.subplots(1, len(found), squeeze=False, sharey=True).flat)
    for axis, (title, ways) in zip(axes, found, strict=True):
        _draw_hero(axis, title, ways)
    names = [text for text, _ in reversed(_HERO_WAYS.values())]
    axes[0].set_yticks(range(len(names)), names)
    head(figure, "From a smooth network to a ReLU network: what each way costs", fontsize=13, fontweight="bold")
    return figure


def _draw_hero(axis: "Axes", title: str, ways: dict[str, pd.DataFrame]) -> None:
    smooth, first = statistics.fmean(ways[SMOOTH]["value"]), ways[SMOOTH].iloc[0]
    greater, shown = first["metric"] not in LOWER_IS_BETTER, [smooth]
    for height, (way, (_, colour)) in enumerate(reversed(_HERO_WAYS.items())):
        seeds, text = list(ways[way]["value"]), MISSING
        if seeds:
            mean = statistics.fmean(seeds)
            text = _hero_text(mean, smooth, first["metric"], way_difference(ways, way, SMOOTH))
            axis.barh(height, mean - smooth, left=smooth, height=0.56, color=colour)
            ends = sampled(first["metric"], seeds, ways[way]["eval_samples"].iloc[0]) or (min(seeds), max(seeds))
            axis.plot(ends, (height, height), color=PALETTE["GELU"], linewidth=1.2, zorder=4)
            shown += ends if way != DIRECT else ()
        look = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": 10, "color": colour}
        axis.text(1.03, height, text, **look)
    axis.axvline(smooth, color=PALETTE["GELU"], linewidth=2, zorder=3)
    if len(shown) > 1:  # the swap would leave no room for the others
        margin = 0.15 * (max(shown) - min(shown))
        axis.set_xlim(min(shown) - margin, max(shown) + margin)
    axis.annotate(
        f"smooth GELU {number(smooth, 3 if greater else 1)}", (smooth, 1), xycoords=("data", "axes fraction"),
        xytext=(0, 3), textcoords="offset points", ha="right" if greater else "left", va="bottom", fontsize=10,
    )  # fmt: skip
    style(axis, x=f"{first['metric']} ({'higher' if greater else 'lower'} is better)")
    axis.set_title(plain(title), fontsize=11, loc="left", pad=20, fontweight="bold")
    axis.grid(visible=False, axis="y")
    axis.set_ylim(-0.55, len(_HERO_WAYS) - 0.45)


def _hero_text(mean: float, smooth: float, metric: str, difference: Difference | None) -> str:
    """ "0.811 (−4.4 ± 2.1 points)", or of a perplexity its change in per cent; ± half of the difference's interval."""
    share = metric == "accuracy"
    scale = 100 if share else 100 / smooth
    text = number((mean - smooth) * scale, 1, signed=True)
    if difference is not None and difference.ends:
        text += f" ± {number((difference.ends[1] - difference.ends[0]) / 2 * scale, 1)}"
    return f"{number(mean, 3 if share else 1)} ({text} {'points' if share else '%'})"
