"""The forms in which a λ-GELU model leaves this package."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_lgelu.export.gelu import export_gelu
from hf_lgelu.export.onnx.onnx_export import export_onnx
from hf_lgelu.export.relu import export_relu
from hf_lgelu.models.checkpoint import copy_processor_files
from hf_lgelu.models.example_run import Inputs
from hf_lgelu.models.own_forward import independent_copy
from hf_lgelu.models.random_inputs import random_inputs
from hf_lgelu.models.whole_folder import whole_folder

ONNX_FILE = "model.onnx"


@dataclass(frozen=True)
class ExportOptions:
    """What every target understands.

    `source` is the folder or Hub id whose tokenizer and processor go along; `allow_soft` is `export_relu`'s.
    """

    source: str | os.PathLike | None = None
    inputs: Inputs | None = None
    allow_soft: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class ExportTarget:
    """One form: `export(model, folder, options)` writes the folder and returns a report that can be printed."""

    name: str
    description: str
    export: Callable[[PreTrainedModel, str | os.PathLike, ExportOptions], Any]


def _to_relu(model: PreTrainedModel, folder: str | os.PathLike, options: ExportOptions) -> Any:
    return export_relu(
        model, folder, source=options.source, inputs=options.inputs,
        allow_soft=options.allow_soft, overwrite=options.overwrite,
    )  # fmt: skip


def _to_gelu(model: PreTrainedModel, folder: str | os.PathLike, options: ExportOptions) -> Any:
    return export_gelu(model, folder, source=options.source, inputs=options.inputs, overwrite=options.overwrite)


def _to_onnx(model: PreTrainedModel, folder: str | os.PathLike, options: ExportOptions) -> Any:
    inputs = random_inputs(model) if options.inputs is None else options.inputs
    with whole_folder(folder, overwrite=options.overwrite) as new:
        report = export_onnx(independent_copy(model).float(), new / ONNX_FILE, inputs)
        model.config.save_pretrained(new)
        if options.source is not None:
            copy_processor_files(options.source, new)
    return replace(report, path=Path(folder) / ONNX_FILE)


EXPORT_TARGETS: dict[str, ExportTarget] = {
    target.name: target
    for target in (
        ExportTarget("relu", "ReLU in the place of hard gates", _to_relu),
        ExportTarget("gelu", "GELU, with λ folded into the weights, exactly", _to_gelu),
        ExportTarget("onnx", "the model as it is, for onnxruntime", _to_onnx),
    )
}


def check_target(name: str) -> ExportTarget:
    """Return the row of EXPORT_TARGETS, or raise naming the accepted ones."""
    if name not in EXPORT_TARGETS:
        raise ValueError(f"unknown export target {name!r}; accepted: {', '.join(EXPORT_TARGETS)}")
    return EXPORT_TARGETS[name]
