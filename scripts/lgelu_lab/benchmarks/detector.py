"""A small detector with SiLU gates, shaped as YOLO's are: its layers, its loss, what it finds, and its training."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import batched_nms, generalized_box_iou_loss, sigmoid_focal_loss

from lgelu_lab.benchmarks.drawn_boxes import CLASSES, SIDE, Boxes, draw_pictures

STRIDES = (4, 8)
"""Pixels between two cells of each output map."""

_LARGE_FROM = 20  # pixels of a box's longer side; larger ones belong to the coarse map
_REACH = 1.5  # a box belongs to the cells inside it within so many strides of its centre
_RARE = 0.01  # the share of cells with a box that the class scores begin with
_CONFIDENT = 0.01
_OVERLAP = 0.6
_MOST_BOXES = 50


class Convolution(nn.Module):
    """Convolution, BatchNorm, SiLU."""

    def __init__(self, channels: int, out: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(out)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class SplitBlock(nn.Module):
    """C2f: one half passes, the other goes through a residual pair of convolutions, and all parts are joined."""

    def __init__(self, channels: int, out: int, residual: bool) -> None:
        super().__init__()
        self.first, self.join = Convolution(channels, out, 1), Convolution(3 * out // 2, out, 1)
        self.inner = nn.Sequential(Convolution(out // 2, out // 2), Convolution(out // 2, out // 2))
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        passed, worked = self.first(x).chunk(2, 1)
        new = self.inner(worked) + worked if self.residual else self.inner(worked)
        return self.join(torch.cat([passed, worked, new], 1))


class PooledPyramid(nn.Module):
    """SPPF: a map beside its maxima over ever larger windows."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.join = Convolution(channels, channels // 2, 1), Convolution(2 * channels, channels, 1)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.first(x)]
        for _ in range(3):
            maps.append(self.pool(maps[-1]))
        return self.join(torch.cat(maps, 1))


class Head(nn.Module):
    """Distances from a cell to the four sides of its box, and a score for each class, by two branches."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.box = nn.Sequential(Convolution(channels, 32), Convolution(32, 32), nn.Conv2d(32, 4, 1))
        self.score = nn.Sequential(Convolution(channels, 32), Convolution(32, 32), nn.Conv2d(32, len(CLASSES), 1))
        nn.init.constant_(self.score[-1].bias, -math.log(1 / _RARE - 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.box(x), self.score(x)], 1)


class Detector(nn.Module):
    """(B, 3, 64, 64) → a list of maps (B, 4 + classes, cells, cells), the fine one first; 148,000 parameters.

    >>> [tuple(found.shape) for found in Detector()(torch.zeros(1, 3, 64, 64))]
    [(1, 7, 16, 16), (1, 7, 8, 8)]
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(Convolution(3, 16, stride=2), Convolution(16, 32, stride=2))
        self.fine = SplitBlock(32, 32, residual=True)
        self.coarse = nn.Sequential(Convolution(32, 64, stride=2), SplitBlock(64, 64, residual=True), PooledPyramid(64))
        self.up, self.down = nn.Upsample(scale_factor=2), Convolution(32, 32, stride=2)
        self.neck = nn.ModuleList((SplitBlock(96, 32, residual=False), SplitBlock(96, 64, residual=False)))
        self.heads = nn.ModuleList((Head(32), Head(64)))

    def forward(self, x: Tensor) -> list[Tensor]:
        fine = self.fine(self.stem(x))
        coarse = self.coarse(fine)
        fine = self.neck[0](torch.cat([self.up(coarse), fine], 1))
        coarse = self.neck[1](torch.cat([self.down(fine), coarse], 1))
        return [head(maps) for head, maps in zip(self.heads, (fine, coarse), strict=True)]


class Counted(nn.Module):
    """The detector with what counts of its maps: scores of the classes, and distances to a box's sides as far as there
    is one. What the box branch says of cells without a shape is never read.
    """

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        flat = torch.cat([found.flatten(2) for found in self.detector(x)], 2).mT
        scores = flat[..., 4:].sigmoid()
        return {"boxes": flat[..., :4] * scores.amax(-1, keepdim=True), "scores": scores}


