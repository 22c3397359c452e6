"""`hf-lgelu export`: from a trained λ-GELU checkpoint to one that needs nothing of this package."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_lgelu.cli.arguments import EXPORT_TARGETS, ExportArguments
from hf_lgelu.cli.checkpoint import push, read_checkpoint, require_hardness
from hf_lgelu.cli.command import say
from hf_lgelu.cli.compare import print_table
from hf_lgelu.cli.inputs import evaluation_set
from hf_lgelu.export.hub.card import write_card
from hf_lgelu.files import whole_folder

_EXAMPLE_ROWS = 64


def export(arguments: ExportArguments) -> Any:
    """Export, compare on --evaluation, write the card, put the folder in place, push; returns the export's report.

    Raises what the export raises (`EXPORT_TARGETS`), and ValueError for a checkpoint without λ-GELU where --to gives
    another checkpoint.
    """
    target, folder = EXPORT_TARGETS[arguments.to], Path(arguments.output_dir)
    progress = arguments.progress
    # Entered first: a folder that cannot be written to must not be found out after the work.
    with whole_folder(folder, overwrite=arguments.overwrite) as new:
        given = read_checkpoint(arguments.model, progress=progress)
        if target.is_checkpoint:
            require_hardness(given)
        evaluation = evaluation_set(arguments, given)
        inputs = None if evaluation is None else evaluation.first(_EXAMPLE_ROWS)
        asked = {"allow_soft": arguments.allow_soft, "opset": arguments.opset}
        options: dict[str, Any] = {name: value for name, value in asked.items() if value and name in target.options}
        sentences = given.sentences if target.is_checkpoint else None
        place = new if sentences is None else new / sentences.encoder
        place.mkdir(exist_ok=True)
        network = given.model if target.is_checkpoint else given.network  # of a sentence encoder with its pooling
        report = target.export(network, place, source=given.processors, inputs=inputs, **options)
        if sentences is not None:
            sentences.copy_rest(new)
        # With the folder's own name, instead of that under which it is written.
        if target.is_checkpoint:
            report = replace(report, folder=str(folder))
        else:
            report = replace(report, path=folder / report.path.name)
        say(str(report))
        if evaluation is None:
            say("  these inputs are random; --evaluation DATA takes real ones")
        compared = None
        if target.is_checkpoint and evaluation is not None:
            exported = read_checkpoint(str(new), progress=progress).network
            compared = print_table(given.network, exported, evaluation, int8=False, progress=progress)
        if target.is_checkpoint:
            write_card(
                given.model, new, form=target.name, change=report.change, compared=compared,
                license=arguments.license, repo_id=arguments.push_to_hub,
            )  # fmt: skip
    say(f"Saved in {folder}" + (", with the model card README.md" if target.is_checkpoint else ""))
    push(folder, arguments.push_to_hub, private=arguments.private, tell=say)
    return report
