"""Model cards: what a checkpoint is, from its run's record, by huggingface_hub."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from lgelu_lab.benchmarks.cifar_resnet import ARCHITECTURE
from lgelu_lab.studies.records import RunRecord

from hf_lgelu.export.hub import card_tables, loading_code
from hf_lgelu.export.hub.checkpoint_facts import CheckpointFacts, facts_of_folder, facts_of_record
from hf_lgelu.export.hub.hardness_figure import draw_hardness
from hf_lgelu.export.hub.push import CARD_FILE
from hf_lgelu.models.comparison import OutputChange

FIGURE_FILE = "hardness.png"
TEMPLATE = Path(__file__).with_name("model_card_template.md")

_TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForImageClassification": "image-classification",
    "ForSequenceClassification": "text-classification",
    "MLPForClassification": "tabular-classification",
}
_EXPORTS = {
    "relu": "It was trained with λ-GELU, a GELU whose gates learn how hard they are, and has ReLU in the place of each "
    "gate, with the weights as they were.",
    "gelu": "It was trained with λ-GELU, a GELU whose gates learn how hard they are; λ is folded into the weights, so "
    "that plain GELU computes the same function.",
    "lambda_gelu": "Its activation is λ-GELU, a GELU whose gates learn how hard they are.",
}
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")


def card_data(
    record: RunRecord | None,
    *,
    export: str = "relu",
    model_class: str | None = None,
    repo_id: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
) -> ModelCardData:
    """The YAML header of a card: task, data set, metric and result of the network in that form.

    Raises ValueError for an `export` that is not "relu", "gelu" or "lambda_gelu".
    """
    _check_export(export)
    model_class = model_class or (record.model["class"] if record else "")
    data = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag=pipeline_tag(model_class),
        tags=["lambda-gelu", *(["relu", "relufication"] if export == "relu" else [])],
        base_model=base_model or _hub_id(record.config.get("pretrained") if record else None),
        model_name=_name(record, export, repo_id),
    )
    if record is not None:
        source = card_tables.shown(record.data["source"])
        data.datasets = [source] if "/" in source else None
        data.metrics = [record.metric]
        value = record.last.relu_score if export == "relu" else record.last.score
        if value is not None:  # a ReLU model that was not evaluated has no result, least of all the smooth one's
            data.eval_results = [_eval_result(record, value, data.pipeline_tag or "other", source)]
    return data


def _eval_result(record: RunRecord, value: float, task: str, source: str) -> EvalResult:
    return EvalResult(
        task_type=task,
        dataset_type=source,
        dataset_name=source if "/" in source else record.config["benchmark"].partition("-")[2],
        dataset_split=record.data["eval_split"].partition(" ")[0],
        metric_type=record.metric,
        metric_name=f"{record.metric}, last epoch",
        metric_value=float(card_tables.score(record, value)),
    )


def render_card(
    record: RunRecord | None,
    *,
    export: str = "relu",
    checkpoint: CheckpointFacts | None = None,
    hardness: Mapping[str, float] | None = None,
    change: OutputChange | None = None,
    figure: str | None = None,
    repo_id: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
) -> ModelCard:
    """The card of a network that was trained with λ-GELU.

    Args:
        record: of its run. None for a network that has none: the card then has what an export measured.
        export: the form it is in: "relu", "gelu" (λ folded into the weights) or "lambda_gelu".
        checkpoint: how it is loaded; from the record if None.
        hardness: {site: λ} before the export (`ReLUExport.hardness`); the record's last epoch if None.
        change: what the export did to the outputs on example inputs (`ReLUExport.change`).
        figure: path of the picture of λ, relative to the card.
        repo_id: on the Hub, "user/name".
        license: the Hub's short name of it, e.g. "apache-2.0".
        base_model: Hub id of the model that it was fine-tuned from; the record's `pretrained` if that is one.

    Raises:
        ValueError: an unknown `export`; neither a record nor `checkpoint` and `hardness`; a record of a network
            without λ-GELU; or the card would show an access token.
    """
    _check_export(export)
    checkpoint, hardness = _complete(record, checkpoint, hardness)
    where = repo_id or "FOLDER"
    card = ModelCard.from_template(
        card_data(
            record, export=export, model_class=checkpoint.model_class, repo_id=repo_id, license=license,
            base_model=base_model,
        ),
        template_path=str(TEMPLATE),
        title=_name(record, export, repo_id),
        summary=_summary(record, export, checkpoint, hardness),
        results=card_tables.results(record, export) if record else "",
        substitution=_substitution(record, export, change),
        figure=figure,
        hardness=card_tables.hardness_table(hardness, card_tables.earlier_hardness(record)),
        recipe=card_tables.recipe(record) if record else "",
        plain_code=_plain_code(checkpoint, export, where),
        carried_code=loading_code.with_carried_code(where) if checkpoint.own_code and export != "lambda_gelu" else "",
        lgelu_code=loading_code.with_hf_lgelu(checkpoint.model_class, where),
        input_note=_input_note(record, checkpoint),
        limits=_limits(record, export),
        licence=f"`{license}`" if license else "None was stated by who made this model: ask before you use it.",
    )  # fmt: skip
    if _TOKEN.search(card.content):
        raise ValueError("the card would show what looks like an access token; take it out of the record or arguments")
    return card


def write_card(
    folder: str | os.PathLike,
    record: RunRecord | None,
    *,
    export: str = "relu",
    hardness: Mapping[str, float] | None = None,
    change: OutputChange | None = None,
    repo_id: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
) -> Path:
    """Write README.md and hardness.png into a model's folder and return the card's path; see `render_card`.

    Raises ImportError without matplotlib (extra "benchmarks"), and what `render_card` raises.
    """
    folder = Path(folder)
    checkpoint, hardness = _complete(record, facts_of_folder(folder), hardness)
    card = render_card(
        record, export=export, checkpoint=checkpoint, hardness=hardness, change=change, figure=FIGURE_FILE,
        repo_id=repo_id, license=license, base_model=base_model,
    )  # fmt: skip
    draw_hardness(folder / FIGURE_FILE, card_tables.earlier_hardness(record), hardness)
    return _write(card, folder / CARD_FILE)


def write_record_card(
    record: RunRecord,
    path: str | os.PathLike,
    *,
    export: str = "relu",
    repo_id: str | None = None,
    license: str | None = None,
) -> Path:
    """Write a card where no model is, such as the example cards of this repository; returns its path.

    The picture goes to `figures/<name of the card>.png` beside it. Raises what `render_card` raises, and ImportError
    without matplotlib.
    """
    path = Path(path)
    figure = Path("figures", f"{path.stem}.png")
    card = render_card(record, export=export, figure=figure.as_posix(), repo_id=repo_id, license=license)
    draw_hardness(path.parent / figure, card_tables.earlier_hardness(record), record.last.hardness)
    return _write(card, path)


def _write(card: ModelCard, path: Path) -> Path:
    path.write_text(f"{str(card).rstrip()}\n", encoding="utf-8")
    return path


def _complete(
    record: RunRecord | None, checkpoint: CheckpointFacts | None, hardness: Mapping[str, float] | None
) -> tuple[CheckpointFacts, Mapping[str, float]]:
    if record is None and (checkpoint is None or hardness is None):
        raise ValueError("without a run's record, give checkpoint (facts_of_folder) and hardness (of ReLUExport)")
    hardness = record.last.hardness if hardness is None else hardness
    if not hardness:
        raise ValueError("there is no λ: the card describes networks that were trained with λ-GELU")
    return checkpoint or facts_of_record(record), hardness


def _check_export(export: str) -> None:
    if export not in _EXPORTS:
        raise ValueError(f"unknown export {export!r}; accepted: {', '.join(_EXPORTS)}")


def _name(record: RunRecord | None, export: str, repo_id: str | None) -> str:
    if repo_id:
        return repo_id.rpartition("/")[2]
    return f"{record.config['benchmark'] if record else 'model'}-{export.replace('_', '-')}"


def pipeline_tag(model_class: str) -> str | None:
    """The Hub's name of what models of this class do; None for a class that is not known here."""
    return next((task for suffix, task in _TASKS.items() if model_class.endswith(suffix)), None)


