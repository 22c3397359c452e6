"""What is drawn, read back from the figures; that a saved picture is whole is asked of the committed ones."""

import math

import pytest
from lgelu_lab.measurements.int8 import INT8_COLUMNS
from lgelu_lab.report.drawing import PALETTE
from lgelu_lab.report.frames import of_measurement
from lgelu_lab.report.measured_figures import MEASURED_FIGURES, pruned_points
from lgelu_lab.report.numbers import wilson
from lgelu_lab.report.results import results_of
from lgelu_lab.report.run_figures import distances
from matplotlib.colors import to_rgb
from matplotlib.text import Text

SOFT = [{"a": 1.5, "b": 1.2}, {"a": 1.4, "b": 1.6}, {"a": 1.7, "b": 1.5}]
HARD = [{"a": 2.0, "b": 1.5}, {"a": 70.0, "b": 70.0}, {"a": 160.0, "b": 160.0}]


def learned(record_of, mode="uniform", **fields):
    return record_of(activation="lambda_gelu", init_mode=mode, hardness=SOFT, **fields)


def luminance(colour):
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), channels, strict=True))


@pytest.mark.parametrize("name", PALETTE)
def test_a_line_of_every_colour_is_seen_on_white(name):
    assert 1.05 / (luminance(PALETTE[name]) + 0.05) >= 3  # WCAG's contrast of graphical objects


def test_networks_that_stand_together_have_colours_of_their_own():
    for names in (("GELU", "ReLU", "λ-GELU uniform", "λ-GELU increasing", "λ-GELU decreasing"),
                  ("GELU", "ReLU", "λ-GELU as learned", "λ-GELU hardened", "hardened, swapped"),
                  ("direct swap", "converted", "hardened, swapped", "ReLU", "GELU")):  # fmt: skip
        assert len({PALETTE[name] for name in names}) == len(names)


def test_axes_have_units_and_say_when_lower_is_better(record_of, drawings_of):
    perplexity = {"metric": "perplexity", "greater_is_better": False, "benchmark": "gpt2-wikitext2"}
    runs = [record_of(scores=(90.0, 30.0, 31.0), relu_scores=(99.0, 95.0, 92.0), **perplexity)]
    assert drawings_of("trajectories", runs)[0].figure.axes[0].get_ylabel() == "perplexity (lower is better)"
    drawing = drawings_of("substitution", runs)[0]
    assert [axis.get_xlabel() for axis in drawing.figure.axes] == ["perplexity (lower is better)"] * 2
    assert drawing.figure.axes[0].get_xscale() == "log"  # 30 to 95
    assert "Further left is better" in drawing.caption
    assert "further left is better" in drawings_of("glance", runs)[0].figure.axes[0].get_xlabel()


def test_trajectories_show_each_seed_and_the_mean(record_of, drawings_of):
    low, high = (0.2, 0.4, 0.6), (0.4, 0.8, 0.8)
    runs = [record_of(seed=seed, scores=scores) for seed, scores in enumerate((low, high))]
    axis = drawings_of("trajectories", runs)[0].figure.axes[0]
    paths = [list(line.get_ydata()) for line in axis.lines]
    assert [pytest.approx(path) for path in paths] == [list(low), list(high), [0.3, 0.6, 0.7]]


@pytest.mark.parametrize(
    ("seeds", "words"),
    [([[0], [0]], "1 seed"), ([[0], [42], [0]], "1 seed (0 or 42)"), ([[0, 1], [1, 0]], "2 seeds"),
     ([[0, 1], [2, 3]], "2 seeds (0, 1 or 2, 3)"), ([[0, 1, 2], [42]], "1 to 3 seeds")],
)  # fmt: skip
def test_a_picture_says_of_which_seeds_its_configurations_are(seeds, words, record_of, drawings_of):
    runs = [
        learned(record_of, mode, seed=seed, name=f"{mode}-{seed}")
        for mode, given in zip(("uniform", "increasing", "decreasing"), seeds, strict=False)
        for seed in given
    ]
    (drawing,) = drawings_of("trajectories", runs)
    assert drawing.figure.axes[0].get_title(loc="left").endswith(f": validation score, {words}")


