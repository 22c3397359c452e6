import numpy as np
import pytest
from matplotlib import image

from hf_lgelu.studies.figures import draw_hardness, draw_substitution

PATH = [{"a": 2.0, "b": 1.5}, {"a": 80.0, "b": 70.0}, {"a": 160.0, "b": 160.0}]


@pytest.fixture
def runs(record_of):
    gelu = [record_of(seed=seed) for seed in range(2)]
    hardened = [record_of(activation="lambda_gelu", harden=True, hardness=PATH, seed=seed) for seed in range(2)]
    return gelu + hardened + [record_of(activation="relu", relu_scores=(None,) * 3)]


@pytest.mark.parametrize("draw", [draw_hardness, draw_substitution])
def test_a_figure_is_a_picture_with_something_on_it(draw, runs, tmp_path):
    draw(runs, tmp_path / "figure.png")
    pixels = image.imread(tmp_path / "figure.png")[..., :3]
    assert min(pixels.shape[:2]) > 200
    assert 0.002 < np.mean(np.any(pixels < 0.9, axis=-1)) < 0.5


def test_drawing_nothing_is_refused(record_of, tmp_path):
    with pytest.raises(ValueError, match="hardness"):
        draw_hardness([record_of()], tmp_path / "a.png")
    with pytest.raises(ValueError, match="substituted"):
        draw_substitution([record_of(relu_scores=(None,) * 3)], tmp_path / "b.png")
    assert list(tmp_path.iterdir()) == []
