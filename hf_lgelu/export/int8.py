"""An int8 file of a network, judged on inputs that gave no ranges."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from hf_lgelu.export.comparison import ALONE, FLOAT32, INT8, NetworkComparison, compare_networks
from hf_lgelu.export.onnx_export import ONNX_FILE, save_beside_onnx
from hf_lgelu.files import whole_folder
from hf_lgelu.formats import finite_or_none

INT8_FILE, INT8_REPORT = "model-int8.onnx", "int8.json"


class Int8RefusedError(RuntimeError):
    """An int8 file is not good, and was not kept. `report` has all that was measured, `advice` says what to do.

    >>> import tempfile, torch
    >>> from hf_lgelu.export.int8 import Int8RefusedError, export_int8
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

    def __init__(self, report: NetworkComparison) -> None:
        original = "" if report.rows[-1].network != ALONE else "compare it with the int8 of the original (`original`); "
        fewer = report.rows[-1].operations != "layers"
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
) -> NetworkComparison:
    """Write model.onnx and model-int8.onnx into a new folder, if int8 is good on inputs that gave no ranges.

    Up to 64 distinct inputs, at most a quarter, give the ranges, and the others judge: by how many predictions or
    nearest neighbours int8 changes, or by the distance of other outputs. With `original`, int8 must change no more in
    the model than in the original, up to one standard error. Without `original`, the relative error from float32 must
    be at most 0.25, as in `quantize_onnx`. The report is that of `compare_networks`, with the verdict in its last line.
    The folder also holds the report (int8.json), the config, and the tokenizer or image processor.

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
        ValueError: a network does not take the inputs, there is only one input, each batch has its own shape, or an
            ONNX file takes one batch size.
        FileExistsError: the folder is not empty, and `overwrite` is False.

    Example:
        >>> import tempfile, torch, hf_lgelu
        >>> model, rows = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()), torch.randn(80, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = hf_lgelu.export_int8(model, f"{folder}/int8", rows)
        >>> report.is_good
        True
    """
    first, second = (model, None) if original is None else (original, model)
    with whole_folder(folder, overwrite=overwrite) as new:
        with tempfile.TemporaryDirectory(dir=new) as files:
            report = compare_networks(
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
            for precision, name in ((FLOAT32, ONNX_FILE), (INT8, INT8_FILE)):
                os.replace(Path(files, f"{report.rows[-1].network}-{precision}.onnx"), new / name)
        if not report.is_good and not allow_worse:
            raise Int8RefusedError(report)
        save_beside_onnx(model, new, source)
        document = {"verdict": report.line, "is_good": report.is_good, **asdict(report)}
        text = json.dumps(finite_or_none(document), indent=1, ensure_ascii=False, allow_nan=False)
        (new / INT8_REPORT).write_text(f"{text}\n", encoding="utf-8")
    return report