def test_configurations_without_runs_are_named_missing_and_have_no_line_in_the_legend(record_of, drawings_of):
    (drawing,) = drawings_of("trajectories", [record_of()])
    (legend,) = drawing.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["GELU"]
    assert drawing.note == "Missing: ReLU, λ-GELU uniform, λ-GELU increasing, λ-GELU decreasing."


def test_an_undefined_correlation_is_a_gap(record_of, drawings_of):
    runs = [learned(record_of, "uniform"), learned(record_of, "increasing")]  # both begin with equal λ
    *_, axis = drawings_of("trajectories", runs)[0].figure.axes
    line = axis.lines[0]
    assert list(line.get_xdata()) == [0, 1, 2, 3]
    assert [math.isnan(value) for value in line.get_ydata()] == [True, False, False, False]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["uniform and increasing"]


def test_a_run_before_its_gates_are_hard_or_before_the_switch_is_hollow(record_of, drawings_of, relufied):
    soft = record_of(activation="lambda_gelu", harden=True, hardness=HARD)  # best epoch 2, λ = 70 < 79.8
    early = relufied(scores=(0.9, 0.8, 0.7))  # best epoch 1, before the switch
    best, last = drawings_of("substitution", [soft, early])[0].figure.axes
    hollow = [line for line in best.lines if line.get_markerfacecolor() == "white"]
    assert len(hollow) == 4
    assert not [line for line in last.lines if line.get_markerfacecolor() == "white"]
    squares = [line for line in last.lines if line.get_marker() == "s"]
    assert [list(line.get_xdata()) for line in squares] == [[0.7]]
    missing = [text.get_text() for text in last.texts]
    assert missing == ["missing"]  # GELU


def test_distances_are_paired_by_seed(record_of, data_of):
    runs = [
        record_of(seed=0, scores=(0.1, 0.1, 0.80), relu_scores=(0.1, 0.1, 0.70)),
        record_of(seed=1, scores=(0.1, 0.1, 0.60), relu_scores=(0.1, 0.1, 0.58)),
        record_of(seed=1, activation="relu", scores=(0.1, 0.1, 0.65), relu_scores=(None,) * 3),
        record_of(seed=2, activation="relu", scores=(0.1, 0.1, 0.99), relu_scores=(None,) * 3),
    ]
    other = record_of(seed=0, activation="relu", scores=(0.1, 0.1, 0.9), relu_scores=(None,) * 3)
    other.config["learning_rate"] = 0.1
    found = distances(results_of(data_of([*runs, other]), "mlp-adult"))
    assert found["GELU, then swapped"] == pytest.approx((-6, -10, -2))
    mean, low, high = found["ReLU from the start"]
    assert mean == pytest.approx(5)
    assert (low, high) == pytest.approx([100 * (end - 0.6) for end in wilson(0.65, 50)]), (
        "one seed: its samples' interval"
    )
    assert found.keys() == {"GELU, then swapped", "ReLU from the start"}


def test_converted_networks_lie_from_what_they_were(record_of, measurement_of, data_of):
    refits = [converted("refit", score, 64) | {"original_score": 0.9} for score in (0.88, 0.91)]
    measured = [
        measurement_of("conversion", [row], benchmark="mlp-adult", seed=seed) for seed, row in enumerate(refits)
    ]
    found = distances(results_of(data_of([record_of()], measured), "mlp-adult"))
    assert found["Converted, no training"] == pytest.approx((-0.5, -2, 1))


def test_perplexity_is_compared_in_per_cent(record_of, data_of):
    fields = {"metric": "perplexity", "greater_is_better": False}
    runs = [record_of(scores=(90.0, 50.0, 40.0), relu_scores=(99.0, 95.0, 50.0), **fields)]
    assert distances(results_of(data_of(runs), "mlp-adult"))["GELU, then swapped"] == pytest.approx((25, 25, 25))