def _cells() -> tuple[Tensor, Tensor]:
    """(cells, 2) the centre of every cell of both maps in pixels, and (cells,) the stride of its map."""
    centres, strides = [], []
    for stride in STRIDES:
        along = (torch.arange(SIDE // stride) + 0.5) * stride
        centres.append(torch.stack(torch.meshgrid(along, along, indexing="xy"), -1).reshape(-1, 2))
        strides.append(torch.full((len(centres[-1]),), float(stride)))
    return torch.cat(centres), torch.cat(strides)


def _flat(maps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(B, cells, 4) corners in pixels and (B, cells, classes) logits."""
    flat = torch.cat([found.flatten(2) for found in maps], 2).mT
    centres, strides = _cells()
    sides = F.softplus(flat[..., :4]) * strides[:, None] * 2
    return torch.cat([centres - sides[..., :2], centres + sides[..., 2:]], -1), flat[..., 4:]


def detector_loss(maps: Sequence[Tensor], wanted: Sequence[Boxes]) -> Tensor:
    """Focal loss of the classes and generalized IoU of the boxes, each over the number of cells that have a box."""
    corners, logits = _flat(maps)
    centres, strides = _cells()
    targets = torch.zeros_like(logits)
    losses = []
    for number, boxes in enumerate(wanted):
        cell, box = _assigned(boxes, centres, strides)
        targets[number, cell, boxes.classes[box]] = 1.0
        losses.append(generalized_box_iou_loss(corners[number, cell], boxes.corners[box]))
    overlap = torch.cat(losses)
    focal = sigmoid_focal_loss(logits, targets, alpha=0.5, gamma=1.5, reduction="sum")
    return (focal + overlap.sum() * 2) / len(overlap)


def _assigned(boxes: Boxes, centres: Tensor, strides: Tensor) -> tuple[Tensor, Tensor]:
    """(cells, boxes) that belong together; a cell in two boxes has the smaller one."""
    low, high = boxes.corners[:, :2], boxes.corners[:, 2:]
    longest = (high - low).amax(1)
    coarse = longest >= _LARGE_FROM
    right_map = (strides[:, None] == STRIDES[1]) == coarse[None]
    inside = ((centres[:, None] > low) & (centres[:, None] < high)).all(-1)
    near = ((centres[:, None] - (low + high) / 2).abs() <= _REACH * strides[:, None, None]).all(-1)
    size = torch.where(right_map & inside & near, longest[None], torch.inf)
    least, box = size.min(1)
    cell = torch.isfinite(least).nonzero()[:, 0]
    return cell, box[cell]


@torch.no_grad()
def decode(maps: Sequence[Tensor], least_score: float = _CONFIDENT) -> list[Boxes]:
    """What output maps say is in each picture: each class of a cell by itself, and of overlapping boxes the best."""
    corners, logits = _flat(maps)
    found = []
    for place, scores in zip(corners, logits.sigmoid(), strict=True):
        cell, kind = (scores >= least_score).nonzero(as_tuple=True)
        chosen = scores[cell, kind]
        kept = batched_nms(place[cell], chosen, kind, _OVERLAP)[:_MOST_BOXES]
        found.append(Boxes(place[cell][kept], kind[kept], chosen[kept]))
    return found


def train_detector(seed: int, pictures: int = 3000, epochs: int = 14, batch_size: int = 32) -> Detector:
    """A trained detector in evaluation mode; the same seed gives the same one on the same machine."""
    torch.manual_seed(seed)
    model = Detector()
    images, boxes = draw_pictures(pictures, seed)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    steps = epochs * (pictures // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.15)
    for _ in range(epochs):
        order = torch.randperm(pictures)
        for chosen in order[: pictures // batch_size * batch_size].split(batch_size):
            batch, wanted = _flipped(images[chosen], [boxes[number] for number in chosen.tolist()])
            loss = detector_loss(model(batch), wanted)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            schedule.step()
    return model.eval()


def _flipped(images: Tensor, boxes: list[Boxes]) -> tuple[Tensor, list[Boxes]]:
    """Half of the batches mirrored."""
    if torch.rand(()) < 0.5:
        return images, boxes
    mirrored = []
    for found in boxes:
        left, top, right, bottom = found.corners.unbind(1)
        corners = torch.stack([SIDE - right, top, SIDE - left, bottom], 1)
        mirrored.append(Boxes(corners, found.classes, found.scores))
    return images.flip(-1), mirrored
