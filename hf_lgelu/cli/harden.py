"""From a trained checkpoint to one that needs nothing of this package: export, evaluate, card, push."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.benchmarks.options import DataOptions
from lgelu_lab.benchmarks.table import BENCHMARKS, check_benchmark
from lgelu_lab.measurements.networks import evaluate
from transformers import PreTrainedModel

from hf_lgelu.cli.given_checkpoint import require_fitting_rows, require_other_folder
from hf_lgelu.export.hub.card import write_card
from hf_lgelu.export.hub.card_facts import CARD_FACTS_FILE, CardFacts, load_card_facts
from hf_lgelu.export.hub.push import push_to_hub
from hf_lgelu.export.targets import EXPORT_TARGETS, ExportOptions, check_target
from hf_lgelu.extras import require
from hf_lgelu.models.checkpoint import load_checkpoint
from hf_lgelu.models.profile import hardness_profile
from hf_lgelu.models.random_inputs import random_inputs

_EXAMPLE_ROWS = 64
_ADVICE = "Give --eval the benchmark that the model was trained on, or leave it out"


@dataclass
class HardenArguments:
    """A checkpoint with λ-GELU, and what to make of it."""

    model: str = field(metadata={"help": "Folder or Hub id of the checkpoint."})
    output_dir: str = field(metadata={"help": "Folder of the export; complete or not there."})
    to: str = field(
        default="relu",
        metadata={
            "help": "; ".join(f"{name}: {target.description}" for name, target in EXPORT_TARGETS.items()) + ".",
            "choices": list(EXPORT_TARGETS),
        },
    )
    eval: str | None = field(
        default=None,
        metadata={"help": "Evaluate before and after on this benchmark's rows.", "choices": list(BENCHMARKS)},
    )
    data_dir: str | None = field(default=None, metadata={"help": "Folder with local copies of the data sets."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on at most so many rows."})
    allow_soft: bool = field(default=False, metadata={"help": "Put ReLU in even where gates are soft."})
    overwrite: bool = field(default=False, metadata={"help": "Replace an output folder that is not empty."})
    push_to_hub: str | None = field(
        default=None, metadata={"help": "Push the folder with its card to this Hub repository, e.g. user/model."}
    )
    private: bool = field(default=False, metadata={"help": "Make a new Hub repository a private one."})
    license: str | None = field(default=None, metadata={"help": "Licence on the card, as the Hub spells it."})


def harden(arguments: HardenArguments, say: Callable[[str], None] = print) -> Any:
    """Do what the arguments ask for, in the order export, evaluation, card, push; returns the export's report.

    Raises what the export raises (`EXPORT_TARGETS`), and ValueError if the output folder is the checkpoint's own or has
    it inside: replaced, it would take the checkpoint along.
    """
    target, folder = check_target(arguments.to), Path(arguments.output_dir)
    require_other_folder(arguments.model, folder)
    if arguments.push_to_hub is not None and target.name == "onnx":
        raise ValueError("only checkpoints are pushed with a card; push an ONNX file with `hf upload`")
    if target.name != "onnx":
        require("matplotlib", "benchmarks")  # for the card; not to be missed when the export is done
    model = load_checkpoint(arguments.model)
    data = _evaluation_data(arguments, model.config)
    if data is not None:
        require_fitting_rows(model, arguments.model, _first_rows(arguments, data), arguments.eval, _ADVICE)
    before = _score(model, arguments, data)
    inputs = _first_rows(arguments, data) if data is not None else random_inputs(model)
    options = ExportOptions(
        source=arguments.model, inputs=inputs, allow_soft=arguments.allow_soft, overwrite=arguments.overwrite
    )
    report = target.export(model, folder, options)
    say(str(report))
    if data is None:
        say("  these inputs are random; --eval BENCHMARK takes real ones")
    if before is not None:
        say(f"{arguments.eval}, {data.eval_split}, {len(data.eval):,} rows: {_both(before)} as it is")
        if target.name != "onnx":
            after = _score(load_checkpoint(folder), arguments, data)
            say(f"{arguments.eval}, {data.eval_split}, {len(data.eval):,} rows: {_both(after)} exported")
    if target.name != "onnx":
        card = write_card(
            folder,
            replace(
                _card_facts(arguments.model), hardness=hardness_profile(model), change=report.change,
                license=arguments.license,
            ),
            export=target.name, repo_id=arguments.push_to_hub,
        )  # fmt: skip
        say(f"Model card: {card}")
    if arguments.push_to_hub is not None:
        commit = push_to_hub(folder, arguments.push_to_hub, private=arguments.private or None)
        say(f"Pushed: {commit.commit_url}")
    return report


def _evaluation_data(arguments: HardenArguments, config: Any) -> BenchmarkData | None:
    """The benchmark's rows as the checkpoint takes them: by its own tokenizer, of its length and image size."""
    if arguments.eval is None:
        return None
    benchmark = check_benchmark(arguments.eval)
    given: dict[str, Any] = {}
    if "pretrained" in benchmark.model_defaults:
        given["pretrained"] = arguments.model
        own = {
            "context_length": getattr(config, "n_positions", None),
            "image_size": getattr(config, "image_size", None),
        }
        given |= {name: value for name, value in own.items() if name in benchmark.pretrained_model_defaults}
    rows = DataOptions(data_dir=arguments.data_dir, max_eval_samples=arguments.max_eval_samples)
    return benchmark.load(rows, benchmark.model_options(given))


def _score(model: PreTrainedModel, arguments: HardenArguments, data: BenchmarkData | None) -> dict[str, float] | None:
    if data is None:
        return None
    benchmark = check_benchmark(arguments.eval)
    scores = evaluate(model, benchmark, data)
    return {name: scores[name] for name in (benchmark.metric, f"relu_{benchmark.metric}") if name in scores}


def _both(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in scores.items())


def _first_rows(arguments: HardenArguments, data: BenchmarkData) -> dict[str, Any]:
    batch = check_benchmark(arguments.eval).collate(data.eval.__getitems__(range(min(_EXAMPLE_ROWS, len(data.eval)))))
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def _card_facts(model: str) -> CardFacts:
    """What was written beside the checkpoint when it was trained; nothing where there is no such file."""
    return load_card_facts(model) if (Path(model) / CARD_FACTS_FILE).exists() else CardFacts()