def _hub_id(pretrained: str | None) -> str | None:
    if not pretrained or Path(pretrained).exists() or card_tables.shown(pretrained) != pretrained:
        return None
    return pretrained


def _summary(record: RunRecord | None, export: str, checkpoint: CheckpointFacts, hardness: Mapping[str, float]) -> str:
    where = f", trained on the benchmark `{record.config['benchmark']}` of hf_lgelu" if record else ""
    softest, hardest = min(hardness.values()), max(hardness.values())
    span = f"λ = {softest:.4g}" if f"{softest:.4g}" == f"{hardest:.4g}" else f"λ from {softest:.4g} to {hardest:.4g}"
    hardened = " after hardening" if record and record.config["harden"] else ""
    ended = f"Its {len(hardness)} gates ended at {span}{hardened}."
    return f"A network of class `{checkpoint.model_class}`{where}. {_EXPORTS[export]} {ended}"


def _substitution(record: RunRecord | None, export: str, change: OutputChange | None) -> str:
    parts = [card_tables.substitution(record)] if record else []
    if change is not None:
        after = {"relu": "after the swap to ReLU", "gelu": "after λ was folded into the weights"}.get(export, "")
        parts.append(f"On the example inputs of the export, {after}: {change}.")
    return "\n\n".join(part for part in parts if part)


def _plain_code(checkpoint: CheckpointFacts, export: str, where: str) -> str:
    if export == "lambda_gelu":
        return ""
    return loading_code.without_hf_lgelu(
        checkpoint.model_class, where, activation=export, architecture=checkpoint.architecture,
        layers=checkpoint.layers, classes=checkpoint.classes,
    )  # fmt: skip


def _input_note(record: RunRecord | None, checkpoint: CheckpointFacts) -> str:
    if record is None:
        return ""
    note = f"Inputs are prepared as hf_lgelu's benchmark `{record.config['benchmark']}` does"
    if checkpoint.model_class == "MLPForClassification":
        return f"{note}: rows of features, standardized by the training rows; the statistics are not in the checkpoint."
    if checkpoint.architecture == ARCHITECTURE:
        return f"{note}: pixels divided by 255, then normalized by `mean` and `std` of config.json's `pretrained_cfg`."
    return f"{note}; the tokenizer or image processor is beside the weights."


def _limits(record: RunRecord | None, export: str) -> str:
    lines = []
    if record is not None:
        lines.append("- A network of a benchmark, made to measure activations; it was not examined for any other use.")
        lines.append("- The numbers are of one run; another seed gives others.")
    if export == "relu":
        lines.append("- Only the gates are ReLU: softmax, normalization and other parts are what they were.")
        lines.append("- Zeros of ReLU are no speed-up by themselves; none is claimed.")
    else:
        lines.append("- The gates are smooth: what needs a piecewise linear network does not apply to this one.")
    if record is None:
        lines.append("- There is no record of its training: what it was trained on is not known here.")
    return "\n".join(lines)
