"""A table of two networks by score, distance, time and size, which helps to choose the one to ship."""

import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from timeit import Timer
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from hf_lgelu.comparing.comparison import compare_outputs
from hf_lgelu.comparing.distance import Distance
from hf_lgelu.environment import require
from hf_lgelu.export.onnx_export import export_onnx
from hf_lgelu.export.onnx_network import OnnxNetwork
from hf_lgelu.export.onnx_run import OnnxModel
from hf_lgelu.export.quantize import MAX_RELATIVE_ERROR, quantize_onnx
from hf_lgelu.formats import DETECTION, NONE, RELATIVE_ERROR, quoted, score, significant, text_table
from hf_lgelu.models.copies import independent_copy
from hf_lgelu.networks.batches import TRIED, Batch, cut_batches, nothing_given, read_batches, sample_keys
from hf_lgelu.networks.outputs import OutputReader, Outputs
from hf_lgelu.networks.run import call_with, evaluation_mode, in_dtype, require_taken, run_example
from hf_lgelu.networks.sites import uncompiled

ORIGINAL, CONVERTED, ALONE = "original", "converted", "network"
FLOAT32, INT8 = "float32", "int8"

_CALIBRATED_ON = 64  # the most inputs; a quarter of all, if that is less
_TIMED_AT_ONCE = 8  # inputs in a call
_ROUNDS, _FEWEST_ROUNDS = 15, 5
_ROUND_SECONDS = 0.005  # a quicker call is repeated for about this long
_MOST_SECONDS = 60.0  # for the rounds after the fewest

_ENOUGH = 96  # inputs for a verdict on int8
_MARGIN = 0.01  # for losses that are no shares


@dataclass(frozen=True)
class ComparedNetwork:
    """A network in one precision, "float32" or "int8". It is named "original" or "converted", or "network" if alone.

    `metrics` has the accuracy, or the perplexity of a causal language model; it is empty without labels. `distance` is
    that from the original in float32, None for the original itself. `milliseconds` are the quartiles of the processor
    time of a call on one thread. `megabytes` (10⁶ bytes) is the size of the ONNX file, or without int8 of the weights.
    In int8, `operations` says what computes in integers ("all" or "layers", `quantize_onnx`), and `from_float32` is the
    distance from the same network in float32.
    """

    network: str
    precision: str
    metrics: Mapping[str, float]
    distance: Distance | None
    milliseconds: tuple[float, float, float]
    megabytes: float
    operations: str | None = None
    from_float32: Distance | None = None

    @property
    def cells(self) -> dict[str, str]:
        """{title of a column: text of the cell}."""
        first, median, third = map(significant, self.milliseconds)
        return {
            "": self.network,
            "precision": self.precision,
            **{metric: score(metric, value) for metric, value in self.metrics.items()},
            **({} if self.distance is None else self.distance.main_measures),
            **({} if self.from_float32 is None else {"lost in int8": significant(lost(self.from_float32)[1])}),
            "ms (quartiles)": f"{median} ({first} to {third})",
            "megabytes": significant(self.megabytes),
        }


