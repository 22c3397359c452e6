"""A small detector shaped as YOLO's are, which learns to find drawn shapes. Not in the paper."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils import ModelOutput, can_return_tuple

from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions, ModelOptions, choose_rows, collate_rows
from lgelu_lab.benchmarks.drawn_boxes import CLASSES, SIDE, areas, average_precision, draw_pictures
from lgelu_lab.benchmarks.images import ImageRows
from lgelu_lab.benchmarks.source import Origin

_STRIDES = (4, 8)  # pixels between two cells of each output map
_LARGE_FROM = 20  # pixels of a box's longer side; larger boxes belong to the coarse map
_REACH = 1.5  # a box belongs to the cells inside it within so many strides of its centre
_RARE = 0.01  # the share of cells with a box that the class scores begin with
_CONFIDENT, _OVERLAP, _MOST_FOUND = 0.01, 0.6, 50
_TRAINED, _EVALUATED = 4096, 1000


class DetectorConfig(PreTrainedConfig):
    """The activation of a `Detector`, a key of transformers' `ACT2FN`."""

    model_type = "lgelu_detector"
    hidden_act: str = "silu"


AutoConfig.register(DetectorConfig.model_type, DetectorConfig)


@dataclass
class DetectorOutput(ModelOutput):
    """As of transformers' detectors: `logits` (B, cells, classes), read by a sigmoid, and `pred_boxes` (B, cells, 4).

    A cell's box is the distances from its centre to left, top, right and bottom, before `corners` reads them.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    pred_boxes: Tensor | None = None


class Convolution(nn.Sequential):
    """Convolution, BatchNorm, activation."""

    def __init__(self, channels: int, out: int, act: str, kernel: int = 3, stride: int = 1) -> None:
        convolution = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(out), ACT2FN[act])


class SplitBlock(nn.Module):
    """C2f: one half passes, the other goes through a pair of convolutions, and all parts are joined."""

    def __init__(self, channels: int, out: int, act: str, residual: bool) -> None:
        super().__init__()
        self.first, self.join = Convolution(channels, out, act, 1), Convolution(3 * out // 2, out, act, 1)
        self.inner = nn.Sequential(*(Convolution(out // 2, out // 2, act) for _ in range(2)))
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        passed, worked = self.first(x).chunk(2, 1)
        new = self.inner(worked) + worked if self.residual else self.inner(worked)
        return self.join(torch.cat([passed, worked, new], 1))


class Detector(PreTrainedModel):
    """Pictures (B, 3, 64, 64) → class scores and a box of each of 320 cells; 0.20 million weights, 28 gates.

    The backbone halves a picture three times; a fine and a coarse map exchange what they hold, and each has two
    branches: distances to the sides of a box, and scores of the classes.
    """

    config: DetectorConfig
    main_input_name = "pixel_values"
    accepts_loss_kwargs = False  # the loss is a mean over the batch

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__(config)
        act = config.hidden_act
        self.stem = nn.Sequential(Convolution(3, 16, act, stride=2), Convolution(16, 32, act, stride=2))
        self.fine = SplitBlock(32, 32, act, residual=True)
        self.coarse = nn.Sequential(Convolution(32, 64, act, stride=2), SplitBlock(64, 64, act, residual=True))
        self.up, self.down = nn.Upsample(scale_factor=2), Convolution(32, 32, act, stride=2)
        self.neck = nn.ModuleList(SplitBlock(96, out, act, residual=False) for out in (32, 64))
        self.boxes, self.scores = (
            nn.ModuleList(
                nn.Sequential(Convolution(size, 32, act), Convolution(32, 32, act), nn.Conv2d(32, out, 1))
                for size in (32, 64)
            )
            for out in (4, config.num_labels)
        )
        for head in self.scores:
            nn.init.constant_(head[-1].bias, -math.log(1 / _RARE - 1))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """torch's own; transformers would draw convolutions from a normal of std 0.02. Scores begin rare."""

    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> DetectorOutput:
        """What is in each picture; with `labels`, boxes as `draw_pictures` gives them, the loss as well."""
        fine = self.fine(self.stem(pixel_values))
        coarse = self.coarse(fine)
        fine = self.neck[0](torch.cat([self.up(coarse), fine], 1))
        coarse = self.neck[1](torch.cat([self.down(fine), coarse], 1))
        boxes, logits = (
            torch.cat([head(maps).flatten(2) for head, maps in zip(heads, (fine, coarse), strict=True)], 2).mT
            for heads in (self.boxes, self.scores)
        )
        loss = None if labels is None else detection_loss(logits.float(), boxes.float(), labels)
        return DetectorOutput(loss=loss, logits=logits, pred_boxes=boxes)


