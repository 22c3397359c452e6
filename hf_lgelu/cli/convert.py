"""From a trained smooth checkpoint to a ReLU one without training: refit, report, card, push."""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

from accelerate import PartialState
from transformers import PreTrainedModel

from hf_lgelu.cli.convert_arguments import ConvertArguments
from hf_lgelu.cli.given_checkpoint import require_fitting_rows, require_other_folder
from hf_lgelu.cli.inputs.chosen import input_sets
from hf_lgelu.cli.inputs.input_set import InputSet
from hf_lgelu.environment import hardware, package_versions
from hf_lgelu.export.hub.card_text import shown
from hf_lgelu.export.hub.conversion_card import original_licence, write_conversion_card
from hf_lgelu.export.hub.push import CARD_FILE, push_to_hub
from hf_lgelu.extras import require
from hf_lgelu.models.checkpoint import load_checkpoint, save_checkpoint
from hf_lgelu.models.comparison import require_same_model
from hf_lgelu.models.whole_folder import whole_folder
from hf_lgelu.refit.convert import ConversionRefusedError, convert_to_relu
from hf_lgelu.refit.figure import draw_conversion
from hf_lgelu.refit.folds import known_processes
from hf_lgelu.refit.report import ConversionReport, Provenance, render_markdown, summarize

REPORT_FILE, PAGE_FILE, FIGURE_FILE = "report.json", "report.md", "refit.png"

_COMPARED_ROWS = 8
_ADVICE = "Give inputs like those that the model was trained on"


def convert(arguments: ConvertArguments, say: Callable[[str], None] = print) -> ConversionReport:
    """Do what the arguments ask for: read inputs, convert, write model, report and card, push; returns the report.

    Under `accelerate launch` every process converts, each with its share of the inputs, and the main one writes.

    Raises:
        ValueError: the inputs cannot be read or the model does not take them, or the output folder is the checkpoint's
            own or has it inside: replaced, it would take the checkpoint along.
        ConversionRefusedError: see `convert_to_relu`; what was measured by then is said before.
        OSError, RuntimeError, ImportError: of what loads, converts and writes.
    """
    folder, state = Path(arguments.output_dir), _processes()
    _check(arguments, folder)
    require("matplotlib", "benchmarks")  # for the figure; not to be missed when the conversion is done
    tell = say if state.is_main_process else _say_nothing
    # Entered first: a folder that cannot be written to must not be found out after the work.
    with whole_folder(folder, overwrite=arguments.overwrite) if state.is_main_process else nullcontext() as new:
        with state.main_process_first():  # data sets are prepared once
            model = load_checkpoint(arguments.model).to(state.device)
            calibration, evaluation = input_sets(arguments, model)
        for inputs in filter(None, (calibration, evaluation)):
            require_fitting_rows(model, arguments.model, inputs.first(2), inputs.description, _ADVICE)
        converted, report = _converted(arguments, model, calibration, evaluation, tell)
        tell(summarize(report))
        if state.is_main_process:
            provenance = _provenance(arguments, calibration, evaluation, state.num_processes)
            _write(new, arguments, converted, report, provenance, calibration)
    tell(f"Saved in {folder}, with {PAGE_FILE} and {CARD_FILE}")
    if arguments.push_to_hub is not None and state.is_main_process:
        commit = push_to_hub(folder, _repo_id(arguments), private=arguments.private or None)
        tell(f"Pushed: {commit.commit_url}")
    state.wait_for_everyone()
    return report


def _processes() -> PartialState:
    """Of accelerate. Raises RuntimeError where several were started that do not know of each other."""
    state = known_processes()
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != state.num_processes:
        raise RuntimeError(
            f"{started} processes were started, and accelerate knows of {state.num_processes}: each would write the "
            "same folder. On CPUs, set ACCELERATE_USE_CPU=true"
        )
    return state


def _check(arguments: ConvertArguments, folder: Path) -> None:
    require_other_folder(arguments.model, folder)
    for name in ("max_calibration_samples", "max_evaluation_samples", "batch_size"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if not 0 <= arguments.seed < 2**32:
        raise ValueError(f"--seed must be from 0 to 2**32 - 1, got {arguments.seed}")


def _converted(
    arguments: ConvertArguments,
    model: PreTrainedModel,
    calibration: InputSet,
    evaluation: InputSet | None,
    tell: Callable[[str], None],
) -> tuple[PreTrainedModel, ConversionReport]:
    try:
        return convert_to_relu(
            model,
            calibration.batches(),
            evaluation_data=None if evaluation is None else evaluation.batches(),
            batch_size=arguments.batch_size,
            allow_unrefitted=arguments.allow_unrefitted,
            progress=not arguments.disable_tqdm,
        )
    except ConversionRefusedError as error:
        if error.report is not None:
            tell(summarize(error.report))
        raise


def _provenance(
    arguments: ConvertArguments, calibration: InputSet, evaluation: InputSet | None, processes: int
) -> Provenance:
    on_hub = not Path(arguments.model).exists()
    return Provenance(
        model=arguments.model if on_hub else shown(str(Path(arguments.model).resolve())),
        model_is_on_hub=on_hub,
        data=calibration.description,
        samples=len(calibration),
        seed=arguments.seed,
        evaluation=None if evaluation is None else evaluation.description,
        evaluation_source=None if evaluation is None else evaluation.source,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=package_versions(),
        hardware=hardware(processes),
    )


def _write(
    folder: Path,
    arguments: ConvertArguments,
    converted: PreTrainedModel,
    report: ConversionReport,
    provenance: Provenance,
    calibration: InputSet,
) -> None:
    """Everything that the output folder holds; the model in it, loaded again, must be the converted one."""
    save_checkpoint(converted, folder, source=arguments.model)
    reloaded = load_checkpoint(folder).to(converted.device)
    require_same_model(converted, reloaded, calibration.first(_COMPARED_ROWS))
    document = {"provenance": provenance.as_dict(), "report": report.as_dict()}
    (folder / REPORT_FILE).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / PAGE_FILE).write_text(render_markdown(report, figure=FIGURE_FILE), encoding="utf-8")
    draw_conversion(folder / FIGURE_FILE, report)
    write_conversion_card(
        folder, report, provenance, figure=FIGURE_FILE,
        repo_id=None if arguments.push_to_hub is None else _repo_id(arguments),
        license=arguments.license or original_licence(arguments.model),
    )  # fmt: skip


def _repo_id(arguments: ConvertArguments) -> str:
    return arguments.push_to_hub or Path(arguments.output_dir).resolve().name


def _say_nothing(_: str) -> None:
    pass
