import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from lgelu_lab.report.figures.drawing import COLOURS
from lgelu_lab.report.figures.glance import distances, draw_glance
from lgelu_lab.report.figures.hardness import draw_hardness, mean_path
from lgelu_lab.report.figures.related import draw_related
from lgelu_lab.report.figures.substitution import draw_substitution
from lgelu_lab.report.figures.trajectories import draw_trajectories
from lgelu_lab.report.tables.glance import glance_groups
from matplotlib import image
from matplotlib.text import Text

SOFT = [{"a": 1.5, "b": 1.2}, {"a": 1.4, "b": 1.6}, {"a": 1.7, "b": 1.5}]
HARD = [{"a": 2.0, "b": 1.5}, {"a": 70.0, "b": 70.0}, {"a": 160.0, "b": 160.0}]


def learned(record_of, mode="uniform", **fields):
    return record_of(activation="lambda_gelu", init_mode=mode, hardness=SOFT, **fields)


def relufied(record_of, **fields):
    record = record_of(relu_scores=(0.5, None, None), **fields)
    record.config["relufication"] = True
    return record


@pytest.fixture(scope="module")
def runs(record_of):
    found = [record_of(seed=seed) for seed in range(2)]
    found += [learned(record_of, mode, seed=seed) for mode in ("uniform", "increasing") for seed in range(2)]
    found += [record_of(activation="lambda_gelu", harden=True, hardness=HARD), relufied(record_of)]
    return [*found, record_of(activation="silu"), record_of(activation="relu", relu_scores=(None,) * 3)]


DRAWINGS = {
    "glance": lambda runs: draw_glance(runs),
    **{
        name: lambda runs, draw=draw: draw(runs, "mlp-adult")
        for name, draw in {
            "trajectories-mlp-adult": draw_trajectories,
            "hardness-mlp-adult": draw_hardness,
            "substitution-mlp-adult": draw_substitution,
            "related-mlp-adult": draw_related,
        }.items()
    },
}


@pytest.fixture(scope="module", params=DRAWINGS)
def drawing(request, runs):
    made = DRAWINGS[request.param](runs)
    assert made.key == request.param
    return made


def test_a_figure_is_a_picture_with_something_on_it_in_both_formats(drawing, tmp_path):
    png, svg = drawing.save(tmp_path)
    pixels = image.imread(png)[..., :3]
    assert min(pixels.shape[:2]) > 300
    assert 0.002 < np.mean(np.any(pixels < 0.9, axis=-1)) < 0.5
    assert np.all(pixels[[0, -1], :] == 1), "something touches the edge, and may be cut off"
    assert np.all(pixels[:, [0, -1]] == 1), "something touches the edge, and may be cut off"
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


def test_texts_are_legible_at_half_size_and_stay_inside(drawing):
    figure = drawing.figure
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert len(texts) > 5
    assert min(text.get_fontsize() for text in texts) >= 9
    for axis in figure.axes:
        for label in (axis.title, axis.xaxis.label, axis.yaxis.label, *axis.texts):
            if label.get_text():
                box = label.get_window_extent()
                inside = min(box.x0, box.y0, width - box.x1, height - box.y1)
                assert inside >= 0, f"{label.get_text()!r} is cut off"


def test_axes_have_units_and_say_when_lower_is_better(runs, record_of):
    perplexity = {"metric": "perplexity", "greater_is_better": False, "benchmark": "gpt2-wikitext2"}
    runs = [record_of(scores=(90.0, 30.0, 31.0), relu_scores=(99.0, 95.0, 92.0), **perplexity)]
    assert draw_trajectories(runs, "gpt2-wikitext2").figure.axes[0].get_ylabel() == "perplexity (lower is better)"
    drawing = draw_substitution(runs, "gpt2-wikitext2")
    assert [axis.get_xlabel() for axis in drawing.figure.axes] == ["perplexity (lower is better)"] * 2
    assert drawing.figure.axes[0].get_xscale() == "log"  # 30 to 95
    assert "Further left is better" in drawing.caption
    assert "further left is better" in draw_glance(runs).figure.axes[0].get_xlabel()


def test_trajectories_show_each_seed_and_the_mean(record_of):
    low, high = (0.2, 0.4, 0.6), (0.4, 0.8, 0.8)
    runs = [record_of(seed=seed, scores=scores) for seed, scores in enumerate((low, high))]
    axis = draw_trajectories(runs, "mlp-adult").figure.axes[0]
    paths = [list(line.get_ydata()) for line in axis.lines]
    assert [pytest.approx(path) for path in paths] == [list(low), list(high), [0.3, 0.6, 0.7]]