def test_related_activations_without_runs_are_missing_not_zero(record_of, drawings_of):
    axis = drawings_of("related", [record_of(), record_of(activation="silu")])[0].figure.axes[0]
    assert [text.get_text() for text in axis.texts] == ["missing"] * 7
    assert drawings_of("related", [record_of(), record_of(activation="relu")]) == []


def test_one_panel_has_a_title_that_is_not_cut_off(record_of, drawings_of):
    (drawing,) = drawings_of("hardness", [learned(record_of, benchmark="deit-tiny-imagenet")])
    drawing.figure.canvas.draw()
    box, width = drawing.figure._suptitle.get_window_extent(), drawing.figure.canvas.get_width_height()[0]
    assert 0 < box.x0 < box.x1 < width
    assert "mean" not in drawing.figure._suptitle.get_text(), "of one seed there is no mean"
    assert drawing.note == "Missing: λ-GELU increasing, λ-GELU decreasing."


def test_captions_speak_of_what_is_drawn(record_of, drawings_of):
    (one,) = drawings_of("trajectories", [record_of()])
    assert one.caption == "One seed a line."
    runs = [learned(record_of, mode, seed=seed) for mode in ("uniform", "increasing") for seed in (0, 1)]
    (two,) = drawings_of("trajectories", runs)
    assert "thin lines the seeds" in two.caption
    assert "Spearman" in two.caption
    assert "second half" not in two.caption
    long = record_of(scores=(0.5,) * 9, relu_scores=(0.5,) * 9)
    assert "second half" in drawings_of("trajectories", [long])[0].caption


def test_nothing_to_draw_is_no_empty_figure(record_of, drawings_of):
    relu = [record_of(activation="relu", relu_scores=(None,) * 3)]
    assert [drawings_of(key, relu) for key in ("hardness", "substitution", "glance", "grid", "path")] == [[]] * 5


def test_the_heatmap_writes_gains_and_names_what_is_missing(record_of, drawings_of):
    runs = [record_of(seed=seed, benchmark="mlp-fmnist", name=f"grid/{seed}") for seed in range(3)]
    for c in (1.0, 9.0):
        for seed in range(3):
            run = learned(record_of, seed=seed, benchmark="mlp-fmnist", name=f"grid/{c}-{seed}", scores=(0.5, 0.6, 1.0))
            run.config.update(temperature=0.1, hardness_lr_multiplier=c)
            runs.append(run)
    (drawing,) = drawings_of("grid", runs)
    axis, _ = drawing.figure.axes
    assert sorted(text.get_text() for text in axis.texts) == ["+0.1000\n3 of 9 runs"] * 2 + ["missing"] * 14
    assert len([patch for patch in axis.patches if patch.get_hatch()]) == 14
    assert "Hatched cells have no run yet." in drawing.caption


def test_the_main_picture_reaches_from_the_smooth_line_to_each_networks_score(record_of, measurement_of, drawings_of):
    adult = [record_of(scores=(0.5, 0.5, 0.85), relu_scores=(0.5, 0.5, 0.80), seed=seed) for seed in (0, 1)] + [
        record_of(
            activation="lambda_gelu", harden=True, hardness=HARD, scores=(0.1, 0.1, 0.9), relu_scores=(0.1, 0.1, 0.9)
        )
    ]
    refit = converted("refit", 0.84, 64) | {"original_score": 0.85}
    (drawing,) = drawings_of("path", adult, [measurement_of("conversion", [refit], benchmark="mlp-adult")])
    (axis,) = drawing.figure.axes
    bars = [(bar.get_x(), bar.get_width()) for bar in axis.patches]  # from the bottom: no ReLU, hardened, refit, direct
    assert [start for start, _ in bars] == pytest.approx([0.85] * 3)
    assert [width for _, width in bars] == pytest.approx([0.05, -0.01, -0.05])
    texts = [text.get_text() for text in axis.texts]
    assert {"0.800 (−5.0 ± 0.0 points)", "0.840 (−1.0 points)", "smooth GELU 0.850"} < set(texts)
    assert "missing" in "".join(texts)


