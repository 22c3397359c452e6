"""`hf-lgelu export`: a checkpoint as one that needs no hf_lgelu, as ONNX, or as a judged int8 file."""

import inspect
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from hf_lgelu.cli.arguments import ExportArguments
from hf_lgelu.cli.checkpoint import Checkpoint, push, read_checkpoint
from hf_lgelu.cli.command import say
from hf_lgelu.cli.compare import conversion_options, print_table
from hf_lgelu.cli.data import Rows
from hf_lgelu.cli.inputs import read_rows, tokenizer_of
from hf_lgelu.cli.onnx_file import quantize_file
from hf_lgelu.export.card import top_table, write_export_card
from hf_lgelu.export.comparison import NetworkComparison
from hf_lgelu.export.int8 import INT8_FILE, Int8RefusedError, export_int8
from hf_lgelu.export.onnx_export import ONNX_FILE, OPSET, OnnxReport, export_onnx, save_beside_onnx
from hf_lgelu.export.onnx_run import OnnxModel
from hf_lgelu.export.plain import CheckpointExport, export_gelu, export_relu
from hf_lgelu.files import is_onnx, whole_folder
from hf_lgelu.models.copies import independent_copy
from hf_lgelu.networks.run import in_dtype, random_inputs

_EXAMPLE_ROWS = 64


def export(arguments: ExportArguments, data: Rows | None, evaluation: Rows | None) -> Any:
    """Export, compare on --evaluation, write folder and card, and push. Returns the export's report.

    Raises the errors of `export_relu`, `export_gelu`, `export_onnx` and `export_int8`. Raises ValueError if a
    checkpoint without λ-GELU is given to --to relu or gelu.
    """
    if is_onnx(arguments.model):
        return quantize_file(arguments)
    if data is not None:
        return _export_int8(arguments, data)
    folder = Path(arguments.output_dir)
    # Entered before the work, which would be lost if the folder could not be written.
    with whole_folder(folder, overwrite=arguments.overwrite) as new:
        checkpoint = read_checkpoint(arguments.model, **arguments.reading)
        write: Callable[..., Any] = _export_onnx if arguments.to == "onnx" else _export_plain
        report = write(arguments, checkpoint, evaluation, new)
    say(f"Saved in {folder}{'' if arguments.to == 'onnx' else ', with the model card README.md'}")
    push(folder, arguments.push_to_hub, private=arguments.private, tell=say)
    return report


_RANDOM = "  These inputs are random; give real ones by --evaluation DATA."


def _export_plain(
    arguments: ExportArguments, checkpoint: Checkpoint, evaluation: Rows | None, folder: Path
) -> CheckpointExport:
    """Write a checkpoint without λ-gates, and its card with the table of both networks."""
    rows = None if evaluation is None else read_rows(evaluation, checkpoint)
    inputs = None if rows is None else rows.first(_EXAMPLE_ROWS)
    save = partial(export_relu, allow_soft=arguments.allow_soft) if arguments.to == "relu" else export_gelu
    source = None if checkpoint.is_of_sentences else checkpoint.name
    with TemporaryDirectory(dir=folder) as part:
        report = save(checkpoint.model, f"{part}/model", source=source, inputs=inputs)
        if checkpoint.is_of_sentences:  # the files of the whole, and the new ones of its encoder
            checkpoint.save(checkpoint.network, folder)
        shutil.copytree(f"{part}/model", folder, copy_function=os.replace, dirs_exist_ok=True)
    say(str(report))
    top = ""
    if rows is None:
        say(_RANDOM)
    else:
        exported = read_checkpoint(str(folder), **arguments.reading).network
        original, other = print_table(checkpoint.network, exported, rows, str(folder), progress=arguments.progress).rows
        top = "" if other.distance is None else top_table(original.metrics, {"this model": other.distance})
    write_export_card(report, folder, top=top, license=arguments.license, repo_id=arguments.push_to_hub)
    return report


def _export_onnx(
    arguments: ExportArguments, checkpoint: Checkpoint, evaluation: Rows | None, folder: Path
) -> OnnxReport:
    """Write the network with its own gates as an ONNX file; of a sentence encoder with its pooling."""
    rows = None if evaluation is None else read_rows(evaluation, checkpoint)
    inputs = _example_inputs(checkpoint) if rows is None else rows.first(_EXAMPLE_ROWS)
    network, inputs = independent_copy(checkpoint.network).float(), in_dtype(inputs, torch.float32)
    report = export_onnx(network, folder / ONNX_FILE, inputs, opset=arguments.opset or OPSET)
    save_beside_onnx(checkpoint.network, folder, checkpoint.name)
    # The report names the final folder, not the hidden one that is written first.
    report = replace(report, path=Path(arguments.output_dir) / ONNX_FILE)
    say(str(report))
    if rows is None:
        say(_RANDOM)
    return report


def _export_int8(arguments: ExportArguments, data: Rows) -> NetworkComparison:
    """Write the float32 and the int8 file if int8 is good. In either case the last line on stdout is the verdict."""
    checkpoint = read_checkpoint(arguments.model, **arguments.reading)
    original = None if arguments.original is None else read_checkpoint(arguments.original, **arguments.reading).network
    rows = read_rows(data, checkpoint)
    say(f"Writing ONNX and int8, and judging int8 on {len(rows):,} inputs of {rows.description} ...")
    try:
        report = export_int8(
            checkpoint.network,
            arguments.output_dir,
            rows.batches("int8", progress=arguments.progress),
            original=original,
            source=checkpoint.name,
            operations=arguments.operations,
            allow_worse=arguments.allow_worse,
            overwrite=arguments.overwrite,
            **conversion_options(checkpoint.name, rows),
        )
    except Int8RefusedError as error:
        say(str(error.report))
        raise RuntimeError(error.advice) from error  # the verdict is on stdout
    folder = Path(arguments.output_dir)
    say(f"Saved in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    file = folder / INT8_FILE
    say(f'Run it in Python: onnxruntime.InferenceSession("{file}"). It takes {", ".join(OnnxModel(file).input_names)}.')
    say(str(report))
    return report


def _example_inputs(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Random inputs, with each input that the tokenizer, if there is one, gives the network."""
    inputs = random_inputs(checkpoint.model)
    with suppress(ValueError):
        names = tokenizer_of(checkpoint).model_input_names if "input_ids" in inputs else ()
        taken = [name for name in names if name in inspect.signature(checkpoint.model.forward).parameters]
        inputs |= {name: torch.zeros_like(inputs["input_ids"]) for name in taken if name not in inputs}
    return inputs
