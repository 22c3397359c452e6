"""The activation alone: forward, backward and both, of every provider on one input."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pandas
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lgelu_lab.kernel_bench.providers import REFERENCE, Copy, Provider
from lgelu_lab.kernel_bench.results import Cells, number_text
from lgelu_lab.kernel_bench.timing import CLOCKS, Call, clock_name, interleave, peak_bytes, saved_bytes, summarize
from lgelu_lab.rows_file import RowsFile

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = ("forward", "backward", "both")

SIZES = ("64x197x768", "4x1024x3072", "32x64x32x32", "32x64x32x32:channels_last", "256x256")
"""ViT-Base and GPT-2 small hidden units, a feature map of ResNet-18 in both layouts, and the MLP's."""


@dataclass(frozen=True)
class Bench:
    """Where is measured, for how long, and where the rows go.

    Attributes:
        device: "cpu" or "cuda".
        threads: of the CPU.
        allocator: its name in the rows.
        rounds: at most so many, and no new one after so many `seconds` (see `interleave`).
        results: holds what has been measured.
    """

    device: str
    threads: int
    allocator: str
    rounds: int
    seconds: float
    results: RowsFile

    @property
    def cells(self) -> Cells:
        """Those of every row."""
        clock = clock_name(self.device, self.threads)
        return {"threads": str(self.threads), "allocator": self.allocator, "clock": clock}


def parse_size(text: str) -> tuple[tuple[int, ...], torch.memory_format]:
    """256x256, 4096 or 32x64x32x32:channels_last as shape and memory format; ValueError for anything else."""
    numbers, _, memory_format = text.partition(":")
    factors = numbers.split("x")
    if not all(factor.isdecimal() and int(factor) > 0 for factor in factors):
        raise ValueError(
            f"a size is positive numbers with x between them, e.g. 256x256 or 32x64x32x32:channels_last, got {text!r}"
        )
    if memory_format not in ("", "channels_last"):
        raise ValueError(f"the memory format of {text!r} can only be channels_last")
    if memory_format and len(factors) != 4:
        raise ValueError(f"channels_last takes four numbers, batch x channels x height x width, got {text!r}")
    return tuple(map(int, factors)), torch.channels_last if memory_format else torch.contiguous_format


def new_input(size: str, dtype: str, device: str, seed: int) -> Tensor:
    """Standard normal numbers, the same for the same seed."""
    shape, memory_format = parse_size(size)
    x = torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return x.to(DTYPES[dtype]).contiguous(memory_format=memory_format)


def measure_operation(
    size: str, dtype: str, providers: list[Provider], hardness_values: list[float], modes: list[str], bench: Bench
) -> Iterator[Cells]:
    """Measure what the results do not hold yet; yield each row after it is written."""
    torch.set_num_threads(bench.threads)
    torch.compiler.reset()  # one input a case: what was compiled for others would count towards Dynamo's limit
    x, delta = new_input(size, dtype, bench.device, 0).requires_grad_(), new_input(size, dtype, bench.device, 1)
    shape, _, memory_format = size.partition(":")
    case = {"size": shape, "memory_format": memory_format or "contiguous", "elements": str(x.numel()), "dtype": dtype}
    modules: dict[str, nn.Module] = {}
    cells: dict[str, Cells] = {}
    for provider in providers:
        for hardness in hardness_values if provider.has_hardness else [1.0]:
            text = number_text(hardness) if provider.has_hardness else ""
            if (module := _running_module(provider, x, hardness)) is not None:
                known = {"provider": provider.name, "kernel": provider.kernel_taken(module, x), "hardness": text}
                name = f"{provider.name} λ={text}" if text else provider.name
                modules[name], cells[name] = module, bench.cells | case | known
    for mode in modes:
        blanks = {name: known | {"mode": mode} for name, known in cells.items()}
        yield from _measure_mode(modules, blanks, mode, x, delta, bench)


def _measure_mode(
    modules: dict[str, nn.Module], blanks: dict[str, Cells], mode: str, x: Tensor, delta: Tensor, bench: Bench
) -> Iterator[Cells]:
    """Time the calls that lack a row, and the reference's, in turn; write and yield the rows."""
    lacking = [name for name, blank in blanks.items() if blank not in bench.results]
    if not lacking:
        return
    calls = {name: mode_call(modules[name], mode, x, delta) for name in dict.fromkeys([REFERENCE, *lacking])}
    clock = CLOCKS[clock_name(bench.device, bench.threads)]
    seconds, repetitions = interleave(calls, clock, bench.rounds, bench.seconds)
    summary = summarize(seconds, REFERENCE).assign(repetitions=repetitions)
    if mode != "backward":
        saved = {name: saved_bytes(lambda n=name: modules[n](x)) / x.numel() for name in calls}
        summary["saved_bytes_per_element"] = pandas.Series(saved)
    if mode == "both":
        peaks = pandas.Series({name: peak_bytes(call, bench.device) for name, call in calls.items()})
        summary = summary.assign(peak_bytes=peaks, peak_ratio=peaks / peaks[REFERENCE])
    for name in lacking:
        row = blanks[name] | {column: number_text(value) for column, value in summary.loc[name].items()}
        bench.results.append(row)
        yield row


def mode_call(module: nn.Module, mode: str, x: Tensor, delta: Tensor) -> Call:
    """The call that is timed: a mode's share of y = module(x) and of the gradients of x and the parameters."""
    if isinstance(module, Copy):
        steps = {"forward": lambda: module(x), "backward": lambda: module.backward(x, delta)}
        return steps.get(mode) or (lambda: (module(x), module.backward(x, delta)))
    inputs = [x, *module.parameters()]
    if mode == "forward":
        return lambda: module(x)
    if mode == "both":
        return lambda: torch.autograd.grad(module(x), inputs, delta)
    edge = get_gradient_edge(module(x))  # keeps what backward needs, and not y
    return lambda: torch.autograd.grad(edge, inputs, delta, retain_graph=True)


def _running_module(provider: Provider, x: Tensor, hardness: float) -> nn.Module | None:
    try:
        module = provider.build(x, hardness)
        module(x)
    except RuntimeError as error:
        return _leave_out(provider.name, str(error).strip().partition("\n")[0])
    return module


@cache
def _leave_out(name: str, reason: str) -> None:
    print(f"{name} is left out: {reason}", flush=True)
