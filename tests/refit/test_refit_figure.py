"""The conversion's picture: what is drawn, read off the axes before they become pixels."""

import dataclasses
import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from report_by_hand import REPORT

from hf_lgelu.refit.page import draw_conversion

SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """draw(report) → (axes of the layers, axes of the networks) of the figure that was written."""
    written = []

    def save(figure, path, **options):
        written.append(figure)
        Path(path).write_bytes(SIGNATURE)  # pixels are for the last test alone

    monkeypatch.setattr(Figure, "savefig", save)

    def draw(report):
        path = draw_conversion(tmp_path / "new" / "refit.png", report)
        assert path.read_bytes() == SIGNATURE
        return written[-1].axes

    return draw


def points(axis):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()}


def texts(axis):
    return [text.get_text() for text in axis.texts]


def test_each_layer_before_and_after_on_a_logarithmic_axis(drawn):
    layers, _ = drawn(REPORT)
    assert layers.get_yscale() == "log"
    assert points(layers) == {
        "weights kept": ([1, 2, 3], [0.25, 0.5, 0.03]), "as chosen": ([1, 2, 3], [0.0123456, 0.4, 0.03]),
    }  # fmt: skip


def test_the_metric_where_one_set_has_labels(drawn):
    _, networks = drawn(REPORT)
    assert networks.get_title(loc="left") == "Whole network: perplexity"
    ((label, (values, places)),) = points(networks).items()
    assert label == "second set"
    assert values == [113.186, 292.361, 113.424]
    names = dict(zip(networks.get_yticks(), [tick.get_text() for tick in networks.get_yticklabels()], strict=True))
    assert [names[place] for place in places] == ["original", "plain swap", "refitted"]
    assert texts(networks) == ["113.19", "292.36", "113.42"]


def test_an_exact_layer_and_one_that_was_not_scored_leave_gaps(drawn):
    exact = dataclasses.replace(REPORT.layers[0], error_after=0.0)
    unscored = dataclasses.replace(REPORT.layers[1], error_before=None, error_after=None)
    layers, _ = drawn(dataclasses.replace(REPORT, layers=(exact, unscored, REPORT.layers[2])))
    found = points(layers)
    assert [math.isnan(value) for value in found["as chosen"][1]] == [True, True, False]
    assert [math.isnan(value) for value in found["weights kept"][1]] == [False, True, False]