# Measurements


def timed(model, precision, median, size=64, score=0.9):
    times = {"median_ms": median, "quartile1_ms": 0.9 * median, "quartile3_ms": 1.1 * median, "batch_size": size}
    row = dict.fromkeys(INT8_COLUMNS, 0) | times
    return row | {"model": model, "precision": precision, "metric": "accuracy", "score": score}


def verified(model, epsilon, proved, refuted, refusal=None):
    row = {"model": model, "epsilon": epsilon, "refusal": refusal, "points": 20, "proved": proved, "refuted": refuted}
    row |= dict.fromkeys(("proved_by_bounds", "refuted_by_attack", "unknown", "unconfirmed"), 0)
    left = None if refusal else 20 - proved - refuted
    return row | {"timeout": left, "median_seconds": 0.1, "max_seconds": 0.2}


def pruned(model, criterion, fraction=None, widths="8-6", parameters=500, refusal=None):
    row = {"model": model, "criterion": criterion, "fraction": fraction, "refusal": refusal}
    row |= {"rule": None if fraction is None else "fraction", "parameters_before": 1000, "score_before": 0.9}
    made = {"widths": widths, "parameters": parameters, "score_pruned": 0.5, "score_finetuned": 0.75}
    made |= {"calibration_max_logit_change": 8e-6, "eval_max_logit_change": 8e-6}
    return row | (dict.fromkeys(made) if refusal else made)


def piece(model, step, error, inside=None):
    row = {"model": model, "perturbation": step, "refusal": None if inside is not None else "smooth", "inside": inside}
    row |= {"points": 10, "distinct_regions": 9, "seconds": 1.0, "max_error_float32": 0.1, "max_error_everywhere": 0.1}
    return row | {"max_error_float64": error}


def zeros(model, layer, share, gate):
    row = {"model": model, "layer": layer, "gate": gate, "off_fraction": share, "apoz": share, "units": 8, "values": 9}
    return row | {"near_zero_fraction": share, "mean_absolute": 1.0, "dead_units": 0, "never_on_units": 0}


def converted(method, score, rows=None, model="gelu"):
    row = {"model": model, "method": method, "rows": rows, "score": score, "original_score": 0.9, "refusal": None}
    return row | {"metric": "accuracy", "kl": 0.1, "agreement": 0.5, "max_logit_change": 1.0, "seconds": 2.0}


def tuned(start, steps, rate, score):
    row = {"model": "gelu", "start": start, "steps": steps, "learning_rate": rate, "score": score}
    return row | {"metric": "accuracy", "rows": None, "seconds": 1.0, "refusal": None}


ROWS = {
    "int8": [
        timed(m, p, t) for m, s in (("gelu", 2), ("hardened_relu", 1)) for p, t in (("float32", 3), ("int8-all", s))
    ],
    "verification": [verified("gelu", None, None, None, "no Gelu"), verified("hardened_relu", 0.01, 15, 2)],
    "zeros": [zeros("gelu", "a", 0.5, "gelu"), zeros("relu", "a", 0.25, "relu"), zeros("relu", "b", 0.75, "relu")],
    "pruning": [
        *(pruned("gelu", "none", widths="8-8", parameters=1000), pruned("gelu", "dead", refusal="smooth")),
        *(pruned("hardened_relu", "none", widths="8-8", parameters=1000), pruned("hardened_relu", "dead")),
        *(pruned("hardened_relu", "apoz", share, parameters=1000 - 1000 * share) for share in (0.25, 0.5)),
    ],
    "linear_pieces": [
        *(piece("gelu", 0.01, 1e-4), piece("gelu", 1.0, 0.5)),
        *(piece("hardened_relu", 0.01, 1e-14, 0.75), piece("hardened_relu", 1.0, None, 0.0)),
    ],
    "conversion": [
        *(converted("original", 0.9), converted("direct", 0.5), converted("bias-fold", 0.88, 1438)),
        *(converted("refit", 0.87, 64), converted("refit", 0.89, 1438)),
        converted("hardened", 0.91, model="hardened_relu"),
    ],
    "conversion-finetuning": [
        *(tuned("direct", 0, None, 0.5), tuned("refit", 0, None, 0.89), tuned("gelu", 0, None, 0.9)),
        *(
            tuned(start, 100, rate, score + rate)
            for rate in (0.05, 0.005)
            for start, score in {"direct": 0.86, "refit": 0.87, "anneal": 0.88, "gelu": 0.89}.items()
        ),
    ],
}


