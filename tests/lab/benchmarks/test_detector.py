"""The detector of drawn boxes: its pictures, its average precision against COCO's own, its loss and what it finds."""

import numpy as np
import pytest
import torch
from lgelu_lab.benchmarks.data import DataOptions
from lgelu_lab.benchmarks.detector import Detector, build_detector, detection_loss, find_boxes, load_pictures
from lgelu_lab.benchmarks.drawn_boxes import SIDE, average_precision, draw_pictures
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from transformers import EvalPrediction

from hf_lgelu.models.checkpoint import load_checkpoint


def test_a_picture_follows_from_its_seed_and_its_boxes_lie_inside_and_apart():
    pictures, boxes = draw_pictures(range(20), 3)
    assert torch.equal(draw_pictures([4], 3)[0][0], pictures[4])
    assert not torch.equal(draw_pictures([4], 4)[0][0], pictures[4])
    for picture, drawn in zip(pictures.float(), boxes, strict=True):
        covered = torch.zeros(SIDE, SIDE)
        for left, top, right, bottom, kind in drawn[drawn[:, 4] >= 0].int().tolist():
            assert 9 <= min(right - left, bottom - top) <= max(right - left, bottom - top) <= 30
            covered[top:bottom, left:right] += 1
            if kind == 1 and drawn[1, 4] < 0:  # one rectangle alone is of another colour than most of the picture
                inside = picture[:, top:bottom, left:right].flatten(1).median(1).values
                assert (inside - picture.flatten(1).median(1).values).abs().min() > 30
        assert covered.sum() == sum((box[2:4] - box[:2]).prod() for box in drawn)  # all inside the picture
        assert (covered > 1).sum() <= 0.1 * (covered > 0).sum()


def coco_precision(found, drawn):
    def entries(pictures):
        return [
            {"id": 1 + 100 * n + i, "image_id": n, "category_id": int(kind), "score": (kind, *score)[-1], "iscrowd": 0,
             "bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top)}
            for n, rows in enumerate(pictures.tolist())
            for i, (left, top, right, bottom, kind, *score) in enumerate(rows) if kind >= 0
        ]  # fmt: skip

    truth, images = COCO(), [{"id": n} for n in range(len(drawn))]
    truth.dataset = {"images": images, "categories": [{"id": kind} for kind in range(3)], "annotations": entries(drawn)}
    truth.createIndex()
    evaluation = COCOeval(truth, truth.loadRes(entries(found)), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats[:2]


def test_average_precision_is_that_of_coco():
    random, drawn = np.random.RandomState(0), draw_pictures(range(20), 3)[1].numpy()
    found = np.full((20, 12, 6), [0, 0, 0, 0, -1.0, 0])
    for picture, boxes in zip(found, drawn, strict=True):
        near = np.repeat(boxes[boxes[:, 4] >= 0], 2, 0)  # each found twice: near or beside it, some as another class
        near[:, :4] += random.choice([0.3, 1, 4], (len(near), 1)) * random.normal(size=(len(near), 1))
        near[:, 4] = np.where(random.rand(len(near)) < 0.8, near[:, 4], random.randint(3, size=len(near)))
        scores = np.sort(random.rand(len(near)).round(1) + 0.05)[::-1]  # with ties
        picture[: len(near)] = np.concatenate([near, scores[:, None]], 1)
    score = average_precision(EvalPrediction(predictions=found, label_ids=drawn))
    assert list(score.values()) == pytest.approx(coco_precision(found, drawn), abs=1e-12)
    assert 0.1 < score["ap"] < score["ap50"] < 0.9


@pytest.mark.parametrize("box", [[8.0, 9, 20, 22], [3.0, 5, 33, 30]])
def test_outputs_that_say_a_box_are_read_as_that_box_and_cost_less_than_others(box):
    (left, top, right, bottom), (stride, first) = box, (4, 0) if box[2] - box[0] < 20 else (8, 256)
    column, row = int((left + right) / 2 // stride), int((top + bottom) / 2 // stride)
    x, y, cell = (column + 0.5) * stride, (row + 0.5) * stride, first + row * SIDE // stride + column
    sides = torch.tensor([x - left, y - top, right - x, bottom - y]) / (2 * stride)
    logits, boxes = torch.full((1, 320, 3), -9.0), torch.zeros(1, 320, 4)
    logits[0, cell, 1], logits[0, cell + 1, 1] = 5.0, 4.0  # the next cell says the same box
    for at, moved in ((cell, 0), (cell + 1, 0.5)):
        boxes[0, at] = torch.expm1(sides + torch.tensor([moved, 0, -moved, 0])).log()  # the inverse of softplus
    (found,) = find_boxes((logits, boxes), None)
    assert found[:, 5].count_nonzero() == 1
    torch.testing.assert_close(found[0, :5], torch.tensor([*box, 1.0]), atol=1e-3, rtol=0)
    labels = torch.cat([found[:1, :5], torch.full((4, 5), -1.0)])[None]
    for change in ([6.0, 0, 6, 0, 0], [0.0, 0, 0, 0, 1]):  # elsewhere, or of another class
        other = torch.cat([labels[:, :1] + torch.tensor(change), labels[:, 1:]], 1)
        assert detection_loss(logits, boxes, labels) < detection_loss(logits, boxes, other)


def test_a_saved_detector_gives_the_same_with_its_gates(tmp_path):
    data = load_pictures(DataOptions(max_train_samples=2, max_eval_samples=1))
    model = build_detector("lambda_silu", data).eval()
    model.save_pretrained(tmp_path)
    batch, loaded = data.train.__getitems__([0, 1]), load_checkpoint(tmp_path, kind=Detector)
    torch.testing.assert_close(dict(loaded(**batch)), dict(model(**batch)), rtol=0, atol=0)
