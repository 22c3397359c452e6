"""`hf-lgelu export`: from a trained λ-GELU checkpoint to one that needs nothing of this package."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_lgelu.cli.arguments import ExportArguments
from hf_lgelu.cli.checkpoint import (
    GivenCheckpoint,
    push,
    read_checkpoint,
    require_fitting_rows,
    require_hardness,
    require_other_folder,
)
from hf_lgelu.cli.command import say
from hf_lgelu.cli.comparison import compare, in_words
from hf_lgelu.cli.inputs import evaluation_set
from hf_lgelu.cli.rows import InputSet
from hf_lgelu.export.hub.card import write_card
from hf_lgelu.export.targets import EXPORT_TARGETS, ExportTarget
from hf_lgelu.files import whole_folder

_EXAMPLE_ROWS = 64
_ADVICE = "Give --evaluation inputs like those that the model was trained on, or leave it out"


def export(arguments: ExportArguments) -> Any:
    """Export, compare on --evaluation, write the card, put the folder in place, push; returns the export's report.

    Raises what the export raises (`EXPORT_TARGETS`), and ValueError for a checkpoint without λ-GELU where --to gives
    another checkpoint, or if the output folder is the checkpoint's own or has it, or the data, inside: replaced, it
    would take them along.
    """
    target, folder = EXPORT_TARGETS[arguments.to], Path(arguments.output_dir)
    progress = not arguments.disable_tqdm
    require_other_folder(folder, arguments.model, arguments.evaluation)
    # Entered first: a folder that cannot be written to must not be found out after the work.
    with whole_folder(folder, overwrite=arguments.overwrite) as new:
        given = read_checkpoint(arguments.model, progress=progress)
        if target.is_checkpoint:
            require_hardness(given)
        _require_whole(given, target)
        evaluation = evaluation_set(arguments, given)
        if evaluation is not None:
            rows = evaluation.first(2)
            require_fitting_rows(given.network, given.name, rows, evaluation.description, _ADVICE)
        report = _export(arguments, target, given, evaluation, new)
        say(_at_home(report, folder))
        if evaluation is None:
            say("  these inputs are random; --evaluation DATA takes real ones")
        if target.is_checkpoint:
            if evaluation is not None:
                say(_compared(arguments, given, new, evaluation, progress))
            write_card(
                given.model, new, form=target.name, change=report.change, license=arguments.license,
                repo_id=arguments.push_to_hub,
            )  # fmt: skip
    say(f"Saved in {folder}" + (", with the model card README.md" if target.is_checkpoint else ""))
    push(folder, arguments.push_to_hub, private=arguments.private, tell=say)
    return report


def _export(
    arguments: ExportArguments, target: ExportTarget, given: GivenCheckpoint, evaluation: InputSet | None, folder: Path
) -> Any:
    """Write the checkpoint's new form and all that goes along; the report of the export."""
    inputs = None if evaluation is None else evaluation.first(_EXAMPLE_ROWS)
    soft = {"allow_soft": arguments.allow_soft} if target.is_relu else {}
    sentences = given.sentences if target.is_checkpoint else None
    place = folder if sentences is None else folder / sentences.encoder
    place.mkdir(exist_ok=True)
    report = target.export(given.model, place, source=given.processors, inputs=inputs, **soft)
    if sentences is not None:
        sentences.copy_rest(folder)
    return report


def _require_whole(given: GivenCheckpoint, target: ExportTarget) -> None:
    if given.embeds and not target.is_checkpoint:
        raise ValueError(
            f"{given.name} is a checkpoint of sentence-transformers, and its encoder alone, --to {target.name}, would "
            "lack the pooling: its embeddings would be others. Export --to relu, then use SentenceTransformer(..., "
            "backend='onnx')"
        )


def _at_home(report: Any, folder: Path) -> Any:
    """The report with the folder's own name, instead of that under which it is written."""
    if hasattr(report, "folder"):
        return replace(report, folder=str(folder))
    return replace(report, path=folder / report.path.name)


def _compared(
    arguments: ExportArguments, given: GivenCheckpoint, folder: Path, evaluation: InputSet, progress: bool
) -> str:
    exported = read_checkpoint(str(folder), progress=progress).network
    found = compare(given.network, exported, evaluation, batch_size=arguments.batch_size, progress=progress)
    what = f"{evaluation.description}, {found.units:,} inputs"
    return f"{what}: {in_words(found.refitted, dict(found.original_metrics))}"