@dataclass(frozen=True)
class NetworkComparison:
    """The rows of `compare_networks`: the networks in float32, and then in int8. Its text is a table.

    `samples` inputs were scored and compared. Other `calibration_samples` gave the ranges of int8; 0 without int8. A
    timed call has `timed_samples` inputs, and `runtime` ("torch" or "onnxruntime") ran it. `left_out` are the names of
    the outputs that were left out.

    With int8 it also has the verdict on the last network's int8, which is compared with the same network in float32. A
    distance from the original would count what the conversion has changed too, and labels may miss what changes. `loss`
    is what int8 changes, in `measure`: what `lost` counts, or the largest relative error of all outputs if there is no
    original. `allowed` is the loss of the original's int8 and a margin: one standard error of a share, else 0.01. If
    there is no original, it is 0.25.
    """

    rows: tuple[ComparedNetwork, ...]
    samples: int
    calibration_samples: int
    timed_samples: int
    runtime: str
    left_out: tuple[str, ...] = ()
    measure: str = ""
    loss: float = math.nan
    allowed: float = math.nan

    @property
    def is_good(self) -> bool:
        """Whether int8 loses at most what is allowed."""
        return self.loss <= self.allowed

    @property
    def line(self) -> str:
        """The verdict and its numbers in one line, for scripts."""
        name = self.rows[-1].network
        float32, int8 = (row.metrics for row in self.rows if row.network == name)
        scores = [f"; {name} {score(name, int8[name])} (float32 {score(name, float32[name])})" for name in int8]
        why = "" if name == ALONE else " (what int8 takes from the original, and a margin)"
        return (
            f"int8: {'good' if self.is_good else 'worse'}; {self.measure} {significant(self.loss)}, allowed "
            f"{significant(self.allowed)}{why}{''.join(scores)}"
        )

    def __str__(self) -> str:
        titles = list(self.rows[-1].cells)  # the original has no distance, and float32 loses nothing in int8
        cells = ([row.cells.get(title, NONE) for title in titles] for row in self.rows)
        lines = text_table(titles, cells, text_columns=2)
        lines.append(
            f"On {self.samples:,} inputs. ms: processor time of a call with {self.timed_samples} of them, one thread "
            f"of {self.runtime}, the networks in turn."
        )
        if self.left_out:
            lines.append(f"Not compared: {quoted(self.left_out)}.")
        return "\n".join([*lines, *(self._about_int8() if self.measure else ())])

    def _about_int8(self) -> Iterator[str]:
        """Lines about ranges, operations and the verdict, which is the last line."""
        operations = str(self.rows[-1].operations)
        operations += " (only matrix products and convolutions in int8)" * (operations == "layers")
        measure = f"{lost(cast(Distance, self.rows[-1].from_float32))[0]}, against the same network in float32"
        yield (
            f"int8: {self.calibration_samples} other inputs gave the ranges; operations: {operations}; lost in int8: "
            f"{measure}."
        )
        if self.samples < _ENOUGH:
            yield f"Only {self.samples} inputs judged int8; give {_ENOUGH * 4 // 3} or more."
        yield self.line


