"""A YOLO-type network as its loader gives it: no config, and a tuple of decoded boxes and raw maps."""

import torch
from torch import Tensor, nn

BINS, CLASSES = 16, 3  # of each distance to a side; 4 · BINS channels are the box
_STRIDES = (4, 8)


class Conv(nn.Module):
    """Convolution, BatchNorm, and the gate that all of them share."""

    act = nn.SiLU()

    def __init__(self, channels: int, out: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class C2f(nn.Module):
    """One half passes, the other goes through two convolutions around which it is added."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.cv1, self.cv2 = Conv(channels, out, 1), Conv(3 * out // 2, out, 1)
        self.m = nn.Sequential(Conv(out // 2, out // 2), Conv(out // 2, out // 2))

    def forward(self, x: Tensor) -> Tensor:
        passed, worked = self.cv1(x).chunk(2, 1)
        return self.cv2(torch.cat([passed, worked, worked + self.m(worked)], 1))


class Yolo(nn.Module):
    """Pictures (B, 3, H, W) → (decoded (B, 4 + classes, cells), maps (B, 4 · bins + classes, H/4, W/4) and H/8)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Sequential(Conv(3, 8, 3, 2), Conv(8, 16, 3, 2)), Conv(16, 16, 3, 2)
        self.fine, self.coarse, self.neck = C2f(16, 16), C2f(16, 16), C2f(32, 16)
        self.up = nn.Upsample(scale_factor=2)
        self.cv2, self.cv3 = (
            nn.ModuleList(nn.Sequential(Conv(16, 16), nn.Conv2d(16, out, 1)) for _ in _STRIDES)
            for out in (4 * BINS, CLASSES)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        fine = self.fine(self.stem(x))
        coarse = self.coarse(self.deep(fine))
        fine = self.neck(torch.cat([self.up(coarse), fine], 1))
        heads = zip(self.cv2, self.cv3, (fine, coarse), strict=True)
        maps = [torch.cat([boxes(features), scores(features)], 1) for boxes, scores, features in heads]
        return self.decoded(maps), maps

    def decoded(self, maps: list[Tensor]) -> Tensor:
        """(B, 4 + classes, cells): distances to the sides in pixels, and probabilities."""
        found = []
        for stride, cells in zip(_STRIDES, maps, strict=True):
            bins = cells[:, : 4 * BINS].unflatten(1, (4, BINS)).softmax(2)
            sides = stride * (bins * torch.arange(BINS)[:, None, None]).sum(2)
            found.append(torch.cat([sides, cells[:, 4 * BINS :].sigmoid()], 1).flatten(2))
        return torch.cat(found, 2)


def load() -> Yolo:
    """The network in eval mode, whose gates matter and whose scores are rare."""
    torch.manual_seed(0)
    network = Yolo()
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1.5, 0.2)
                nn.init.normal_(module.bias, 0.0, 0.3)
        network.train()(torch.rand(64, 3, 32, 32))
        for head in network.cv3:
            head[-1].weight *= 8
            head[-1].bias -= 2
    return network.eval()
