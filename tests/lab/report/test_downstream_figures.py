import math

import numpy as np
import pytest
from lgelu_lab.measurements.int8 import INT8_COLUMNS
from lgelu_lab.report.downstream.figures.conversion import draw_conversion_scores
from lgelu_lab.report.downstream.figures.conversion_finetuning import draw_finetuning
from lgelu_lab.report.downstream.figures.int8 import draw_int8
from lgelu_lab.report.downstream.figures.linear_pieces import draw_linear_pieces
from lgelu_lab.report.downstream.figures.pruning import draw_pruning, pruned_points
from lgelu_lab.report.downstream.figures.verification import draw_verification
from lgelu_lab.report.downstream.figures.zeros import draw_zeros
from lgelu_lab.report.downstream.measurements import rows_by
from lgelu_lab.report.downstream.path.draw import draw_path
from lgelu_lab.report.downstream.path.gains import integers, pieces, proofs, pruning
from matplotlib import image
from matplotlib.text import Text

NAMES = {"mlp-digits": "digits", "mlp-fmnist": "Fashion-MNIST"}
SOFT = [{"a": 1.5, "b": 1.2}] * 3
HARD = [{"a": 2.0, "b": 1.5}, {"a": 70.0, "b": 70.0}, {"a": 160.0, "b": 160.0}]


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
DRAW = {
    "int8": draw_int8, "verification": draw_verification, "zeros": draw_zeros, "pruning": draw_pruning,
    "linear_pieces": draw_linear_pieces, "conversion": draw_conversion_scores,
    "conversion-finetuning": draw_finetuning,
}  # fmt: skip


@pytest.fixture
def measurements(measurement_of):
    return [measurement_of(name, rows, models={}) for name, rows in ROWS.items()]


@pytest.fixture
def runs(record_of):
    fields = {"benchmark": "mlp-digits"}
    found = [record_of(seed=seed, **fields) for seed in range(2)]
    found.append(record_of(activation="lambda_gelu", hardness=SOFT, **fields))
    return [*found, record_of(activation="lambda_gelu", harden=True, hardness=HARD, **fields)]


def texts_of(drawing):
    return [text.get_text() for text in drawing.figure.findobj(Text) if text.get_text()]


