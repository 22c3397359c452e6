"""Model cards of networks that were converted to ReLU without training, from the conversion's report."""

import os
import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_lgelu.export.hub import loading_code
from hf_lgelu.export.hub.checkpoint_facts import CheckpointFacts, facts_of_folder
from hf_lgelu.export.hub.model_card import pipeline_tag
from hf_lgelu.export.hub.push import CARD_FILE
from hf_lgelu.refit.report import (
    LAYER_NOTE,
    ConversionReport,
    Provenance,
    bullets,
    evaluations,
    gates_in_words,
    layer_table,
    score,
    still_smooth,
    what_was_done,
    whole_network,
)

TEMPLATE = Path(__file__).with_name("conversion_card_template.md")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")


def conversion_card_data(
    report: ConversionReport,
    provenance: Provenance,
    *,
    model_class: str,
    repo_id: str | None = None,
    license: str | None = None,
) -> ModelCardData:
    """The YAML header: task, original model, and the refitted network's scores on the second set, if it has labels."""
    task = pipeline_tag(model_class)
    data = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag=task,
        tags=["relu", "relufication", "lambda-gelu"],
        base_model=provenance.model if provenance.model_is_on_hub else None,
        model_name=_title(provenance, repo_id),
    )
    metrics = report.evaluation.refitted.metrics if report.evaluation else {}
    if metrics:
        where = provenance.evaluation or "second set"
        data.metrics = list(metrics)
        data.eval_results = [
            EvalResult(
                task_type=task or "other", dataset_type=provenance.evaluation_source or where, dataset_name=where,
                metric_type=name, metric_name=f"{name}, second set", metric_value=float(score(name, value)),
            )
            for name, value in metrics.items()
        ]  # fmt: skip
    return data


def render_conversion_card(
    report: ConversionReport,
    provenance: Provenance,
    checkpoint: CheckpointFacts,
    *,
    figure: str | None = None,
    repo_id: str | None = None,
    license: str | None = None,
) -> ModelCard:
    """The card of a converted network.

    Args:
        report: of `convert_to_relu`.
        provenance: from what it was made.
        checkpoint: how it is loaded (`facts_of_folder`).
        figure: path of `draw_conversion`'s picture, relative to the card.
        repo_id: on the Hub, "user/name".
        license: of the original, which holds for this model too; the Hub's short name of it.

    Raises ValueError if the card would show an access token.
    """
    where = repo_id or "FOLDER"
    name = checkpoint.model_class
    card = ModelCard.from_template(
        conversion_card_data(report, provenance, model_class=name, repo_id=repo_id, license=license),
        template_path=str(TEMPLATE),
        title=_title(provenance, repo_id),
        summary=_summary(report, provenance, checkpoint),
        results=_results(report, provenance),
        figure=figure,
        recipe=_recipe(report, provenance),
        warnings=bullets(report.warnings),
        layers=layer_table(report.layers),
        layer_note=LAYER_NOTE,
        plain_code=loading_code.without_hf_lgelu(
            name, where, activation="relu", architecture=checkpoint.architecture, layers=checkpoint.layers,
            classes=checkpoint.classes,
        ),
        carried_code=loading_code.with_carried_code(where) if checkpoint.own_code else "",
        lgelu_code=loading_code.with_hf_lgelu(name, where),
        limits=_limits(report),
        licence=_licence(license),
    )  # fmt: skip
    if _TOKEN.search(card.content):
        raise ValueError("the card would show what looks like an access token; take it out of the arguments")
    return card


def write_conversion_card(
    folder: str | os.PathLike,
    report: ConversionReport,
    provenance: Provenance,
    *,
    figure: str | None = None,
    repo_id: str | None = None,
    license: str | None = None,
) -> Path:
    """Write README.md into the folder of a converted network and return its path; see `render_conversion_card`."""
    card = render_conversion_card(
        report, provenance, facts_of_folder(folder), figure=figure, repo_id=repo_id, license=license
    )
    path = Path(folder) / CARD_FILE
    path.write_text(f"{str(card).rstrip()}\n", encoding="utf-8")
    return path


def _title(provenance: Provenance, repo_id: str | None) -> str:
    return repo_id.rpartition("/")[2] if repo_id else f"{provenance.model.rpartition('/')[2]}-relu"


def _original(provenance: Provenance) -> str:
    if provenance.model_is_on_hub:
        return f"[{provenance.model}](https://huggingface.co/{provenance.model})"
    return f"`{provenance.model}`"


def _summary(report: ConversionReport, provenance: Provenance, checkpoint: CheckpointFacts) -> str:
    return (
        f"A network of class `{checkpoint.model_class}`: {_original(provenance)} with ReLU in the place of its "
        f"{gates_in_words(report)}. It was not trained for that: the linear maps behind the gates were refitted to "
        "what the original computes, on inputs without labels. All other weights are the original's."
    )


def _results(report: ConversionReport, provenance: Provenance) -> str:
    parts = [whole_network(report)]
    scores = {name for _, evaluation in evaluations(report) for name in evaluation.original_metrics}
    if "perplexity" in scores:
        parts.append("Of perplexity, lower is better.")
    if provenance.evaluation:
        parts.append(f"The second set is {provenance.evaluation}. Nothing was fitted or chosen on it.")
    return "\n\n".join(parts)


def _recipe(report: ConversionReport, provenance: Provenance) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in provenance.versions.items())
    hardware = provenance.hardware
    processes = hardware["processes"]
    accelerators = ", ".join(hardware["accelerators"]) or "no accelerator"
    return "\n\n".join(
        (
            what_was_done(report),
            f"The inputs are {provenance.samples:,} of {provenance.data}, chosen with seed {provenance.seed}; "
            "nothing else was random. Their labels, where there are any, were used for the scores above alone.",
            f"Made on {provenance.created[:10]} with {processes} process{'' if processes == 1 else 'es'} on "
            f"{hardware['cpu']} ({hardware['cpu_cores']} cores), {accelerators}. Versions: {versions}.",
        )
    )


def _limits(report: ConversionReport) -> str:
    lines = [
        "- Measured on the inputs named above and on no others. On inputs unlike the calibration set the network may "
        "be further from the original, and nothing on this card would show it.",
        "- What the original cannot do, or does wrong, this one does not do better.",
        "- Only the gates are ReLU: softmax, normalization and other parts are what they were.",
        "- Zeros of ReLU are no speed-up by themselves; none is claimed.",
    ]
    if report.evaluation is None:
        lines.insert(1, "- It was not measured on a second set, independent of the calibration inputs.")
    if report.smooth_calls:
        lines.append(f"- Still smooth:\n{re.sub('^', '  ', still_smooth(report), flags=re.MULTILINE)}")
    return "\n".join(lines)


def _licence(license: str | None) -> str:
    if license:
        return f"`{license}`, the original's."
    return "The original's, which is not known here: ask who made it before you use or publish this model."