@pytest.fixture
def measurements(measurement_of):
    return [measurement_of(name, rows, models={}) for name, rows in ROWS.items()]


@pytest.mark.parametrize("key", MEASURED_FIGURES)
def test_there_is_a_panel_per_benchmark_and_nothing_where_nothing_was_measured(measurements, key, drawings_of):
    name = {"downstream-linear-pieces": "linear_pieces"}.get(key, key.removeprefix("downstream-"))
    (drawing,) = drawings_of(key, measurements=measurements)
    assert [axis.get_title(loc="left") for axis in drawing.figure.axes] == ["mlp-digits"]
    assert len([text for text in drawing.figure.findobj(Text) if text.get_text()]) >= 5
    assert drawings_of(key, measurements=[record for record in measurements if record.measurement != name]) == []


def test_legends_name_what_is_there(measurements, record_of, drawings_of):
    def entries(drawing):
        return [text.get_text() for text in drawing.figure.legends[0].get_texts()]

    assert entries(drawings_of("downstream-int8", measurements=measurements)[0]) == ["float32", "int8"]
    glance = drawings_of("glance", [record_of()])[0]
    assert entries(glance) == ["GELU, then swapped"]
    assert glance.note.startswith("Missing or not comparable. mlp-adult: Converted, no training; λ-GELU hardened, sw")
    assert not glance.figure.axes[0].texts  # beside the points it would take their room
    (drawing,) = drawings_of("substitution", [record_of()])
    assert entries(drawing) == ["as trained", "ReLU substituted, same weights"]


def test_bars_of_proofs_add_up_to_the_images(measurements, drawings_of):
    (axis,) = drawings_of("downstream-verification", measurements=measurements)[0].figure.axes
    assert [bar.get_width() for bar in axis.patches] == [15, 2, 3]
    assert " GELU: refused" in [text.get_text() for text in axis.texts]


def test_latencies_are_means_over_seeds_at_the_largest_batch(measurement_of, drawings_of):
    rows = [[timed("gelu", "float32", time), timed("gelu", "float32", 100 * time, size=1)] for time in (2.0, 4.0)]
    records = [measurement_of("int8", row, seed=seed) for seed, row in enumerate(rows)]
    (axis,) = drawings_of("downstream-int8", measurements=records)[0].figure.axes
    assert [bar.get_width() for bar in axis.patches] == [3.0]
    assert axis.get_xlabel() == "ms per batch of 64"


def test_an_exact_piece_ends_where_no_step_stays_inside(measurements, drawings_of):
    (axis,) = drawings_of("downstream-linear-pieces", measurements=measurements)[0].figure.axes
    paths = [list(line.get_ydata()) for line in axis.lines]
    assert paths[0] == [1e-4, 0.5]
    assert paths[1][0] == 1e-14
    assert math.isnan(paths[1][1])


