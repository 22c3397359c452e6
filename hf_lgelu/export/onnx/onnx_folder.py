"""A folder with a model as an ONNX file, its config and what prepares its inputs."""

import os
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_lgelu.export.onnx.onnx_export import OnnxReport, export_onnx
from hf_lgelu.files import whole_folder
from hf_lgelu.models.checkpoint import copy_processor_files
from hf_lgelu.models.example_run import Inputs, in_dtype
from hf_lgelu.models.own_forward import independent_copy
from hf_lgelu.models.random_inputs import random_inputs

ONNX_FILE = "model.onnx"


def export_onnx_folder(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    source: str | os.PathLike | None = None,
    inputs: Inputs | None = None,
) -> OnnxReport:
    """`export_onnx` of a copy in float32; `source` and `inputs` are as `ExportTarget.run` has them.

    Raises what `export_onnx` and `whole_folder` raise.
    """
    inputs = random_inputs(model) if inputs is None else inputs
    with whole_folder(folder) as new:
        report = export_onnx(independent_copy(model).float(), new / ONNX_FILE, in_dtype(inputs, torch.float32))
        model.config.save_pretrained(new)
        if source is not None:
            copy_processor_files(source, new)
    return replace(report, path=Path(folder) / ONNX_FILE)
