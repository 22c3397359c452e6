import math

import numpy as np
import pytest
from matplotlib import image
from matplotlib.text import Text

from hf_lgelu.downstream.int8 import INT8_COLUMNS
from hf_lgelu.report.downstream.figures.int8 import draw_int8
from hf_lgelu.report.downstream.figures.linear_pieces import draw_linear_pieces
from hf_lgelu.report.downstream.figures.pruning import draw_pruning, pruned_points
from hf_lgelu.report.downstream.figures.verification import draw_verification
from hf_lgelu.report.downstream.figures.zeros import draw_zeros
from hf_lgelu.report.downstream.measurements import rows_by
from hf_lgelu.report.downstream.path.draw import draw_path
from hf_lgelu.report.downstream.path.gains import integers, pieces, proofs, pruning

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
}
DRAW = {
    "int8": draw_int8, "verification": draw_verification, "zeros": draw_zeros, "pruning": draw_pruning,
    "linear_pieces": draw_linear_pieces,
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