def compare_networks(
    original: nn.Module,
    converted: nn.Module | None,
    data: Any,
    *,
    int8: bool = False,
    outputs: Sequence[str] | None = None,
    data_collator: Callable[[Any], Any] | None = None,
    operations: str | None = None,
    onnx_dir: str | os.PathLike | None = None,
    box_channels: int | None = None,
) -> NetworkComparison:
    """A table of two networks, and with `int8` of their int8 forms: score, distance to the original, time and size.

    With `int8`, both networks become ONNX files, an `OnnxNetwork` by its own graph. Times and sizes are those of the
    files. Up to 64 inputs, at most a quarter, give the ranges of int8. The networks are judged on the other inputs.
    Time is processor time on one thread; the networks run in turn. Both networks stay as they are.

    Args:
        original: the network that counts as right.
        converted: a network for the same task, e.g. of `convert_to_relu`; None compares the original with its int8
            alone.
        data: inputs, as `convert_to_relu` takes them; labels give a score. Inputs to which the converted network was
            fitted flatter that network.
        int8: whether to add the rows in int8, which need the extra [onnx].
        outputs: names of the outputs that count; by default those that the task reads.
        data_collator: makes a batch of a list of a dataset's items, as in `ConversionConfig`.
        operations: what int8 computes in integers, as in `quantize_onnx`.
        onnx_dir: a folder in which the files of int8 are kept, as original-float32.onnx and converted-int8.onnx. By
            default they are removed.
        box_channels: how many channels of a detector's raw maps are the box, as in `ConversionConfig`.

    Raises ValueError for inputs that a network does not take, for labels that are none of its classes, for outputs of
    another shape than the original's, and with `int8` for a single input or an ONNX file of one batch size. Raises
    ImportError for int8 without the extra [onnx], and FileExistsError if `onnx_dir` holds a file of the same name.

    Example:
        >>> import torch, hf_lgelu
        >>> original = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
        >>> relu, _ = hf_lgelu.convert_to_relu(original, torch.randn(200, 4))
        >>> comparison = hf_lgelu.compare_networks(original, relu, torch.randn(50, 4))
        >>> [(row.network, row.precision) for row in comparison.rows]
        [('original', 'float32'), ('converted', 'float32')]
    """
    if int8:
        require("onnxruntime", "onnx")
    reader = partial(OutputReader, names=outputs, box_channels=box_channels)
    first = _in_float32(original)
    networks = {ALONE: first} if converted is None else {ORIGINAL: first, CONVERTED: _in_float32(converted)}
    batches = [
        replace(batch, inputs=in_dtype(batch.inputs, torch.float32))
        for batch in cut_batches(read_batches(data, model=first, data_collator=data_collator))
    ]
    if not batches:
        raise nothing_given("data")
    if int8 and batches[0].is_sample:
        raise ValueError("the inputs of int8 have one shape, and here each batch has its own; leave int8 out")
    few = batches[0][:TRIED]
    for name, network in networks.items():
        require_taken(network, few.inputs, f"data, given to the {name} network")
    # What cannot be compared is refused before files are written.
    left_out = reader(first)(few.inputs).left_out
    compare_outputs(reader(first), {name: reader(network) for name, network in networks.items()}, [few])
    calibration, judged = _apart(batches) if int8 else ([], batches)
    timed = judged[0][:_TIMED_AT_ONCE]
    with ExitStack() as context:
        context.enter_context(torch.no_grad())
        for network in networks.values():
            context.enter_context(evaluation_mode(network))
        runs: dict[tuple[str, str], Callable[[Any], Any]] = {}
        sizes, computed = dict[tuple[str, str], int](), dict[str, str]()
        if int8:
            folder = Path(onnx_dir or context.enter_context(tempfile.TemporaryDirectory()))
            folder.mkdir(parents=True, exist_ok=True)
            for name, network in networks.items():
                files = {precision: folder / f"{name}-{precision}.onnx" for precision in (FLOAT32, INT8)}
                computed[name] = _write_onnx(network, calibration, files[FLOAT32], files[INT8], operations)
                for precision, file in files.items():
                    runs[name, precision] = _onnx_run(file, network, timed.inputs)
                    sizes[name, precision] = file.stat().st_size
            forms = sorted(runs, key=lambda form: form[1])  # float32 first
        else:
            runs = {(name, FLOAT32): partial(call_with, network) for name, network in networks.items()}
            sizes = {(name, FLOAT32): _bytes_of(network) for name, network in networks.items()}
            forms = [*runs]

        def read(form: tuple[str, str]) -> Callable[[Any], Outputs]:
            """The outputs of a network in one precision."""
            reads = reader(networks[form[0]])
            return partial(reads, call=lambda _, inputs: runs[form](inputs)) if int8 else reads

        metrics, compared = compare_outputs(reader(first), {str(form): read(form) for form in forms[1:]}, judged)
        from_float32 = {}
        for form in (form for form in forms if form[1] == INT8):
            network = networks[form[0]]
            alone = {str(form): read(form)}
            found = compared if network is first else compare_outputs(reader(network), alone, judged)[1]
            from_float32[form] = found[str(form)].distance
        times = _quartiles([partial(runs[form], timed.inputs) for form in forms])
    rows = []
    for form, milliseconds in zip(forms, times, strict=True):
        distance = compared[str(form)].distance if str(form) in compared else None
        row = ComparedNetwork(
            *form,
            metrics if distance is None else distance.metrics,
            distance,
            milliseconds,
            sizes[form] / 1e6,
            computed[form[0]] if form[1] == INT8 else None,
            from_float32.get(form),
        )
        rows.append(row)
    samples = sum(map(len, judged))
    return NetworkComparison(
        tuple(rows),
        samples,
        sum(map(len, calibration)),
        len(timed),
        "onnxruntime" if int8 else "torch",
        left_out,
        *(_verdict(list(from_float32.values()), samples) if int8 else ()),
    )


SHARES = ("share of predictions that differ", "share of nearest neighbours that differ")
"""What `lost` counts; of other outputs it gives a distance."""


def lost(distance: Distance) -> tuple[str, float]:
    """(what, how much) a network loses by a change of its outputs, whatever its labels say.

    Of class scores it is the share of predictions that differ, of embeddings the share of nearest neighbours that
    differ, of other outputs the distance.
    """
    if distance.detection is None and distance.agreement is not None:
        return SHARES[0], 1 - distance.agreement
    if "same_neighbour" in distance.embedding:
        return SHARES[1], 1 - distance.embedding["same_neighbour"]
    return DETECTION if distance.detection is not None else RELATIVE_ERROR, distance.value


def _verdict(changes: Sequence[Distance], samples: int) -> tuple[str, float, float]:
    """(the measure, what int8 changes in the last network, what is allowed), of each network's change by int8."""
    change = changes[-1]
    if len(changes) == 1:
        errors = [change.relative_error, *(output.relative_error for output in change.outputs.values())]
        return RELATIVE_ERROR, float(np.max(errors)), MAX_RELATIVE_ERROR  # NaN where one is
    measure, loss = lost(changes[0])
    is_share = measure in SHARES
    margin = max(math.sqrt(loss * (1 - loss) / samples), 1 / samples) if is_share else _MARGIN
    return *lost(change), loss + margin