def check_picture(drawing, folder):
    png, _ = drawing.save(folder)
    pixels = image.imread(png)[..., :3]
    edges = np.concatenate([pixels[[0, -1], :].reshape(-1, 3), pixels[:, [0, -1]].reshape(-1, 3)])
    assert np.all(edges == 1), "something touches the edge"
    width, height = drawing.figure.canvas.get_width_height()
    drawing.figure.canvas.draw()
    texts = [text for text in drawing.figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert len(texts) > 5
    assert min(text.get_fontsize() for text in texts) >= 9
    for text in (*drawing.figure.texts, *(t for axis in drawing.figure.axes for t in axis.texts)):
        box = text.get_window_extent()
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0, f"{text.get_text()!r} is cut off"


@pytest.mark.parametrize("name", DRAW)
def test_a_figure_is_whole_and_legible(measurements, tmp_path, name):
    drawing = DRAW[name](measurements)
    assert drawing.key == f"downstream-{name.replace('_', '-')}"
    check_picture(drawing, tmp_path)
    assert DRAW[name]([record for record in measurements if record.measurement != name]) is None


def test_bars_of_proofs_add_up_to_the_images(measurements):
    (axis,) = draw_verification(measurements).figure.axes
    assert [bar.get_width() for bar in axis.patches] == [15, 2, 3]
    assert " GELU: refused" in [text.get_text() for text in axis.texts]


def test_latencies_are_means_over_seeds_at_the_largest_batch(measurement_of):
    rows = [[timed("gelu", "float32", time), timed("gelu", "float32", 100 * time, size=1)] for time in (2.0, 4.0)]
    records = [measurement_of("int8", row, seed=seed) for seed, row in enumerate(rows)]
    (axis,) = draw_int8(records).figure.axes
    assert [bar.get_width() for bar in axis.patches] == [3.0]
    assert axis.get_xlabel() == "ms per batch of 64"


def test_an_exact_piece_ends_where_no_step_stays_inside(measurements):
    (axis,) = draw_linear_pieces(measurements).figure.axes
    paths = [list(line.get_ydata()) for line in axis.lines]
    assert paths[0] == [1e-4, 0.5]
    assert paths[1][0] == 1e-14
    assert math.isnan(paths[1][1])


def test_the_refit_is_a_point_per_number_of_rows_between_lines(measurement_of):
    seeds = [ROWS["conversion"], [row | {"score": row["score"] - 0.02} for row in ROWS["conversion"]]]
    records = [measurement_of("conversion", rows, seed=seed, models={}) for seed, rows in enumerate(seeds)]
    (axis,) = draw_conversion_scores(records).figure.axes
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


def test_every_run_of_the_steps_is_a_point_at_its_learning_rate(measurement_of):
    records = [measurement_of("conversion-finetuning", ROWS["conversion-finetuning"], models={})]
    (axis,) = draw_finetuning(records).figure.axes
    found = [list(container.lines[0].get_ydata()) for container in axis.containers]
    expected = [[0.5, 0.91], [0.5, 0.865], [0.89, 0.92], [0.89, 0.875], [0.93], [0.885], [0.9, 0.94], [0.9, 0.895]]
    assert found == [pytest.approx(scores) for scores in expected]
    marks = [container.lines[0].get_markerfacecolor() for container in axis.containers]
    assert [mark == "white" for mark in marks] == [False, True] * 4
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0", "100"]
    assert [text.get_text() for text in axis.texts] == ["direct swap 0.5000 ↓"]


def test_pruned_points_are_means_of_the_seeds_that_were_pruned(measurement_of):
    first = [pruned("relu", "apoz", 0.5, parameters=400), pruned("relu", "apoz", 0.25, parameters=800)]
    second = [pruned("relu", "apoz", 0.5, parameters=600), pruned("relu", "apoz", 0.25, refusal="none")]
    records = [measurement_of("pruning", rows, seed=seed) for seed, rows in enumerate((first, second))]
    rows = rows_by(records, "model", "criterion", "rule", "fraction")
    assert pruned_points(rows, "relu", "apoz") == [(80.0, 0.5, 0.75), (50.0, 0.5, 0.75)]
    assert pruned_points(rows, "gelu", "apoz") == []


def test_the_path_is_whole_and_legible_and_says_what_is_missing(runs, measurements, tmp_path):
    drawing = draw_path(runs, measurements)
    check_picture(drawing, tmp_path)
    texts = texts_of(drawing)
    assert "85.0 ± 0.0" in texts  # GELU's last epoch, two seeds
    assert texts.count("−15.00, logit 0.75") == 3  # 0.85 → 0.70: both λ-GELU runs have these scores too
    assert "ε = 0.01" in texts
    assert sum(text.strip() == "missing" for text in texts) == 2 + 1 + 1 + 4  # Fashion-MNIST, in every card
    assert "digits 1 to 2 seeds" in drawing.note


def test_without_runs_or_measurements_of_its_networks_there_is_no_path(record_of, measurement_of):
    assert draw_path([record_of()], [measurement_of("int8", ROWS["int8"], benchmark="mlp-adult")]) is None


def test_the_path_without_measurements_has_no_number_of_them(runs):
    texts = texts_of(draw_path(runs, []))
    assert sum(text.strip() == "missing" for text in texts) == 2 + 1 + 1 + 8
    assert any("GELU: missing" in text for text in texts)
    assert any("move by (missing)" in text for text in texts)
    assert not [text for text in texts if "ms" in text.split() or "1,024" in text]


def test_the_cards_of_the_path_by_hand(measurements):
    lines = {make: make(measurements, NAMES).groups for make in (integers, proofs, pruning, pieces)}
    assert all(groups["Fashion-MNIST"] == [] for groups in lines.values())
    gelu, hard = lines[integers]["digits"]
    assert (gelu.pieces[0][0], gelu.text) == (pytest.approx(2 / 3), "2.00 ms, 90.0 %")
    assert (hard.pieces[0][0], hard.outline) == (pytest.approx(1 / 3), 1.0)
    (bar,) = lines[proofs]["digits"]
    assert [length for length, _ in bar.pieces] == [15, 2, 3]
    assert [bar.text for bar in lines[pruning]["digits"]] == ["0 of 16", "2 of 16"]
    assert "8e−6" in pruning(measurements, NAMES).says
    assert [(bar.pieces[0][0], bar.text) for bar in lines[pieces]["digits"]] == [
        *((pytest.approx(12), "1e−4"), (pytest.approx(2), "1e−14")),
    ]