@cache
def _cells(device: torch.device) -> tuple[Tensor, Tensor]:
    """(cells, 2) the centre of every cell of both maps in pixels, and (cells, 1) the stride of its map."""
    centres, strides = [], []
    for stride in _STRIDES:
        along = (torch.arange(SIDE // stride, device=device) + 0.5) * stride
        centres.append(torch.stack(torch.meshgrid(along, along, indexing="xy"), -1).reshape(-1, 2))
        strides.append(torch.full((len(centres[-1]), 1), float(stride), device=device))
    return torch.cat(centres), torch.cat(strides)


def corners(boxes: Tensor) -> Tensor:
    """(B, cells, 4) left, top, right, bottom in pixels."""
    centres, strides = _cells(boxes.device)
    sides = F.softplus(boxes) * strides * 2
    return torch.cat([centres - sides[..., :2], centres + sides[..., 2:]], -1)


def detection_loss(logits: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
    """Focal loss of the classes and generalized IoU of the boxes, over the number of cells that have a box.

    Small boxes belong to the fine map, large ones to the coarse map; a cell in two boxes has the smaller one.
    """
    centres, strides = _cells(labels.device)
    low, high = labels[:, None, :, :2], labels[:, None, :, 2:4]
    longest = (high - low).amax(-1)
    at_home = (strides == _STRIDES[1]) == (longest >= _LARGE_FROM)
    place = centres[:, None]
    inside = ((place > low) & (place < high)).all(-1)
    near = ((place - (low + high) / 2).abs() <= _REACH * strides[:, None]).all(-1)
    size, chosen = torch.where(at_home & inside & near, longest, torch.inf).min(-1)  # (B, cells)
    has_box = torch.isfinite(size).float()
    wanted = labels.gather(1, chosen[..., None].expand(-1, -1, 5))
    given, wanted_box = corners(boxes), wanted[..., :4]
    shared, own, others = areas(given, wanted_box)
    union = own + others - shared
    low, high = torch.minimum(given[..., :2], wanted_box[..., :2]), torch.maximum(given[..., 2:], wanted_box[..., 2:])
    hull = (high - low).prod(-1)
    overlap = shared / union - (hull - union) / hull
    classes = (torch.arange(logits.shape[-1], device=labels.device) == wanted[..., 4:]) * has_box[..., None]
    chance = torch.where(classes > 0, logits, -logits).sigmoid()  # of what is right
    focal = 0.5 * (1 - chance) ** 1.5 * F.binary_cross_entropy_with_logits(logits, classes, reduction="none")
    return (focal.sum() + 2 * ((1 - overlap) * has_box).sum()) / has_box.sum().clamp(min=1)


@torch.no_grad()
def find_boxes(outputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """(B, 50, 6) corners, class and score, the best first: Trainer's `preprocess_logits_for_metrics`.

    Each class of a cell counts by itself. Of overlapping boxes of a class the best stays; the score of others is 0.
    """
    logits, boxes = outputs
    scores, place = logits.float().sigmoid().flatten(1).topk(_MOST_FOUND)
    kind = place % logits.shape[-1]
    found = corners(boxes.float()).gather(1, (place // logits.shape[-1])[..., None].expand(-1, -1, 4))
    shared, own, others = areas(found[:, :, None], found[:, None])
    rivals = (shared > _OVERLAP * (own + others - shared)) & (kind[:, :, None] == kind[:, None])
    kept = scores >= _CONFIDENT
    for rank in range(_MOST_FOUND - 1):
        kept[:, rank + 1 :] &= ~(kept[:, rank, None] & rivals[:, rank, rank + 1 :])
    return torch.cat([found, kind[..., None], (scores * kept)[..., None]], -1)


def load_pictures(options: DataOptions | None = None, model: ModelOptions | None = None) -> BenchmarkData:
    """4,096 pictures to train on and 1,000 others to evaluate on; `options.data_dir` has no part in it."""
    chosen = choose_rows(_TRAINED, _EVALUATED, options or DataOptions())
    rows = [ImageRows(*draw_pictures(rows, seed), [0.5] * 3, [0.25] * 3, SIDE) for seed, rows in enumerate(chosen)]
    origin = Origin("drawn from seeds 0 (trained on) and 1 (evaluated on)")
    return BenchmarkData(*rows, "pictures of another seed", CLASSES, origin=origin)


def build_detector(activation: str, data: BenchmarkData, options: ModelOptions | None = None) -> Detector:
    """A freshly initialized detector; weights from torch's global generator."""
    return Detector(DetectorConfig(hidden_act=activation, id2label=dict(enumerate(data.label_names))))


DETECTOR = Benchmark(
    name="detector",
    load=load_pictures,
    build_model=build_detector,
    collate=collate_rows,
    compute_metrics=average_precision,
    preprocess_logits=find_boxes,
    metric="ap",
    greater_is_better=True,
    init_hardness=1.05,  # from 1.0067 λ would hardly move in so few steps
    defaults={
        "optim": "adamw_torch", "learning_rate": 4e-3, "weight_decay": 1e-2, "lr_scheduler_type": "cosine",
        "warmup_steps": 0.15, "max_grad_norm": 10.0, "per_device_train_batch_size": 64, "num_train_epochs": 16,
        "per_device_eval_batch_size": 250, "remove_unused_columns": False,
    },
)  # fmt: skip
