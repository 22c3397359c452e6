"""Pictures with drawn shapes and their boxes, and the average precision of what a detector finds in them.

Disks, rectangles and triangles of any colour on a shaded, noisy ground, among lines that are none of them. Drawn by
numpy from a seed, so that nothing is stored and every machine has the same pictures.
"""

from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from transformers import EvalPrediction

CLASSES = ("disk", "rectangle", "triangle")
SIDE = 64
"""Pixels of a picture's side."""
MOST_SHAPES = 5
"""Rows of a picture's boxes: left, top, right, bottom in pixels, and the class; −1 in rows that are no shape."""

_SMALLEST, _LARGEST = 9, 30
_NOISE = 12.0  # standard deviation, of 255
_MOST_COVERED = 0.1  # overlap of two boxes, of the smaller one
_OVERLAPS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0, 1, 101)
_ACROSS, _DOWN = np.meshgrid(*[np.arange(SIDE, dtype=np.float32) + 0.5] * 2)


def draw_pictures(numbers: Iterable[int], seed: int) -> tuple[Tensor, Tensor]:
    """(N, 3, 64, 64) uint8 and the boxes (N, 5, 5) float32 of these pictures of a seed; other seeds, other pictures.

    >>> pictures, boxes = draw_pictures(range(2), seed=0)
    >>> tuple(pictures.shape), tuple(boxes.shape)
    ((2, 3, 64, 64), (2, 5, 5))
    """
    return tuple(map(torch.stack, zip(*(_drawn(seed, int(number)) for number in numbers), strict=True)))


@cache  # a study draws its pictures once
def _drawn(seed: int, number: int) -> tuple[Tensor, Tensor]:
    draws = np.random.RandomState([seed, number])

    def colour() -> np.ndarray:  # each of the three at least 60 from the ground's, around the circle of 256
        return ((ground + draws.randint(60, 197, 3)) % 256)[:, None]

    ground, slope = draws.randint(40, 216, 3), draws.uniform(-0.6, 0.6, 2)
    shade = slope[0] * (_ACROSS - SIDE / 2) + slope[1] * (_DOWN - SIDE / 2)
    picture = np.clip(ground[:, None, None] + shade, 0, 255)
    for _ in range(draws.randint(0, 4)):
        (x, y), angle, length = draws.uniform(0, SIDE, 2), draws.uniform(0, np.pi), draws.uniform(5, 40)
        along = (_ACROSS - x) * np.cos(angle) + (_DOWN - y) * np.sin(angle)
        beside = (_DOWN - y) * np.cos(angle) - (_ACROSS - x) * np.sin(angle)
        picture[:, (abs(beside) < 0.6) & (abs(along) < length)] = colour()
    boxes = torch.full((MOST_SHAPES, 5), -1.0)
    shapes = 0
    for _ in range(draws.randint(1, MOST_SHAPES + 1)):
        kind, (width, height) = draws.randint(len(CLASSES)), draws.randint(_SMALLEST, _LARGEST + 1, 2)
        height = width if CLASSES[kind] == "disk" else height
        left, top = draws.randint(0, SIDE - width + 1), draws.randint(0, SIDE - height + 1)
        box = torch.tensor([left, top, left + width, top + height, kind])
        shared, *own = areas(box[:4], boxes[:shapes, :4])
        if (shared > _MOST_COVERED * torch.minimum(*own)).any():
            continue
        x, y, tip = (_ACROSS - left) / width, (_DOWN - top) / height, draws.uniform()
        inside = (x > 0) & (x < 1) & (y > 0) & (y < 1)
        if CLASSES[kind] == "disk":
            inside = (x - 0.5) ** 2 + (y - 0.5) ** 2 < 0.25
        elif CLASSES[kind] == "triangle":  # from a tip on the upper side to the whole lower one
            inside &= (x > tip * (1 - y)) & (x < tip + (1 - tip) * y)
        picture[:, inside] = colour()
        boxes[shapes] = box
        shapes += 1
    noisy = picture + draws.normal(0, _NOISE, picture.shape)
    return torch.from_numpy(np.clip(noisy, 0, 255).astype(np.uint8)), boxes


def areas(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What boxes (..., 4) share with others, the area of the boxes, and that of the others."""
    low, high = torch.maximum(one[..., :2], other[..., :2]), torch.minimum(one[..., 2:], other[..., 2:])
    own, others = ((boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (one, other))
    return (high - low).clamp(min=0).prod(-1), own, others


def average_precision(prediction: EvalPrediction) -> dict[str, float]:
    """{"ap", "ap50"}: the means over classes, and over overlaps from 0.5 to 0.95 or of 0.5, as COCO has them.

    `prediction` holds what was found (N, most, 6), the best first: corners, class, score, of which 0 is nothing; and as
    labels the boxes that are there (N, 5, 5).
    """
    found, drawn = prediction.predictions.astype(np.float64), prediction.label_ids.astype(np.float64)
    given = found[..., 5] > 0
    shared, own, others = areas(torch.from_numpy(found[:, :, None, :4]), torch.from_numpy(drawn[:, None, :, :4]))
    pairs = (shared / (own + others - shared)).numpy()  # (N, most, 5) intersection over union
    pairs[~(given[..., None] & (found[:, :, None, 4] == drawn[:, None, :, 4]))] = -1
    free = np.ones((len(_OVERLAPS), *drawn.shape[:2]), dtype=bool)
    right = np.zeros((len(_OVERLAPS), *given.shape), dtype=bool)
    for rank in range(found.shape[1]):  # the better takes the box that it overlaps most, if no other has it
        overlap = np.where(free & (pairs[:, rank] >= _OVERLAPS[:, None, None]), pairs[:, rank], -1)
        best = overlap.argmax(-1)[..., None]
        right[:, :, rank] = hit = np.take_along_axis(overlap, best, -1)[..., 0] > 0
        np.put_along_axis(free, best, np.take_along_axis(free, best, -1) & ~hit[..., None], -1)
    precisions = []
    for kind in range(len(CLASSES)):
        wanted, chosen = (drawn[..., 4] == kind).sum(), given & (found[..., 4] == kind)
        if wanted:
            order = np.argsort(-found[chosen][:, 5], kind="stable")
            hits = right[:, chosen][:, order].cumsum(1)
            precision = hits / np.arange(1, hits.shape[1] + 1)
            best = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]  # at this recall or a higher one
            best = np.concatenate([best, np.zeros((len(best), 1))], 1)
            precisions.append(
                [row[np.searchsorted(hit / wanted, _RECALLS)].mean() for row, hit in zip(best, hits, strict=True)]
            )
    mean = np.mean(precisions, 0)
    return {"ap": float(mean.mean()), "ap50": float(mean[0])}
