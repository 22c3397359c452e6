"""What a run's record says, as the tables and sentences of a model card."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lgelu_lab.studies.records import RunRecord

from hf_lgelu.activation.hardness import swap_error_bound

_DIGITS = {"accuracy": 4, "perplexity": 2}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")

# What a card shows of a record's config, in this order; a key that is not here is not shown.
_RECIPE = {
    "pretrained": "started from",
    "optim": "optimizer",
    "learning_rate": "learning rate",
    "weight_decay": "weight decay",
    "lr_scheduler_type": "learning-rate schedule",
    "warmup_steps": "warm-up (steps, or below 1 a fraction)",
    "max_grad_norm": "largest gradient norm (0: not clipped)",
    "train_batch_size": "batch size",
    "gradient_accumulation_steps": "gradient accumulation steps",
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


def shown(value: Any) -> str:
    """A value of a config as a reader may see it: of a path or address the last part, of a Hub id all of it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if ("/" not in text and "\\" not in text) or (_HUB_ID.fullmatch(text) and text[0] != "." and not _exists(text)):
        return text
    return re.split(r"[/\\]", text.partition("?")[0].rstrip("/\\"))[-1]


def _exists(text: str) -> bool:
    return Path(text).exists()


def score(record: RunRecord, value: float | None) -> str:
    """A score with the digits that fit the metric, a dash for none."""
    return "–" if value is None else f"{value:.{_DIGITS.get(record.metric, 4)}f}"


def results(record: RunRecord, export: str) -> str:
    """The last epoch's score as it is and with ReLU substituted, and on what it was measured."""
    last, data = record.last, record.data
    trained, swapped = ("", " (this model)") if export == "relu" else (" (this model)", "")
    rows = [(f"λ-GELU, as trained{trained}", score(record, last.score), last.loss)]
    if last.relu_score is not None:
        rows.append((f"ReLU, the same weights{swapped}", score(record, last.relu_score), last.relu_loss))
    direction = "higher" if record.greater_is_better else "lower"
    lines = [
        f"| network | {record.metric} ({direction} is better) | loss |",
        "|---|---|---|",
        *(f"| {name} | {value} | {'–' if loss is None else f'{loss:.4f}'} |" for name, value, loss in rows),
        "",
        f"Measured after the last epoch ({last.epoch:g}), which is the one saved, on {data['eval_samples']:,} samples "
        f"of {shown(data['source'])}, split {data['eval_split']}. One run with seed {record.config['seed']}.",
    ]
    return "\n".join(lines)


def substitution(record: RunRecord) -> str:
    """What the swap did to the logits of the last evaluation; empty where nothing was substituted."""
    last = record.last
    if last.relu_max_logit_change is None or last.relu_unchanged_predictions is None:
        return ""
    return (
        f"On the samples of the table above, the largest change of a logit was {last.relu_max_logit_change:.2g}, and "
        f"{_percent(last.relu_unchanged_predictions)} of the predictions (the largest logit) stayed the same."
    )


def _percent(fraction: float) -> str:
    # 99.996 % must not be read as all of them.
    return "100 %" if fraction == 1 else f"{min(fraction, 0.9999):.2%}".replace("%", " %")


def hardness_table(final: Mapping[str, float], earlier: Mapping[str, Mapping[str, float]]) -> str:
    """λ of every gate, at the stages `earlier` (label → {gate: λ}) and at the end, and the bound of the swap."""
    titles = ("gate", *(f"λ {label}" for label in earlier), "λ", "κ/λ")
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for site, value in final.items():
        before = [f"{stage[site]:.4f}" if site in stage else "–" for stage in earlier.values()]
        cells = (f"`{site or 'model'}`", *before, f"{value:.4g}", f"{swap_error_bound(value):.2g}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def earlier_hardness(record: RunRecord | None) -> dict[str, Mapping[str, float]]:
    """{stage: {gate: λ}} before the end of training; without a record, one stage of which nothing is known."""
    stages: dict[str, Mapping[str, float]] = {"before training": record.initial_hardness if record else {}}
    if record is not None and record.as_learned is not None:
        stages["as learned, before hardening"] = record.as_learned.hardness
    return stages


def recipe(record: RunRecord) -> str:
    """How the network was trained, on how much of the data, on what, with which versions."""
    config = record.config
    names = dict(_RECIPE)
    if config["activation"] == "lambda_gelu":
        names |= _HARDNESS_RECIPE
        if config["init_mode"] != "uniform":
            names["high_hardness"] = "largest initial λ"
        if config["harden"]:
            names |= _HARDENING_RECIPE
    rows = [f"| {label} | {shown(config[key])} |" for key, label in names.items() if config.get(key) is not None]
    parameters = f"{record.model['parameters']:,}" + (" (the λ among them)" if record.initial_hardness else "")
    table = ["| | |", "|---|---|", f"| parameters | {parameters} |", *rows]
    return "\n".join([*table, "", data_note(record), "", provenance(record)])


def data_note(record: RunRecord) -> str:
    """How much of the data set the run saw."""
    config, data = record.config, record.data
    text = f"Trained on {data['train_samples']:,} samples of {shown(data['source'])}"
    limits = []
    if config.get("max_train_samples") is not None:
        limits.append(f"training was limited to {config['max_train_samples']:,} samples")
    if config.get("validation_fraction"):
        limits.append(f"{config['validation_fraction']:.0%} of the training split was held out")
    if (config.get("max_steps") or -1) > 0:
        limits.append(f"training was limited to {config['max_steps']:,} steps")
    if config.get("max_eval_samples") is not None:
        limits.append(f"evaluation was limited to {config['max_eval_samples']:,} samples")
    if limits and "max_eval_samples" not in config:
        limits.append("the record, an early one, does not say whether evaluation was")
    if not limits:
        return f"{text}, evaluated on {data['eval_samples']:,}; no limit was set on either."
    return f"{text}, evaluated on {data['eval_samples']:,}. This is not all of the data: {'; '.join(limits)}."


def provenance(record: RunRecord) -> str:
    """When, where and with what the record was made."""
    hardware = record.hardware
    accelerators = ", ".join(hardware["accelerators"]) or "no accelerator"
    system = str(hardware["platform"]).partition("-")[0]  # the rest names the kernel's build
    versions = ", ".join(f"{package} {version}" for package, version in record.versions.items())
    return (
        f"The run took {record.seconds:,.0f} s, evaluation included, and ended on {record.created[:10]}, with "
        f"{hardware['processes']} process{'' if hardware['processes'] == 1 else 'es'} on {hardware['cpu']} "
        f"({hardware['cpu_cores']} cores), {accelerators}, "
        f"{system}. Versions: {versions}."
    )
