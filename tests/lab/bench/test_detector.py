"""Drawn boxes, their average precision, and the detector's answer, against plain loops and closed forms."""

import pytest
import torch
from lgelu_lab import detector_conversion
from lgelu_lab.benchmarks.detector import STRIDES, Detector, decode, detector_loss
from lgelu_lab.benchmarks.drawn_boxes import SIDE, Boxes, average_precision, draw_pictures
from lgelu_lab.measurements.int8 import PRECISIONS


def boxes(corners, kinds, scores=None):
    scores = torch.ones(len(kinds)) if scores is None else torch.tensor(scores)
    return Boxes(torch.tensor(corners).float().view(-1, 4), torch.tensor(kinds, dtype=torch.long), scores)


def test_a_picture_follows_from_its_seed_and_its_boxes_lie_inside_and_apart():
    pictures, found = draw_pictures(20, seed=3)
    again, _ = draw_pictures(5, seed=3)
    assert torch.equal(pictures[:5], again)
    assert not torch.equal(pictures[:5], draw_pictures(5, seed=4)[0])
    for one in found:
        assert (one.corners[:, 2:] - one.corners[:, :2] >= 9).all()
        assert one.corners.min() >= 0
        assert one.corners.max() <= SIDE
        for first in range(len(one.classes)):
            for second in range(first):
                a, b = one.corners[first].tolist(), one.corners[second].tolist()
                shared = max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))
                smaller = min((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
                assert shared <= 0.1 * smaller


def test_average_precision_is_that_of_a_hand():
    wanted = [boxes([[0, 0, 20, 20]], [0]), boxes([[10, 10, 40, 40]], [0])]
    whole = [boxes([[0, 0, 20, 20]], [0], [0.9]), boxes([[10, 10, 40, 40]], [0], [0.8])]
    assert average_precision(whole, wanted) == {"ap": 1.0, "ap50": 1.0}
    # Half of them found: precision 1 at the 51 of 101 levels of recall up to a half.
    half = [whole[0], boxes([], [], [])]
    assert average_precision(half, wanted)["ap50"] == pytest.approx(51 / 101)
    # An overlap of 400/484 = 0.826 is one from 0.5 to 0.8, of the ten steps to 0.95.
    wide = [boxes([[0, 0, 22, 22]], [0], [0.9]), whole[1]]
    found = average_precision(wide, wanted)
    assert found["ap50"] == 1.0
    # Above it the worse-scored box is right, behind a wrong one: precision a half up to recall a half.
    assert found["ap"] == pytest.approx((7 + 3 * 0.5 * 51 / 101) / 10)
    assert average_precision([boxes([], [], [])] * 2, wanted) == {"ap": 0.0, "ap50": 0.0}


def maps_of(found):
    """Output maps that say one box, from the cell that holds its centre."""
    corners, kind = found.corners[0], int(found.classes[0])
    stride = STRIDES[0] if (corners[2:] - corners[:2]).max() < 20 else STRIDES[1]
    maps = [torch.full((1, 7, SIDE // step, SIDE // step), -20.0) for step in STRIDES]
    column, row = ((corners[:2] + corners[2:]) / 2 // stride).long().tolist()
    centre = torch.tensor([column + 0.5, row + 0.5]) * stride
    sides = torch.cat([centre - corners[:2], corners[2:] - centre]) / (2 * stride)
    maps[STRIDES.index(stride)][0, :4, row, column] = torch.expm1(sides).log()  # the inverse of softplus
    maps[STRIDES.index(stride)][0, 4 + kind, row, column] = 20.0
    return maps


@pytest.mark.parametrize("corners", [[8, 9, 20, 22], [3, 5, 33, 30]])
def test_maps_that_say_a_box_are_decoded_to_it_and_cost_less_than_others(corners):
    wanted = boxes([corners], [1])
    maps = maps_of(wanted)
    (found,) = decode(maps)
    torch.testing.assert_close(found.corners, wanted.corners, atol=1e-3, rtol=0)
    assert found.classes.tolist() == [1]
    elsewhere = boxes([[40, 40, 60, 55]], [1])
    assert detector_loss(maps, [wanted]) < detector_loss(maps, [elsewhere])


@pytest.mark.slow
def test_every_network_is_judged_in_both_precisions(monkeypatch):
    monkeypatch.setattr(detector_conversion, "CONVERSIONS", {"refit, named": {"effort": "refit"}})
    monkeypatch.setattr(detector_conversion, "JUDGED", 20)
    monkeypatch.setattr(detector_conversion, "_CALIBRATED_ON", 32)
    torch.manual_seed(0)
    rows = list(detector_conversion.measure_detector(0, Detector().eval(), pictures=80))
    assert [(row["method"], row["precision"]) for row in rows] == [
        (method, precision) for method in ("original", "direct swap", "refit, named") for precision in PRECISIONS
    ]
    assert {tuple(row) for row in rows} == {detector_conversion.COLUMNS}
    assert rows[-1]["distance"] < 1


def test_nothing_is_trained_or_converted_for_rows_that_are_there(monkeypatch):
    monkeypatch.setattr(detector_conversion, "JUDGED", 4)
    monkeypatch.setattr(detector_conversion, "train_detector", lambda seed: pytest.fail("trained"))
    monkeypatch.setattr(detector_conversion, "convert_to_relu", lambda *_, **__: pytest.fail("converted"))
    pairs = [(method, precision) for method in detector_conversion.methods() for precision in PRECISIONS]
    assert list(detector_conversion.measure_detector(0, there=pairs)) == []
    torch.manual_seed(0)
    pairs.remove(("direct swap", "float32"))
    (row,) = detector_conversion.measure_detector(0, Detector().eval(), pictures=2, there=pairs)
    assert (row["method"], row["precision"], row["seed"]) == ("direct swap", "float32", 0)
