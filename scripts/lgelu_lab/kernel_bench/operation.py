"""The activation alone: forward, backward and both, of every provider on one input."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lgelu_lab.kernel_bench.cases import DTYPES, Case
from lgelu_lab.kernel_bench.memory import peak_bytes, saved_bytes
from lgelu_lab.kernel_bench.providers import REFERENCE, Copy, Provider, kernel_taken
from lgelu_lab.kernel_bench.results import ResultsFile, Row, number_text
from lgelu_lab.kernel_bench.timing import CLOCKS, Call, Summary, clock_name, interleave, summarize

_TENSORS_MOVED = {"forward": 2, "backward": 3, "both": 5}


@dataclass(frozen=True)
class Pace:
    """How long is measured: at most so many rounds, and no new one after so many seconds (see `interleave`)."""

    rounds: int
    seconds: float


@dataclass(frozen=True)
class Entry:
    """A provider's module at one λ, on the input of a case."""

    provider: Provider
    hardness: str
    kernel: str
    module: nn.Module

    @property
    def name(self) -> str:
        """Unique within a case."""
        return f"{self.provider.name} λ={self.hardness}" if self.hardness else self.provider.name


def measure_operation(
    case: Case,
    providers: list[Provider],
    hardness_values: list[float],
    modes: list[str],
    allocator: str,
    pace: Pace,
    results: ResultsFile,
) -> Iterator[Row]:
    """Measure what the results do not hold yet; yield each row after it is written."""
    torch.set_num_threads(case.threads)
    torch.compiler.reset()  # one input a case: what was compiled for others would count towards Dynamo's limit
    x, delta = case.new_input(0).requires_grad_(), case.new_input(1)
    entries = list(_entries(x, providers, hardness_values))
    for mode in modes:
        blanks = {entry.name: _blank_row(entry, case, mode, allocator) for entry in entries}
        pending = [entry for entry in entries if blanks[entry.name] not in results]
        if not pending:
            continue
        if REFERENCE not in blanks:
            raise RuntimeError("the reference, nn.GELU, is left out above, and every ratio needs it")
        timed = [entry for entry in entries if entry.name == REFERENCE or entry in pending]
        calls = dict(_running_calls(timed, mode, x, delta))
        summaries = summarize(interleave(calls, CLOCKS[_clock(case)], pace.rounds, pace.seconds), REFERENCE)
        memory = _memory([entry for entry in timed if entry.name in calls], mode, x, calls)
        for entry in pending:
            if entry.name in calls:
                numbers = _numbers(summaries[entry.name], case, mode) | memory[entry.name]
                row = blanks[entry.name].with_numbers(numbers)
                results.append(row)
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


def _entries(x: Tensor, providers: list[Provider], hardness_values: list[float]) -> Iterator[Entry]:
    for provider in providers:
        for hardness in hardness_values if provider.has_hardness else [1.0]:
            text = number_text(hardness) if provider.has_hardness else ""
            try:
                module = provider.build(x, hardness)
                yield Entry(provider, text, kernel_taken(provider, module, x), module)
            except (ImportError, RuntimeError) as error:
                _leave_out(provider.name, error)
                break


def _running_calls(entries: list[Entry], mode: str, x: Tensor, delta: Tensor) -> Iterator[tuple[str, Call]]:
    for entry in entries:
        try:
            call = mode_call(entry.module, mode, x, delta)
            call()
            yield entry.name, call
        except (ImportError, RuntimeError) as error:
            _leave_out(entry.name, error)


def _leave_out(name: str, error: Exception) -> None:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    _say_once(f"{name} is left out: {reason[0]}")


@cache
def _say_once(line: str) -> None:
    print(line, flush=True)


def _clock(case: Case) -> str:
    return clock_name(case.device, case.threads)


def _blank_row(entry: Entry, case: Case, mode: str, allocator: str) -> Row:
    return Row(
        provider=entry.provider.name,
        kernel=entry.kernel,
        mode=mode,
        size=case.size.name,
        memory_format=case.size.memory_format,
        elements=str(case.size.elements),
        dtype=case.dtype,
        hardness=entry.hardness,
        threads=str(case.threads),
        allocator=allocator,
        clock=_clock(case),
    )


def summary_numbers(summary: Summary) -> dict[str, float | int]:
    """The columns of a row that timing fills."""
    names = ("q20", "median", "q80")
    return {
        **{f"milliseconds_{name}": 1e3 * value for name, value in zip(names, summary.seconds, strict=True)},
        **{f"ratio_{name}": value for name, value in zip(names, summary.ratios, strict=True)},
        "rounds": summary.rounds,
        "repetitions": summary.repetitions,
    }


def _numbers(summary: Summary, case: Case, mode: str) -> dict[str, float | int]:
    moved = _TENSORS_MOVED[mode] * case.size.elements * DTYPES[case.dtype].itemsize
    return {**summary_numbers(summary), "gigabytes_per_second": moved / summary.seconds[1] / 1e9}


def _memory(
    entries: list[Entry], mode: str, x: Tensor, calls: Mapping[str, Call]
) -> dict[str, dict[str, float | int | None]]:
    """{entry: the columns that memory fills in this mode}."""
    found: dict[str, dict[str, float | int | None]] = {entry.name: {} for entry in entries}
    if mode != "backward":
        for entry in entries:
            found[entry.name]["saved_bytes_per_element"] = saved_bytes(lambda m=entry.module: m(x)) / x.numel()
    if mode == "both":
        peaks = {entry.name: peak_bytes(calls[entry.name], x.device.type) for entry in entries}
        for name, peak in peaks.items():
            found[name] |= {"peak_bytes": peak, "peak_ratio": peak / peaks[REFERENCE]}
    return found
