"""An int8 file of a network, judged on inputs that gave no ranges."""

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import nn

from hf_lgelu.comparing.distance import Distance
from hf_lgelu.export.comparison import SHARES, NetworkComparison, compare_networks, lost
from hf_lgelu.export.onnx_export import ONNX_FILE, save_beside_onnx
from hf_lgelu.export.onnx_run import OnnxModel
from hf_lgelu.export.quantize import MAX_RELATIVE_ERROR, operators_by_precision
from hf_lgelu.files import whole_folder
from hf_lgelu.formats import finite_or_none, score, significant

INT8_FILE, INT8_REPORT = "model-int8.onnx", "int8.json"

_ENOUGH = 96  # inputs for a verdict
_MARGIN = 0.01  # for losses that are no shares


@dataclass(frozen=True)
class JudgedInt8:
    """The verdict on an int8 file, and the numbers that decide it.

    `loss` is what int8 changes in the network's outputs (`hf_lgelu.export.comparison.lost`), against the same network
    in float32, and `measure` says of what it is a share or a distance. A distance from the original would count what
    the conversion has changed too, and labels may miss what changes. `allowed` is the loss of the original's int8 and a
    margin: one standard error of a share, at least one input, else 0.01; it is None without an original.
    `relative_error` is that of int8 alone, the largest of all outputs. `operators` are {"int8" and "float32":
    {operation: how many}} of the file, and `inputs` the names of its inputs.
    """

    comparison: NetworkComparison
    operators: Mapping[str, Mapping[str, int]]
    inputs: tuple[str, ...]
    measure: str
    loss: float
    allowed: float | None
    relative_error: float

    @property
    def is_good(self) -> bool:
        """Whether int8 loses at most what is allowed. Without an original, its relative error decides."""
        return self.relative_error <= MAX_RELATIVE_ERROR if self.allowed is None else self.loss <= self.allowed

    @property
    def line(self) -> str:
        """The verdict and its numbers in one line, for scripts."""
        verdict = "good" if self.is_good else "worse"
        allowed = f"relative error {significant(self.relative_error)} (allowed {MAX_RELATIVE_ERROR})"
        if self.allowed is not None:
            allowed = f"allowed {significant(self.allowed)} (what int8 takes from the original, and a margin)"
        float32, int8 = (row.metrics for row in self.comparison.by_network[-1])
        scores = [f"; {name} {score(name, int8[name])} (float32 {score(name, float32[name])})" for name in int8]
        return f"int8: {verdict}; {self.measure} {significant(self.loss)}, {allowed}{''.join(scores)}"

    def __str__(self) -> str:
        operators = (
            f"Operators in {precision}: {', '.join(f'{name} {count}' for name, count in found.items()) or 'none'}"
            for precision, found in self.operators.items()
        )
        return "\n".join([str(self.comparison), *operators, *self._notes(), self.line])

    def _notes(self) -> Iterator[str]:
        """Notes that the verdict lacks: few inputs judged, or the original's int8 is nearer."""
        if self.comparison.samples < _ENOUGH:
            yield f"Only {self.comparison.samples} inputs judged int8; give {_ENOUGH * 4 // 3} or more."
        *original, own = (rows[1].distance for rows in self.comparison.by_network)
        if original and original[0] and own and original[0].value < own.value:
            yield "The original's int8 is nearer to the original; take that one if the runtime has its gates."


class Int8RefusedError(RuntimeError):
    """An int8 file is not good, and was not kept. `report` has all that was measured, `advice` says what to do.

    >>> import tempfile, torch
    >>> from hf_lgelu import Int8RefusedError, export_int8
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> with torch.no_grad():  # one unit sets the range of all
    ...     net[0].weight[0], net[0].bias[0], net[2].weight[:, 0] = 1e4, 1e4, 1e-4
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         _ = export_int8(net, f"{folder}/int8", torch.randn(64, 4))
    ...     except Int8RefusedError as error:
    ...         print(error.report.is_good)
    False
    """

    def __init__(self, report: JudgedInt8) -> None:
        original = "compare it with the int8 of the original (`original`); " if report.allowed is None else ""
        fewer = report.comparison.rows[-1].operations != "layers"
        layers = "leave more in float (`operations` layers); " if fewer else ""
        self.report = report
        self.advice = (
            "Nothing is kept. Give data with more inputs, or with inputs from where the network is used; "
            f"{layers}convert with `effort` distill or a larger `width`; {original}or keep the file as it is "
            "(`allow_worse`)"
        )
        super().__init__(f"{report.line}. {self.advice}")