def test_configurations_without_runs_are_called_missing_in_the_legend(record_of):
    drawing = draw_trajectories([record_of()], "mlp-adult")
    (legend,) = drawing.figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == [
        *("GELU", "ReLU: missing", "λ-GELU uniform: missing", "λ-GELU increasing: missing"),
        "λ-GELU decreasing: missing",
    ]
    assert "Missing: ReLU" in drawing.note


def test_an_undefined_correlation_is_a_gap_and_said(record_of):
    runs = [learned(record_of, "uniform"), learned(record_of, "increasing")]  # both begin with equal λ
    *_, axis = draw_trajectories(runs, "mlp-adult").figure.axes
    line = axis.lines[0]
    assert list(line.get_xdata()) == [0, 1, 2, 3]
    assert [math.isnan(value) for value in line.get_ydata()] == [True, False, False, False]
    assert "gap: undefined, all λ equal" in [text.get_text() for text in axis.get_legend().get_texts()]


def test_the_mean_path_is_over_seeds_and_starts_before_training(record_of):
    other = [{"a": 2.5, "b": 1.0}, *SOFT[1:]]
    path = mean_path([learned(record_of), record_of(activation="lambda_gelu", hardness=other, seed=1)])
    assert path == {0.0: [1.0, 1.0], 1.0: [2.0, 1.1], 2.0: [1.4, 1.6], 3.0: [1.7, 1.5]}


def test_a_run_before_its_gates_are_hard_or_before_the_switch_is_hollow(record_of):
    soft = record_of(activation="lambda_gelu", harden=True, hardness=HARD)  # best epoch 2, λ = 70 < 79.8
    early = relufied(record_of, scores=(0.9, 0.8, 0.7))  # best epoch 1, before the switch
    best, last = draw_substitution([soft, early], "mlp-adult").figure.axes
    hollow = [line for line in best.lines if line.get_markerfacecolor() == "white"]
    assert len(hollow) == 4
    assert not [line for line in last.lines if line.get_markerfacecolor() == "white"]
    squares = [line for line in last.lines if line.get_marker() == "s"]
    assert [list(line.get_xdata()) for line in squares] == [[0.7]]
    missing = [text.get_text() for text in last.texts]
    assert missing == ["missing"]  # GELU


def test_distances_are_paired_by_seed(record_of):
    runs = [
        record_of(seed=0, scores=(0.1, 0.1, 0.80), relu_scores=(0.1, 0.1, 0.70)),
        record_of(seed=1, scores=(0.1, 0.1, 0.60), relu_scores=(0.1, 0.1, 0.58)),
        record_of(seed=1, activation="relu", scores=(0.1, 0.1, 0.65), relu_scores=(None,) * 3),
        record_of(seed=2, activation="relu", scores=(0.1, 0.1, 0.99), relu_scores=(None,) * 3),
    ]
    other = record_of(seed=0, activation="relu", scores=(0.1, 0.1, 0.9), relu_scores=(None,) * 3)
    other.config["learning_rate"] = 0.1
    found = distances(glance_groups([*runs, other]), "mlp-adult")
    assert found["GELU, then swapped"] == pytest.approx([-10, -2])
    assert found["ReLU from the start"] == pytest.approx([5])
    assert found["λ-GELU hardened, swapped"] == found["Swapped early, trained on"] == []


def test_perplexity_is_compared_in_per_cent(record_of):
    fields = {"metric": "perplexity", "greater_is_better": False}
    runs = [record_of(scores=(90.0, 50.0, 40.0), relu_scores=(99.0, 95.0, 50.0), **fields)]
    assert distances(glance_groups(runs), "mlp-adult")["GELU, then swapped"] == pytest.approx([25])


def test_related_activations_without_runs_are_missing_not_zero(record_of):
    axis = draw_related([record_of(), record_of(activation="silu")], "mlp-adult").figure.axes[0]
    assert [text.get_text() for text in axis.texts] == ["missing"] * 7
    assert draw_related([record_of(), record_of(activation="relu")], "mlp-adult") is None


def test_colours_differ():
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_nothing_to_draw_is_none_rather_than_an_empty_figure(record_of):
    relu = [record_of(activation="relu", relu_scores=(None,) * 3)]
    assert draw_hardness(relu, "mlp-adult") is None
    assert draw_substitution(relu, "mlp-adult") is None
    assert draw_glance(relu) is None
    assert draw_trajectories(relu, "mlp-fmnist") is None