def _write_onnx(
    network: nn.Module, calibration: Sequence[Batch], float32: Path, int8: Path, operations: str | None
) -> str:
    """Write the network as an ONNX file in float32 and in int8. Returns what int8 computes in integers."""
    rows = [batch.inputs if isinstance(batch.inputs, Tensor) else batch.tensors for batch in calibration]
    if isinstance(network, OnnxNetwork):
        if network.batch_size is not None:
            raise ValueError(
                f"the ONNX file takes {network.batch_size} rows at a time, and int8 is judged on batches of other "
                "sizes; give a file with a free batch axis, or call quantize_onnx with batches of this size"
            )
        network.save(float32)  # its file's own graph: torch's exporter cannot write shapes that are computed
    else:
        first = calibration[0][:_TIMED_AT_ONCE]
        export_onnx(network, float32, first.inputs if isinstance(first.inputs, Tensor) else first.tensors)
    # The table shows how far int8 is, so that no file is refused.
    return quantize_onnx(float32, int8, rows, operations=operations, max_relative_error=math.inf).operations


def _onnx_run(file: Path, network: nn.Module, example: Any) -> Callable[[Any], dict[str, Tensor]]:
    """A function of inputs that gives the outputs of the file by the names that `network` gives them."""
    model, output = OnnxModel(file), run_example(network, example)
    names: Sequence[str] = model.output_names
    if isinstance(output, Tensor):
        names = ("",)
    elif not isinstance(output, Mapping):
        names = [given.removeprefix("output_") for given in names]

    def run(inputs: Any) -> dict[str, Tensor]:
        given = inputs if isinstance(inputs, dict) else {model.input_names[0]: inputs}
        found = model({name: given[name] for name in model.input_names})
        return dict(zip(names, map(torch.from_numpy, found), strict=True))

    return run


def _in_float32(network: nn.Module) -> nn.Module:
    """The network itself, if it is in float32 on the CPU, else a copy that is."""
    network = uncompiled(network)
    tensors = itertools.chain(network.parameters(), network.buffers())
    kinds = {(value.device.type, value.dtype) for value in tensors if value.is_floating_point()}
    return network if kinds <= {("cpu", torch.float32)} else independent_copy(network).float().cpu()


def _apart(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """(inputs for the ranges of int8, all others), each input once.

    They are evenly spaced, because files are often sorted by class.
    """
    keys = [key for batch in batches for key in sample_keys(batch)]
    first = {key: number for number, key in reversed([*enumerate(keys)])}
    is_new = torch.tensor([first[key] == number for number, key in enumerate(keys)])
    parts = zip(batches, is_new.split([len(batch) for batch in batches]), strict=True)
    batches = [batch[new] for batch, new in parts if new.any()]
    total = sum(map(len, batches))
    if total < 2:
        raise ValueError(
            "give two or more distinct inputs: int8 takes its ranges from some of them and is judged on the others"
        )
    wanted = max(1, min(_CALIBRATED_ON, total // 4))
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[[number * total // wanted for number in range(wanted)]] = True
    masks = chosen.split([len(batch) for batch in batches])
    ranges = [batch[mask] for batch, mask in zip(batches, masks, strict=True) if mask.any()]
    return ranges, [batch[~mask] for batch, mask in zip(batches, masks, strict=True) if not mask.all()]


def _bytes_of(network: nn.Module) -> int:
    """The bytes of a checkpoint's tensors; shared weights count once."""
    values = [value for value in network.state_dict().values() if isinstance(value, Tensor)]
    return sum({value.data_ptr(): value.nbytes for value in values}.values())


def _quartiles(calls: Sequence[Callable[[], Any]]) -> list[tuple[float, float, float]]:
    """The quartiles of each call's processor time in milliseconds, on one thread of torch."""
    timers = [Timer(call, timer=time.process_time) for call in calls]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for call in calls:
            call()  # the first call allocates memory
        # A call that is shorter than a tick of the processor's clock takes 0 seconds.
        repeats = [max(1, math.ceil(_ROUND_SECONDS / max(timer.timeit(1), 1e-5))) for timer in timers]
        times: list[list[float]] = [[] for _ in calls]
        began = time.monotonic()
        for number in range(_ROUNDS):
            if number >= _FEWEST_ROUNDS and time.monotonic() - began > _MOST_SECONDS:
                break
            for place in sorted(range(len(calls)), reverse=number % 2 == 1):
                times[place].append(1e3 * timers[place].timeit(repeats[place]) / repeats[place])
    finally:
        torch.set_num_threads(threads)
    quartiles = np.quantile(times, (0.25, 0.5, 0.75), axis=1).T
    return [(first, median, third) for first, median, third in quartiles.tolist()]
