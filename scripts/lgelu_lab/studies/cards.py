"""The model card of a benchmark's run: its record as facts, and the cards of this repository."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from hf_lgelu.activation.gates import GATES
from hf_lgelu.export.card import plain, render_card, save_card
from hf_lgelu.files import is_hub_id, save_picture
from hf_lgelu.formats import percent, score
from hf_lgelu.models.checkpoint import CheckpointFacts
from hf_lgelu.models.hardening import GateHardness
from lgelu_lab.report.paper import DATA_READ, data_folder
from lgelu_lab.studies.records import RunRecord, read_record

_OF_CIFAR = "resnet18-cifar"

# What a card shows of a record's config, in this order; a key that is not here is not shown.
_RECIPE = {
    "pretrained": "started from",
    "optim": "optimizer",
    "learning_rate": "learning rate",
    "weight_decay": "weight decay",
    "lr_scheduler_type": "learning-rate schedule",
    "warmup_steps": "warm-up (steps, or below 1 a fraction)",
    "label_smoothing_factor": "label smoothing",
    "max_grad_norm": "largest gradient norm (0: not clipped)",
    "train_batch_size": "batch size of an update",
    "gradient_accumulation_steps": "parts that it is accumulated of",
    "num_train_epochs": "epochs",
    "bf16": "bfloat16 autocast",
    "seed": "seed",
    "image_size": "image side (pixels)",
    "patch_size": "patch side (pixels)",
    "num_layers": "layers",
    "width": "width",
    "num_heads": "attention heads",
    "context_length": "context (tokens)",
    "vocabulary_size": "vocabulary (tokens)",
}
_HARDNESS_RECIPE = {
    "temperature": "temperature t",
    "hardness_lr_multiplier": "learning-rate multiplier of λ, c",
    "init_mode": "initial λ over depth",
    "init_hardness": "initial λ₀",
}
_HARDENING_RECIPE = {
    "target_hardness": "target λ",
    "switch_fraction": "hardening starts after (fraction of the epochs)",
    "hardening_schedule": "hardening schedule",
    "hardening_strategy": "λ is set every",
}

_CIFAR_RESNET = """\
import timm
import torch
from safetensors.torch import load_file

model = timm.create_model("resnet18", num_classes={classes})
model.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
model.maxpool = torch.nn.Identity()
weights = load_file("model.safetensors")
model.load_state_dict({{name.removeprefix("timm_model."): tensor for name, tensor in weights.items()}})
model.eval()"""

# Of each card of model_cards/: the run that it describes.
COMMITTED_CARDS = {
    "deit-tiny-imagenet": "records/deit-tiny-imagenet/lambda_gelu-uniform-hardened-seed0",
    "gpt2-wikitext2": "downstream/runs/gpt2-wikitext2/lambda_gelu-uniform-hardened-seed0",
    "mlp-adult": "downstream/runs/mlp-adult/lambda_gelu-uniform-hardened-seed0",
    "mlp-digits": "downstream/runs/mlp-digits/lambda_gelu-uniform-hardened-seed0",
    "mlp-fmnist": "downstream/runs/mlp-fmnist/lambda_gelu-uniform-hardened-seed0",
    "resnet18-cifar10": "records/resnet18-cifar10/lambda_gelu-uniform-hardened-seed0",
    "resnet18-cifar100": "records/resnet18-cifar100/lambda_gelu-uniform-hardened-seed0",
}


def shown(value: Any) -> str:
    """A value of a config as a reader may see it: of a path or address the last part, of a Hub id all of it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if ("/" not in text and "\\" not in text) or is_hub_id(text):
        return text
    return re.split(r"[/\\]", text.partition("?")[0].rstrip("/\\"))[-1]