def test_the_refit_is_a_point_per_number_of_rows_between_lines(measurement_of, drawings_of):
    seeds = [ROWS["conversion"], [row | {"score": row["score"] - 0.02} for row in ROWS["conversion"]]]
    records = [measurement_of("conversion", rows, seed=seed, models={}) for seed, rows in enumerate(seeds)]
    (axis,) = drawings_of("downstream-conversion", measurements=records)[0].figure.axes
    (refit,) = axis.containers
    assert list(refit.lines[0].get_ydata()) == pytest.approx([0.86, 0.88])
    ((first, _),) = [bars.get_segments() for bars in refit.lines[2]]
    spread = math.sqrt(2) * 0.01  # of two seeds 0.02 apart
    assert [y for _, y in first] == pytest.approx([0.86 - spread, 0.86 + spread])
    assert [label.get_text() for label in axis.get_xticklabels()] == ["64", "1,438"]
    heights = {
        line.get_ydata()[0] for line in axis.lines if len(set(line.get_ydata())) == 1 and len(line.get_ydata()) == 2
    }
    assert sorted(heights) == pytest.approx([0.49, 0.87, 0.89, 0.9])
    low, high = axis.get_ylim()
    assert 0.49 < low < 0.845
    assert 0.9 < high < 0.95
    assert [text.get_text() for text in axis.texts] == ["direct swap 0.4900 ↓"]


def test_rungs_are_marks_beside_the_refit_on_the_most_rows(measurement_of, drawings_of):
    def drawn(*rungs):
        rows = [*ROWS["conversion"], *rungs]
        return drawings_of("downstream-conversion", measurements=[measurement_of("conversion", rows, models={})])[0]

    before, after = drawn(), drawn(converted("place", 0.895, 1438), converted("distill", 0.92, 1438))
    (axis,) = after.figure.axes
    refit, *rungs = axis.containers
    assert list(refit.lines[0].get_xdata()) == [0, 1]
    marks = [(rung.lines[0].get_xdata()[0], rung.lines[0].get_ydata()[0]) for rung in rungs]
    assert marks == [pytest.approx((1.12, 0.895)), pytest.approx((1.24, 0.92))]
    assert axis.get_ylim()[1] > 0.92
    texts = [text.get_text() for text in after.figure.legends[0].get_texts()]
    assert texts[:3] == ["refit", "place", "distill"]
    said = "Beside the point of the most rows, on these: the rungs above the refit. "
    assert after.caption.replace(said, "") == before.caption
    assert said in after.caption
    (alone,) = drawings_of(
        "downstream-conversion",
        measurements=[measurement_of("conversion", [*ROWS["conversion"][:2], converted("blocks", 0.8, 64)], models={})],
    )[0].figure.axes
    assert [label.get_text() for label in alone.get_xticklabels()] == ["64"]


def test_every_run_of_the_steps_is_a_point_at_its_learning_rate(measurement_of, drawings_of):
    records = [measurement_of("conversion-finetuning", ROWS["conversion-finetuning"], models={})]
    (axis,) = drawings_of("downstream-conversion-finetuning", measurements=records)[0].figure.axes
    found = [list(container.lines[0].get_ydata()) for container in axis.containers]
    expected = [[0.5, 0.91], [0.5, 0.865], [0.89, 0.92], [0.89, 0.875], [0.93], [0.885], [0.9, 0.94], [0.9, 0.895]]
    assert found == [pytest.approx(scores) for scores in expected]
    marks = [container.lines[0].get_markerfacecolor() for container in axis.containers]
    assert [mark == "white" for mark in marks] == [False, True] * 4
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0", "100"]
    assert [text.get_text() for text in axis.texts] == ["direct swap 0.5000 ↓"]


def test_pruned_points_are_means_of_the_seeds_that_were_pruned(measurement_of, data_of):
    first = [pruned("relu", "apoz", 0.5, parameters=400), pruned("relu", "apoz", 0.25, parameters=800)]
    second = [pruned("relu", "apoz", 0.5, parameters=600), pruned("relu", "apoz", 0.25, refusal="none")]
    records = [measurement_of("pruning", rows, seed=seed) for seed, rows in enumerate((first, second))]
    rows = of_measurement(data_of(measurements=records), "pruning")["mlp-digits"]
    assert pruned_points(rows, "relu", "apoz") == [(80.0, 0.5, 0.75), (50.0, 0.5, 0.75)]
    assert pruned_points(rows, "gelu", "apoz") == []
