"""`hf-lgelu convert`: a ReLU checkpoint made of a trained smooth checkpoint without training, with report and card."""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hf_lgelu.cli.arguments import ConvertArguments
from hf_lgelu.cli.checkpoint import GivenCheckpoint, push, read_checkpoint, require_gates
from hf_lgelu.cli.command import say
from hf_lgelu.cli.data import Rows
from hf_lgelu.cli.inputs import own_text, read_rows
from hf_lgelu.cli.onnx_file import OnnxFile, read_onnx_file
from hf_lgelu.cli.preview import preview_conversion
from hf_lgelu.cli.rows import InputSet
from hf_lgelu.environment import hardware, require
from hf_lgelu.export.card import (
    Provenance,
    own_name,
    render_conversion_card,
    save_card,
    stated_licence,
)
from hf_lgelu.export.checkpoint_facts import CheckpointFacts, facts_of_folder
from hf_lgelu.export.onnx_export import ONNX_FILE
from hf_lgelu.files import is_hub_id, is_onnx, whole_folder
from hf_lgelu.formats import finite_or_none
from hf_lgelu.models.checkpoint import require_same_model
from hf_lgelu.processes import known_processes
from hf_lgelu.refit.convert import convert_to_relu
from hf_lgelu.refit.refusals import ConversionRefusedError
from hf_lgelu.refit.report import REPORT_FILE, ConversionReport
from hf_lgelu.refit.verdict import own_text_warning

_COMPARED_ROWS = 8


def convert(arguments: ConvertArguments, data: Rows | None, evaluation: Rows | None) -> ConversionReport | None:
    """Read inputs, convert, write model, report and card, and push. Returns the report; None after a dry run.

    Under `accelerate launch`, every process reads all inputs and does a part of the work. The main process writes.

    Raises the errors of reading, loading, `convert_to_relu` and writing. What was measured of a refused network is
    printed before.
    """
    folder, state = Path(arguments.output_dir), known_processes()
    if (started := int(os.environ.get("WORLD_SIZE", "1"))) != state.num_processes:
        raise RuntimeError(
            f"{started} processes were started, but accelerate knows of {state.num_processes}, so several would write "
            "the same folder. On CPUs, set ACCELERATE_USE_CPU=true"
        )
    if arguments.int8:
        require("onnxruntime", "onnx")
    tell: Callable[[str], None] = say if state.is_main_process else lambda _: None
    progress = arguments.progress and state.is_main_process
    # Entered before the work, which would be lost if the folder could not be written.
    is_written = state.is_main_process and not arguments.dry_run
    place = whole_folder(folder, overwrite=arguments.overwrite) if is_written else nullcontext()
    with place as new:
        with state.main_process_first():
            made = list[str]()
            if is_onnx(arguments.model):
                given: Any
                given, inputs, second = read_onnx_file(arguments)
                require_gates(given)
            else:
                given = read_checkpoint(arguments.model, **arguments.reading | {"progress": progress})
                require_gates(given)
                if given.sentences is not None:
                    _require_one_key_says_it(arguments.keep)
                if data is None:
                    given.network.to(state.device)
                    tell("No data were given, so the model samples text itself ...")
                    inputs = own_text(given, arguments.max_samples)
                    made.append(own_text_warning(inputs.first(len(inputs))["input_ids"]))
                else:
                    inputs = read_rows(data, given)
                second = None if evaluation is None or arguments.dry_run else read_rows(evaluation, given)
            given.network.to(state.device)
            config = arguments.config(None if inputs.whole else len(inputs))
            if arguments.dry_run:
                tell(preview_conversion(given.network, inputs.batches("inputs", progress=progress), config))
                return None
        try:
            converted, report = convert_to_relu(
                given.network,
                inputs.batches("inputs", progress=progress),
                evaluation_data=None if second is None else second.batches("second set", progress=progress),
                options=config,
                progress=not arguments.disable_tqdm,
            )
        except ConversionRefusedError as error:
            if error.report is not None:
                tell(str(error.report))
            raise
        changes = (f"{ONNX_FILE} has the gates",) if is_onnx(arguments.model) else report.config_changes
        report = replace(report, model=given.kind, warnings=(*made, *report.warnings), config_changes=changes)
        tell(str(report))
        if arguments.data is not None and not inputs.whole and arguments.max_samples is None:
            tell(f"Some rows of {inputs.description} were left out, for time: --max_samples takes more.")
        if new is not None:
            on_hub = is_hub_id(arguments.model)
            provenance = Provenance(
                model=arguments.model if on_hub else own_name(arguments.model).removesuffix(".onnx"),
                model_is_on_hub=on_hub,
                data=inputs.description,
                samples=len(inputs),
                seed=arguments.seed,
                evaluation=None if second is None else second.description,
                evaluation_source=second.source if second is not None and second.whole else None,
                hardware=hardware(state.num_processes),
            )
            _write(new, arguments, given, converted, report, provenance, inputs)
    tell(f"Saved in {folder}, with the model card README.md")
    if state.is_main_process:
        push(folder, arguments.push_to_hub, private=arguments.private, tell=tell)
        if arguments.compare:
            from hf_lgelu.cli.compare import print_table  # only --compare needs it

            print_table(given.network, converted, second or inputs, str(folder), arguments)
    state.wait_for_everyone()
    return report


def _require_one_key_says_it(keep: str) -> None:
    """Raise ValueError for gates that no folder of sentence-transformers can hold."""
    if keep != "0":
        raise ValueError(
            "--keep: sentence-transformers builds all gates by one key of the config and could not load the folder; "
            "leave it out, or convert in Python (hf_lgelu.convert_to_relu)"
        )


def _write(
    folder: Path,
    arguments: ConvertArguments,
    given: GivenCheckpoint | OnnxFile,
    converted: Any,
    report: ConversionReport,
    provenance: Provenance,
    data: InputSet,
) -> None:
    """Write the output folder, and load the model from it: it must be the converted one."""
    if isinstance(given, OnnxFile):
        converted.save(folder / ONNX_FILE)
        facts = CheckpointFacts(given.kind)
    else:
        given.save(converted, folder)
        reloaded = read_checkpoint(str(folder), **arguments.reading | {"progress": False}).network
        reloaded.to(next(converted.parameters()).device)
        require_same_model(converted, reloaded, data.first(_COMPARED_ROWS))
        facts = facts_of_folder(folder)
    document: dict[str, Any] = {"provenance": asdict(provenance), "report": report.as_dict()}
    text = json.dumps(finite_or_none(document), indent=1, ensure_ascii=False, allow_nan=False)
    (folder / REPORT_FILE).write_text(f"{text}\n", encoding="utf-8")
    card = render_conversion_card(
        report,
        provenance,
        facts,
        repo_id=arguments.push_to_hub,
        license=arguments.license or stated_licence(given.name),
    )
    save_card(card, folder)