def card_words(record: RunRecord, checkpoint: CheckpointFacts) -> dict[str, Any]:
    """The words of the card of a run's network, for `render_card`."""
    saved, benchmark = record.saved, record.config["benchmark"]
    hub_id, evaluated_on, data_note = _data(record)
    earlier = {"before training": record.initial_hardness}
    if record.as_learned is not None:
        earlier["as learned, before hardening"] = record.as_learned.hardness
    seconds = record.whole_seconds
    took = "" if seconds is None else f"took {seconds:,.0f} s, evaluation included, and "
    made = made_with(record.hardware, record.versions)
    provenance = f"The run {took}ended on {plain(record.created[:10])}, {made}"
    is_whole = record.config.get("max_eval_samples", "the earliest records do not say") is None
    pretrained = record.config.get("pretrained")
    header = {"metrics": [record.metric], "base_model": pretrained if is_hub_id(pretrained) else None}
    if is_hub_id(hub_id):
        header["datasets"] = [hub_id]
    # A ReLU model that was not evaluated has no result, least of all the smooth one's.
    if is_hub_id(hub_id) and is_whole and saved.relu_score is not None:
        result = EvalResult(
            checkpoint.task or "other", hub_id, hub_id, record.metric, float(score(record.metric, saved.relu_score)),
            dataset_split=record.data["eval_split"], metric_name=f"{record.metric}, last epoch",
        )  # fmt: skip
        header["eval_results"] = [result]
    of_logits = ""
    if saved.relu_max_logit_change is not None and saved.relu_unchanged_predictions is not None:
        of_logits = (
            f"On the samples of the table above, the largest change of a logit was {saved.relu_max_logit_change:.2g}, "
            f"and {percent(saved.relu_unchanged_predictions)} of the predictions (the largest logit) stayed the same."
        )
    measured = (
        f"Measured after the last epoch ({saved.epoch:g}), which is the one saved, on {evaluated_on} One run with seed "
        f"{record.config['seed']}."
    )
    return {
        "top": f"{_scores(record)}\n\n{measured}",
        "trained_on": f"the benchmark {benchmark} of hf_lgelu",
        "hardened": bool(record.config["harden"]),
        "stages": {label: stage for label, stage in earlier.items() if stage},
        "training": "\n\n".join((_recipe(record), data_note, provenance)),
        "of_logits": of_logits,
        "input_note": _input_note(record),
        "limits": (
            "A network of a benchmark, made to measure activations; it was not examined for any other use.",
            "The numbers are of one run; another seed gives others.",
        ),
        "header": header,
        **_loading_code(record),
    }


