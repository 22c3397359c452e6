"""`hf-lgelu convert`: a ReLU checkpoint made of a trained smooth checkpoint without training, with report and card."""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from hf_lgelu.cli.arguments import ConvertArguments
from hf_lgelu.cli.checkpoint import Checkpoint, push, read_checkpoint
from hf_lgelu.cli.command import say
from hf_lgelu.cli.data import Rows
from hf_lgelu.cli.inputs import InputSet, read_rows
from hf_lgelu.cli.onnx_file import read_onnx_file
from hf_lgelu.comparing.comparison import compare_outputs
from hf_lgelu.comparing.distance import networks_table
from hf_lgelu.environment import hardware
from hf_lgelu.export.card import Provenance, own_name, render_conversion_card, save_card, stated_licence
from hf_lgelu.export.onnx_export import ONNX_FILE
from hf_lgelu.export.onnx_network import OnnxNetwork
from hf_lgelu.files import is_hub_id, is_onnx, whole_folder
from hf_lgelu.formats import text_table
from hf_lgelu.graph.layers import find_layers
from hf_lgelu.models.checkpoint import CheckpointFacts, facts_of_folder, require_same_model
from hf_lgelu.models.config_keys import runtime_warnings
from hf_lgelu.networks.calls import GatesAsModules
from hf_lgelu.networks.outputs import Outputs, is_causal
from hf_lgelu.networks.run import Inputs, random_inputs
from hf_lgelu.networks.sites import sites_in_words
from hf_lgelu.processes import known_processes
from hf_lgelu.refit.config import ConversionConfig
from hf_lgelu.refit.convert import convert_to_relu, prepare, still_smooth, with_plain_parts
from hf_lgelu.refit.folds import load_own
from hf_lgelu.refit.refusals import ConversionRefusedError
from hf_lgelu.refit.report import REPORT_FILE, ConversionReport
from hf_lgelu.refit.widen import blocks_to_widen

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
    tell: Callable[[str], None] = say if state.is_main_process else lambda _: None
    progress = arguments.progress and state.is_main_process
    # Entered before the work, which would be lost if the folder could not be written.
    is_written = state.is_main_process and not arguments.dry_run
    place = whole_folder(folder, overwrite=arguments.overwrite) if is_written else nullcontext()
    with place as new:
        with state.main_process_first():
            inputs: InputSet | None
            if is_onnx(arguments.model):
                checkpoint, inputs, second = read_onnx_file(arguments)
            else:
                checkpoint = read_checkpoint(arguments.model, **arguments.reading | {"progress": progress})
                inputs = None if data is None else read_rows(data, checkpoint)
                second = None if evaluation is None or arguments.dry_run else read_rows(evaluation, checkpoint)
            checkpoint.network.to(state.device)
        if inputs is None and is_causal(checkpoint.model):
            tell("No data were given, so the model samples text itself ...")
        # Fewer samples than there are have been chosen already; of text that the model samples, this is the number.
        config = arguments.config(arguments.max_samples if inputs is None else None if inputs.whole else len(inputs))
        batches = None if inputs is None else inputs.batches("inputs", progress=progress)
        if arguments.dry_run:
            tell(preview_conversion(checkpoint.network, batches, config))
            return None
        try:
            converted, report = convert_to_relu(
                checkpoint.network,
                batches,
                evaluation_data=None if second is None else second.batches("second set", progress=progress),
                options=config,
                progress=not arguments.disable_tqdm,
            )
        except ConversionRefusedError as error:
            if error.report is not None:
                tell(str(error.report))
            raise
        if is_onnx(arguments.model):
            report = replace(report, config_changes=(f"{ONNX_FILE} has the gates",))
        tell(str(report))
        if inputs is not None and not inputs.whole and arguments.max_samples is None:
            tell(f"Some rows of {inputs.description} were left out, for time: --max_samples takes more.")
        if new is not None:
            on_hub = is_hub_id(arguments.model)
            provenance = Provenance(
                model=arguments.model if on_hub else own_name(arguments.model).removesuffix(".onnx"),
                model_is_on_hub=on_hub,
                data="text that the model sampled itself" if inputs is None else inputs.description,
                samples=report.samples if inputs is None else len(inputs),
                seed=arguments.seed,
                evaluation=None if second is None else second.description,
                hardware=hardware(state.num_processes),
            )
            examples = random_inputs(checkpoint.network) if inputs is None else inputs.first(_COMPARED_ROWS)
            _write(new, arguments, checkpoint, converted, report, provenance, examples)
    tell(f"Saved in {folder}, with the model card README.md")
    if state.is_main_process:
        push(folder, arguments.push_to_hub, private=arguments.private, tell=tell)
    state.wait_for_everyone()
    return report


