"""Pictures with drawn shapes and their boxes, and the average precision of a detector on them.

Disks, rectangles and triangles of any colour on a shaded, noisy ground, among lines that are none of them. A picture is
a function of its seed, so nothing is stored.
"""

import contextlib
import io
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

CLASSES: tuple[str, ...] = ("disk", "rectangle", "triangle")
SIDE = 64
"""Pixels of a picture's side."""

_SMALLEST, _LARGEST = 9, 30
_MOST_SHAPES, _MOST_LINES = 5, 3
_NOISE = 12.0  # standard deviation, of 255
_MOST_COVERED = 0.1  # overlap of two boxes, of the smaller one
_LEAST_CONTRAST = 60  # summed over the three colours, of 765


@dataclass(frozen=True)
class Boxes:
    """What is in one picture, or was found in it: (n, 4) left, top, right, bottom in pixels, (n,) classes, (n,) scores
    (1 for what is drawn)."""

    corners: Tensor
    classes: Tensor
    scores: Tensor


def draw_pictures(count: int, seed: int) -> tuple[Tensor, list[Boxes]]:
    """(count, 3, 64, 64) float32 of mean about 0 and scale about 1, and the boxes of each; other seeds, other pictures.

    >>> pictures, boxes = draw_pictures(2, seed=0)
    >>> tuple(pictures.shape), len(boxes)
    ((2, 3, 64, 64), 2)
    """
    drawn = [_draw(random.Random(f"{seed}-{number}")) for number in range(count)]
    pictures = torch.from_numpy(np.stack([pixels for pixels, _ in drawn])).permute(0, 3, 1, 2)
    return (pictures.float() - 127.5) / 64, [boxes for _, boxes in drawn]


def _draw(draws: random.Random) -> tuple[np.ndarray, Boxes]:
    """((64, 64, 3) pixels, boxes)."""
    ground, slope = [draws.randint(40, 215) for _ in range(3)], [draws.uniform(-0.6, 0.6) for _ in range(2)]
    across = np.arange(SIDE) - SIDE / 2
    shade = slope[0] * across[None, :, None] + slope[1] * across[:, None, None]
    picture = Image.fromarray(np.clip(np.array(ground)[None, None] + shade, 0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    for _ in range(draws.randint(0, _MOST_LINES)):
        pen.line([draws.randrange(SIDE) for _ in range(4)], fill=_colour(draws, ground), width=1)
    found: list[tuple[list[int], int]] = []
    for _ in range(draws.randint(1, _MOST_SHAPES)):
        width, height = (draws.randint(_SMALLEST, _LARGEST) for _ in range(2))
        kind = draws.randrange(len(CLASSES))
        if CLASSES[kind] == "disk":
            height = width
        left, top = draws.randint(0, SIDE - width), draws.randint(0, SIDE - height)
        corners = [left, top, left + width, top + height]
        if all(_covered(corners, other) <= _MOST_COVERED for other, _ in found):
            _shape(pen, CLASSES[kind], corners, _colour(draws, ground), draws.random())
            found.append((corners, kind))
    noise = np.random.default_rng(draws.getrandbits(32)).normal(0, _NOISE, (SIDE, SIDE, 3))
    pixels = np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8)
    corners, kinds = zip(*found, strict=True)
    return pixels, Boxes(torch.tensor(corners).float(), torch.tensor(kinds), torch.ones(len(found)))


def _colour(draws: random.Random, ground: Sequence[int]) -> tuple[int, ...]:
    while True:
        colour = tuple(draws.randint(0, 255) for _ in range(3))
        if sum(abs(one - other) for one, other in zip(colour, ground, strict=True)) >= _LEAST_CONTRAST:
            return colour


def _shape(pen: ImageDraw.ImageDraw, kind: str, corners: Sequence[int], colour: tuple[int, ...], at: float) -> None:
    left, top, right, bottom = corners[0], corners[1], corners[2] - 1, corners[3] - 1
    if kind == "disk":
        pen.ellipse((left, top, right, bottom), fill=colour)
    elif kind == "rectangle":
        pen.rectangle((left, top, right, bottom), fill=colour)
    else:
        pen.polygon([(left + at * (right - left), top), (left, bottom), (right, bottom)], fill=colour)


def _covered(one: Sequence[int], other: Sequence[int]) -> float:
    """The overlap of two boxes as a share of the smaller."""
    width = max(0, min(one[2], other[2]) - max(one[0], other[0]))
    height = max(0, min(one[3], other[3]) - max(one[1], other[1]))
    smaller = min((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return width * height / smaller


def average_precision(found: Sequence[Boxes], wanted: Sequence[Boxes]) -> dict[str, float]:
    """{"ap": …, "ap50": …} by pycocotools: means over the classes, over overlaps of 0.5 to 0.95, and of 0.5 alone.

    Args:
        found: boxes of each picture, with scores.
        wanted: those that are in it; a class that is nowhere among them does not count.

    Raises ImportError without pycocotools.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth = COCO()
    truth.dataset = {
        "images": [{"id": number} for number in range(len(wanted))],
        "categories": [{"id": kind} for kind in range(len(CLASSES))],
        "annotations": [
            {**entry, "id": number, "area": entry["bbox"][2] * entry["bbox"][3], "iscrowd": 0}
            for number, entry in enumerate(_entries(wanted), start=1)
        ],
    }
    entries = list(_entries(found))
    if not entries:
        return {"ap": 0.0, "ap50": 0.0}
    with contextlib.redirect_stdout(io.StringIO()):  # it tells what it does
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(entries), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    ap, ap50 = (float(value) for value in evaluation.stats[:2])
    return {"ap": max(ap, 0.0), "ap50": max(ap50, 0.0)} if not math.isnan(ap) else {"ap": 0.0, "ap50": 0.0}


def _entries(pictures: Sequence[Boxes]) -> Iterator[dict]:
    for number, boxes in enumerate(pictures):
        for corners, kind, score in zip(
            boxes.corners.tolist(), boxes.classes.tolist(), boxes.scores.tolist(), strict=True
        ):
            left, top, right, bottom = corners
            box = [left, top, right - left, bottom - top]
            yield {"image_id": number, "category_id": kind, "bbox": box, "score": score}