def made_with(hardware: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """Hardware and versions in two sentences; empty where nothing is known of either."""
    told = []
    if hardware:
        processes = hardware.get("processes", 1)
        cores = f" ({hardware['cpu_cores']} cores)" if hardware.get("cpu_cores") else ""
        cpu = f"with {processes} process{'es' * (processes != 1)} on {hardware.get('cpu', 'an unnamed CPU')}{cores}"
        system = (hardware.get("platform") or "").partition("-")[0]  # without the build of the kernel
        parts = (cpu, ", ".join(hardware.get("accelerators") or ()) or "no accelerator", system)
        told.append(", ".join(filter(None, parts)) + ".")
    if versions:
        told.append("Versions: " + ", ".join(f"{package} {version}" for package, version in versions.items()) + ".")
    return plain(" ".join(told))


def _scores(record: RunRecord) -> str:
    """The table of the scores as trained, and with ReLU in the place of each gate."""
    saved, learned = record.saved, GATES[record.config["activation"]].label
    is_smoothed = record.config.get("label_smoothing_factor")  # Trainer smooths the labels of an evaluation, too
    better = "higher" if record.greater_is_better else "lower"
    lines = [f"| network | {plain(record.metric)} ({better} is better) | loss |", "|---|---|---|"]
    of_relu = ("ReLU, the same weights (this model)", saved.relu_score, saved.relu_loss)
    for title, value, loss in ((f"{learned}, as trained", saved.score, saved.loss), of_relu):
        shown_loss = "–" if loss is None or is_smoothed else f"{loss:.4f}"
        lines += [f"| {title} | {score(record.metric, value)} | {shown_loss} |"] if value is not None else []
    return "\n".join(lines)


def draw_hardness(
    path: str | os.PathLike,
    earlier: Mapping[str, Mapping[str, float]],
    final: Mapping[str, float],
) -> Path:
    """Write a PNG with a bar of λ for each gate, in the order of the mapping, on a logarithmic axis.

    `earlier`, {stage: {gate: λ}}, is drawn as points over the bars; a stage may be empty, or lack some gates.
    """
    from matplotlib.figure import Figure  # half a second

    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.add_subplot()
    places = range(1, len(final) + 1)
    axes.bar(places, list(final.values()), color="#a9c4de", label="trained")
    for (label, stage), (marker, color) in zip(earlier.items(), (("o", "#ee6677"), ("D", "#1b4f7a")), strict=False):
        if stage:
            values = [stage.get(gate, math.nan) for gate in final]
            axes.plot(places, values, marker, color=color, markersize=5, label=label)
    axes.set(yscale="log", xlabel="gate, in the order of the network", ylabel="hardness λ")
    axes.set_ylim(0.8, max(final.values()) * 1.6)
    axes.set_xticks(list(places) if len(final) <= 20 else list(places)[:: len(final) // 10])
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return save_picture(figure, path, 120)


def write_record_card(
    record: RunRecord, path: str | os.PathLike, *, repo_id: str | None = None, license: str | None = None
) -> Path:
    """Write a card of the ReLU network where no model is, its picture as figures/<name of the card>.png beside it."""
    path, figure, hardness = Path(path), f"figures/{Path(path).stem}.png", record.saved.hardness
    gates = {site: GateHardness(record.config["activation"], value, value) for site, value in hardness.items()}
    checkpoint = CheckpointFacts(record.model["class"])
    words = card_words(record, checkpoint)
    draw_hardness(path.parent / figure, words["stages"], hardness)
    card = render_card(
        checkpoint, gates, name=record.config["benchmark"], activation="relu", figure=figure, repo_id=repo_id,
        license=license, **words,
    )  # fmt: skip
    return save_card(card, path.parent, path.name)


def write_committed_cards(source: str | os.PathLike, target: str | os.PathLike) -> list[Path]:
    """Render the cards of model_cards/, whose records lie below `source`, into `target`."""
    return [
        write_record_card(read_record(Path(source) / run), Path(target) / f"{name}.md", license="apache-2.0")
        for name, run in COMMITTED_CARDS.items()
    ]


def _data(record: RunRecord) -> tuple[str | None, str, str]:
    """(Hub id, what was evaluated on, how much of the data set the training and its evaluation saw), in Markdown."""
    data, config = record.data, record.config
    limits = []
    if config.get("max_train_samples") is not None:
        limits.append(f"training was limited to {config['max_train_samples']:,} samples")
    if (config.get("max_steps") or -1) > 0:
        limits.append(f"training was limited to {config['max_steps']:,} steps")
    if config.get("max_eval_samples") is not None:
        limits.append(f"evaluation was limited to {config['max_eval_samples']:,} samples")
    name, hub_id, remarks = _what_was_read(record)
    if "max_eval_samples" not in config:
        remarks.append("The record, an early one, does not say whether evaluation was limited.")
    of = f"samples of {plain(shown(name))}"
    note = f"Trained on {data['train_samples']:,} {of}, evaluated on {data['eval_samples']:,}"
    if limits:
        note += f". This is not all of the data: {'; '.join(map(plain, limits))}."
    else:
        note += "." if remarks else "; no limit was set on either."
    evaluated_on = f"{data['eval_samples']:,} {of}, split {plain(data['eval_split'])}."
    return hub_id, evaluated_on, " ".join([note, *map(plain, remarks)])


def _what_was_read(record: RunRecord) -> tuple[str, str | None, list[str]]:
    """(name, Hub id if the Hub's own data was read, what a reader must know of a copy)."""
    data = record.data
    source = data["source"]
    if data.get("folder") is not None:
        told = " ".join((data.get("readme") or "it has none").split()).rstrip(".")
        return source, None, [f"A local copy was read in the place of {data['copy_of']}; its README: {told}."]
    if "/" not in source:
        return source, None, []
    if "copy_of" in data:
        return source, source, []
    known = DATA_READ.get(data_folder(record) or "")
    if known:
        return source, None, [f"A local copy was read in the place of {source}: {known}."]
    early = "The record, an early one, does not say whether the Hub's data or a local copy of another extent was read."
    return source, None, [early]


def _recipe(record: RunRecord) -> str:
    config = record.config
    names = dict(_RECIPE)
    if record.initial_hardness:
        names |= _HARDNESS_RECIPE
        if config["init_mode"] != "uniform":
            names["high_hardness"] = "largest initial λ"
        if config["harden"]:
            names |= _HARDENING_RECIPE
    parameters = f"{record.model['parameters']:,}" + (" (the λ among them)" if record.initial_hardness else "")
    told = {"parameters": parameters}
    told |= {label: config[key] for key, label in names.items() if config.get(key) is not None}
    rows = [f"| {plain(label)} | {plain(shown(value))} |" for label, value in told.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _loading_code(record: RunRecord) -> dict[str, str]:
    """timm's own ResNet-18 with another stem: `from_pretrained` would look for the benchmark's architecture."""
    _, small_resnet, classes = record.config["benchmark"].partition(_OF_CIFAR)
    if not small_resnet:
        return {}
    # The earliest records do not say how many classes there are; CIFAR-10 and CIFAR-100 do.
    plain_code = _CIFAR_RESNET.format(classes=record.data.get("classes") or int(classes))
    return {"plain_code": plain_code, "lgelu_code": ""}


def _input_note(record: RunRecord) -> str:
    note = f"Inputs are prepared as hf_lgelu's benchmark {record.config['benchmark']} does"
    if record.model["class"] == "MLPForClassification":
        return f"{note}: rows of features, standardized by the training rows; the statistics are not in the checkpoint."
    if record.config["benchmark"].startswith(_OF_CIFAR):
        return f"{note}: pixels divided by 255, then normalized by mean and std of config.json's pretrained_cfg."
    return f"{note}; the tokenizer or image processor is beside the weights."