def _write(
    folder: Path,
    arguments: ConvertArguments,
    checkpoint: Checkpoint,
    converted: nn.Module,
    report: ConversionReport,
    provenance: Provenance,
    examples: Inputs,
) -> None:
    """Write the output folder, and load the model from it: it must be the converted one."""
    checkpoint.save(converted, folder)
    if isinstance(converted, OnnxNetwork):  # its `save` has compared the file with the network
        facts = CheckpointFacts(type(converted).__name__)
    else:
        reloaded = read_checkpoint(str(folder), **arguments.reading | {"progress": False}).network
        reloaded.to(next(converted.parameters()).device)
        require_same_model(converted, reloaded, examples)
        facts = facts_of_folder(folder)
    document: dict[str, Any] = {"provenance": asdict(provenance), "report": report.as_dict()}
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / REPORT_FILE).write_text(f"{text}\n", encoding="utf-8")
    card = render_conversion_card(
        report,
        provenance,
        facts,
        repo_id=arguments.push_to_hub,
        license=arguments.license or stated_licence(checkpoint.name),
    )
    save_card(card, folder)


def preview_conversion(model: nn.Module, data: Any, config: ConversionConfig) -> str:
    """The gates and maps, the cost of the plain swap, and what stays smooth, in lines of text.

    Raises the errors of `convert_to_relu` before the first fit. `model` and `data` are as there.
    """
    model, _ = with_plain_parts(model, config)
    with GatesAsModules(model, config.kinds, config.outputs, config.box_channels) as network:
        task = prepare(network, data, config)
        exchange, sites = task.exchange, task.recordings.sites
        recording = task.recordings.of(task.folds.first)
        found = find_layers(recording, model, sites)
        maps = sum(len(layer.maps) for layer in found.layers)
        unfit = set().union(*found.unfit.values())
        refitted = len(sites) - len(unfit) - len(found.unread)
        lines = [
            f"{type(model).__name__}, {sites_in_words(model)}: nothing is written, because this is a dry run.",
            f"{refitted} of {len(sites)} gates would be converted with a refit of {maps} linear maps after them.",
        ]
        for (name, reason), before in found.unfit.items():
            gates = ", ".join(sites[index].name for index in sorted(before))
            lines.append(f"- {gates}: only the gate, because of {reason if name in reason else f'{name}: {reason}'}")
        lines += [f"- {sites[index].name}: only the gate, no output that counts needs it" for index in found.unread]
        if blocks_to_widen(model, recording, found):
            lines.append("More hidden units usually help most: `width` 1.25 adds a quarter to each block.")

        def swapped(inputs: Any) -> Outputs:
            with exchange.plain_swap(model).applied():
                return task.read(inputs)

        batches = load_own(task.folds.held_out or task.folds.fitted)
        metrics, compared = compare_outputs(task.read, {"swap": swapped}, batches, over_processes=True)
        table = networks_table(metrics, {"plain swap": compared["swap"].distance}, main=True)
        lines += ["ReLU in their place, without a refit:", *text_table(*table, text_columns=1)]
        with exchange.plain_swap(model).applied():
            lines += [f"still smooth: {call}" for call in still_smooth(model, task.folds)]
        lines += [f"warning: {text}" for text in runtime_warnings(model)]
        return "\n".join([*lines, *(f"warning: {text}" for text in task.warnings)])
