"""The conversion's picture: what is drawn, read off the axes before they become pixels."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from report_by_hand import REPORT

from hf_lgelu.export.hub.conversion_page import draw_conversion

SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """draw(report) → the axes of the figure that was written."""
    written = []

    def save(figure, path, **options):
        written.append(figure)
        Path(path).write_bytes(SIGNATURE)  # pixels are for the last test alone

    monkeypatch.setattr(Figure, "savefig", save)

    def draw(report):
        path = draw_conversion(tmp_path / "new" / "refit.png", report)
        assert path.read_bytes() == SIGNATURE
        (axes,) = written[-1].axes
        return axes

    return draw


def points(axis):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()}


def test_each_layer_before_and_after_on_a_logarithmic_axis(drawn):
    layers = drawn(REPORT)
    assert layers.get_yscale() == "log"
    assert points(layers) == {
        "weights kept": ([1, 2, 3], [0.25, 0.5, 0.03]), "as chosen": ([1, 2, 3], [0.0123456, 0.4, 0.03]),
    }  # fmt: skip
