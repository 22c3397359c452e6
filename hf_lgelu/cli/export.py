"""`hf-lgelu export`: from a trained λ-GELU checkpoint to one that needs nothing of this package."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_lgelu.cli.arguments import ExportArguments
from hf_lgelu.cli.checkpoint import push, read_checkpoint, require_hardness
from hf_lgelu.cli.command import say
from hf_lgelu.cli.compare import print_table
from hf_lgelu.cli.data import Rows
from hf_lgelu.cli.inputs import read_rows
from hf_lgelu.export.hub.card import write_card
from hf_lgelu.export.onnx.onnx_export import OPSET, save_onnx
from hf_lgelu.export.plain import save_plain
from hf_lgelu.files import whole_folder

_EXAMPLE_ROWS = 64


def export(arguments: ExportArguments, evaluation: Rows | None) -> Any:
    """Export, compare on --evaluation, write the card, put the folder in place, push; returns the export's report.

    Raises what `export_relu`, `export_gelu` and `export_onnx` raise, and ValueError for a checkpoint without λ-GELU
    where --to gives another checkpoint.
    """
    folder, is_checkpoint = Path(arguments.output_dir), arguments.to != "onnx"
    progress = arguments.progress
    # Entered first: a folder that cannot be written to must not be found out after the work.
    with whole_folder(folder, overwrite=arguments.overwrite) as new:
        given = read_checkpoint(arguments.model, **arguments.reading)
        if is_checkpoint:
            require_hardness(given)
        rows = None if evaluation is None else read_rows(evaluation, given)
        inputs = None if rows is None else rows.first(_EXAMPLE_ROWS)
        sentences = given.sentences if is_checkpoint else None
        place = new if sentences is None else new / sentences.encoder
        place.mkdir(exist_ok=True)
        # With the folder's own name, instead of that under which it is written.
        report: Any
        if is_checkpoint:
            report = save_plain(
                given.model,
                place,
                form=arguments.to,
                source=given.processors,
                inputs=inputs,
                allow_soft=arguments.allow_soft,
            )
            report = replace(report, folder=str(folder))
        else:  # of a sentence encoder with its pooling
            opset = arguments.opset or OPSET
            report = save_onnx(given.network, place, source=given.processors, inputs=inputs, opset=opset)
            report = replace(report, path=folder / report.path.name)
        if sentences is not None:
            sentences.copy_rest(new)
        say(str(report))
        if rows is None:
            say("  these inputs are random; --evaluation DATA takes real ones")
        compared = None
        if is_checkpoint and rows is not None:
            exported = read_checkpoint(str(new), **arguments.reading).network
            compared = print_table(given.network, exported, rows, int8=False, progress=progress)
        if is_checkpoint:
            write_card(
                given.model,
                new,
                form=arguments.to,
                change=report.change,
                compared=compared,
                license=arguments.license,
                repo_id=arguments.push_to_hub,
            )
    say(f"Saved in {folder}" + (", with the model card README.md" if is_checkpoint else ""))
    push(folder, arguments.push_to_hub, private=arguments.private, tell=say)
    return report