def export_int8(
    model: nn.Module,
    folder: str | os.PathLike,
    data: Any,
    *,
    original: nn.Module | None = None,
    source: str | os.PathLike | None = None,
    outputs: Sequence[str] | None = None,
    data_collator: Callable[[Any], Any] | None = None,
    operations: str | None = None,
    box_channels: int | None = None,
    allow_worse: bool = False,
    overwrite: bool = False,
) -> JudgedInt8:
    """Write model.onnx and model-int8.onnx into a new folder, if int8 is good on inputs that gave no ranges.

    Up to 64 distinct inputs, at most a quarter, give the ranges, and the others judge: by how many predictions or
    nearest neighbours int8 changes, or by the distance of other outputs. With `original`, int8 must change no more in
    the model than in the original, up to one standard error (`JudgedInt8.allowed`). Without `original`, the
    relative error from float32 must be at most 0.25, as in `quantize_onnx`. The folder also holds the report
    (int8.json), the config, and the tokenizer or image processor.

    Args:
        model: any float network, e.g. of `convert_to_relu`; it stays as it is.
        folder: the folder to write.
        data: inputs, as `convert_to_relu` takes them; labels give a score.
        original: the network that `model` was converted from.
        source: folder or Hub id whose tokenizer or image processor is copied.
        outputs: names of the outputs that count; by default those that the task reads.
        data_collator: makes a batch of a list of items, as in `ConversionConfig`: of a SentenceTransformer
            `model.preprocess`, with a list of texts as data.
        operations: as in `quantize_onnx`; for the original too.
        box_channels: how many channels of a detector's raw maps are the box, as in `ConversionConfig`.
        allow_worse: keep files that are not good.
        overwrite: replace a folder that holds a model.

    Raises:
        Int8RefusedError: int8 is not good (a RuntimeError). The message says what was measured and what to do. No file
            is kept.
        ImportError: the extra [onnx] is missing.
        ValueError: a network does not take the inputs, there is one input alone, or each batch has its own shape.
        FileExistsError: the folder is not empty, and `overwrite` is False.

    Example:
        >>> import tempfile, torch, hf_lgelu
        >>> model, rows = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()), torch.randn(80, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = hf_lgelu.export_int8(model, f"{folder}/int8", rows)
        >>> report.is_good, report.operators["int8"]["Gemm"]
        (True, 1)
    """
    first, second = (model, None) if original is None else (original, model)
    with whole_folder(folder, overwrite=overwrite) as new:
        with tempfile.TemporaryDirectory(dir=new) as files:
            compared = compare_networks(
                first,
                second,
                data,
                int8=True,
                outputs=outputs,
                data_collator=data_collator,
                operations=operations,
                box_channels=box_channels,
                onnx_dir=files,
            )
            for row, name in zip(compared.by_network[-1], (ONNX_FILE, INT8_FILE), strict=True):
                os.replace(Path(files, f"{row.network}-{row.precision}.onnx"), new / name)
        report = _judge(compared, operators_by_precision(new / INT8_FILE), OnnxModel(new / INT8_FILE).input_names)
        if not report.is_good and not allow_worse:
            raise Int8RefusedError(report)
        save_beside_onnx(model, new, source)
        document = {"verdict": report.line, "is_good": report.is_good, **asdict(report)}
        text = json.dumps(finite_or_none(document), indent=1, ensure_ascii=False, allow_nan=False)
        (new / INT8_REPORT).write_text(f"{text}\n", encoding="utf-8")
    return report


def _judge(
    compared: NetworkComparison, operators: Mapping[str, Mapping[str, int]], inputs: tuple[str, ...]
) -> JudgedInt8:
    *originals, own = (cast(Distance, rows[1].from_float32) for rows in compared.by_network)
    measure, loss = lost(own)
    errors = [own.relative_error, *(output.relative_error for output in own.outputs.values())]
    allowed = None
    if originals:
        share, margin = lost(originals[0])[1], _MARGIN
        if measure in SHARES:
            margin = max(math.sqrt(share * (1 - share) / compared.samples), 1 / compared.samples)
        allowed = share + margin
    return JudgedInt8(compared, operators, inputs, measure, loss, allowed, float(np.max(errors)))  # NaN where one is
