"""What is measured on: the size, dtype, threads and device of an input."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = ("forward", "backward", "both")
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
DEVICES = ("cpu", "cuda")

SIZES = ("64x197x768", "4x1024x3072", "32x64x32x32", "32x64x32x32:channels_last", "256x256")
"""ViT-Base and GPT-2 small hidden units, a feature map of ResNet-18 in both layouts, and the MLP's."""

SWEEP_SIZES = tuple(str(2**power) for power in range(12, 25))


@dataclass(frozen=True)
class Size:
    """A shape and how it lies in memory, a key of MEMORY_FORMATS."""

    shape: tuple[int, ...]
    memory_format: str = "contiguous"

    @property
    def name(self) -> str:
        """The shape as it is written on the command line, e.g. 256x256."""
        return "x".join(map(str, self.shape))

    @property
    def elements(self) -> int:
        """Their number."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Case:
    """One input: `dtype` is a key of DTYPES, `threads` those of a CPU, `device` one of DEVICES."""

    size: Size
    dtype: str
    threads: int
    device: str

    def new_input(self, seed: int) -> Tensor:
        """Standard normal numbers, the same for the same seed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.randn(self.size.shape, generator=generator, device=self.device)
        return x.to(DTYPES[self.dtype]).contiguous(memory_format=MEMORY_FORMATS[self.size.memory_format])


def parse_size(text: str) -> Size:
    """256x256, 4096 or 32x64x32x32:channels_last as a Size; raise ValueError for anything else."""
    shape_text, _, memory_format = text.partition(":")
    factors = shape_text.split("x")
    if not all(factor.isdecimal() and int(factor) > 0 for factor in factors):
        raise ValueError(
            f"a size is positive numbers with x between them, e.g. 256x256 or 32x64x32x32:channels_last, got {text!r}"
        )
    size = Size(tuple(map(int, factors)), memory_format or "contiguous")
    if size.memory_format not in MEMORY_FORMATS:
        raise ValueError(f"the memory format of {text!r} must be one of {', '.join(MEMORY_FORMATS)}")
    if size.memory_format == "channels_last" and len(size.shape) != 4:
        raise ValueError(f"channels_last takes four numbers, batch x channels x height x width, got {text!r}")
    return size
