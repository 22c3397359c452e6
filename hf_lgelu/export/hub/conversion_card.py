"""Model cards of networks that were converted to ReLU without training, from the conversion's report."""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.errors import HFValidationError, HTTPError

from hf_lgelu.export.hub import loading
from hf_lgelu.export.hub.card_text import (
    code,
    is_licence,
    made_with,
    pipeline_tag,
    plain,
    require_card_names,
    require_no_token,
)
from hf_lgelu.export.hub.hub_id import is_hub_id
from hf_lgelu.export.hub.loading import CheckpointFacts, facts_of_folder
from hf_lgelu.files import whole_file
from hf_lgelu.formats import quoted, score
from hf_lgelu.refit.page import LAYER_NOTE, bullets, layer_table, still_smooth, whole_network
from hf_lgelu.refit.report import ConversionReport, evaluations
from hf_lgelu.refit.wording import gates_in_words, how_far, what_was_done

_LONGEST_HEADER = 65536  # characters
# What a report calls its target, without a slope → its tag on the Hub, and whether it leaves zeros behind the gates.
_TARGETS = {
    "ReLU": ("relu", True),
    "ReLU6": ("relu6", True),
    "LeakyReLU": ("leaky-relu", False),
    "HardSwish": ("hardswish", False),
    "squared ReLU": ("squared-relu", True),
}
TEMPLATE = Path(__file__).with_name("conversion_card_template.md")


@dataclass(frozen=True)
class Provenance:
    """How a converted network came about.

    Args:
        model: Hub id of the original, or the last part of its folder's path: a card names no local paths.
        model_is_on_hub: whether that is a Hub id.
        data: the data set that was fitted on, in words.
        samples: inputs taken from it (rows, sequences, images).
        seed: of their choice; nothing else in a conversion is random.
        evaluation: the second set, in words; None without one.
        evaluation_source: Hub id of its data set, if it is on the Hub.
        evaluation_is_whole: no row of that split was left out; only then are its scores a result on the data set.
        created: UTC, ISO 8601.
        versions: {package: version}.
        hardware: of `hf_lgelu.environment.hardware`.
        equalized: names of the layers whose units were rescaled for int8 afterwards (`equalize_ranges`).
    """

    model: str
    model_is_on_hub: bool
    data: str
    samples: int
    seed: int
    evaluation: str | None
    evaluation_source: str | None
    created: str
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]
    evaluation_is_whole: bool = False
    equalized: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def conversion_card_data(
    report: ConversionReport,
    provenance: Provenance,
    *,
    model_class: str,
    repo_id: str | None = None,
    license: str | None = None,
) -> ModelCardData:
    """The YAML header: task, original model, and the refitted network's scores on the second set, if it has labels.

    They are a result on a data set of the Hub only where the second set is a whole split of it.
    """
    task = pipeline_tag(model_class)
    tag, _ = _target(report)
    data = ModelCardData(
        license=license,
        library_name=CheckpointFacts(model_class).library,
        pipeline_tag=task,
        tags=[tag, *(["relufication"] if tag == "relu" else []), "lambda-gelu"],
        base_model=provenance.model if provenance.model_is_on_hub else None,
    )
    metrics = report.evaluation.refitted.metrics if report.evaluation else {}
    if metrics:
        data.metrics = list(metrics)
    if metrics and provenance.evaluation_is_whole and is_hub_id(provenance.evaluation_source):
        data.model_name = _title(report, provenance, repo_id)
        data.eval_results = [
            EvalResult(
                task_type=task or "other", dataset_type=provenance.evaluation_source,
                dataset_name=provenance.evaluation or provenance.evaluation_source,
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
        license: the Hub's short name of it; that of the original holds for this model too.

    Raises ValueError for a licence or repository that is not named as the Hub names it, or if the card would show an
    access token.
    """
    require_card_names(repo_id, license)
    where = repo_id or "FOLDER"
    name, needs_package = checkpoint.model_class, checkpoint.needs_package
    card = ModelCard.from_template(
        conversion_card_data(report, provenance, model_class=name, repo_id=repo_id, license=license),
        template_path=str(TEMPLATE),
        title=plain(_title(report, provenance, repo_id)),
        summary=_summary(report, provenance, checkpoint),
        results=_results(report, provenance),
        figure=figure,
        recipe=_recipe(report, provenance),
        warnings=bullets(report.warnings),
        layers=layer_table(report.layers),
        layer_note=LAYER_NOTE,
        plain_code="" if needs_package else loading.without_hf_lgelu(checkpoint, where, activation=report.target),
        carried_code=loading.with_carried_code(where) if checkpoint.own_code and not needs_package else "",
        lgelu_code=loading.with_hf_lgelu(name, where),
        limits=_limits(report),
        licence=_licence(license),
    )  # fmt: skip
    require_no_token(card)
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
    path = Path(folder) / REPOCARD_NAME
    with whole_file(path, overwrite=True) as new:
        new.write_text(f"{str(card).rstrip()}\n", encoding="utf-8")
    return path


def _target(report: ConversionReport) -> tuple[str, bool]:
    return _TARGETS[report.target.partition("(")[0]]


def _title(report: ConversionReport, provenance: Provenance, repo_id: str | None) -> str:
    return repo_id.rpartition("/")[2] if repo_id else f"{provenance.model.rpartition('/')[2]}-{_target(report)[0]}"


def _original(provenance: Provenance) -> str:
    if provenance.model_is_on_hub:
        return f"[{provenance.model}](https://huggingface.co/{provenance.model})"
    return code(provenance.model)


def _summary(report: ConversionReport, provenance: Provenance, checkpoint: CheckpointFacts) -> str:
    return (
        f"A network of class {code(checkpoint.model_class)}: {_original(provenance)} with {report.target} in the "
        f"place of its "
        f"{gates_in_words(report)}. It was not trained for that: the linear maps behind the gates were refitted to "
        f"what the original computes, on inputs without labels{_beside_the_refit(report)}. "
        f"{_rescaled(provenance)}All other weights are the original's.\n\n"
        f"**How far it is from the original.** {how_far(report)}"
    )


def _rescaled(provenance: Provenance) -> str:
    if not provenance.equalized:
        return ""
    layers = quoted(provenance.equalized[:4]) + (" and so on" if len(provenance.equalized) > 4 else "")
    return (
        f"For int8, the units before {len(provenance.equalized)} of the layers ({layers}) were then rescaled by powers "
        "of two, in the maps before and behind their gates, which changes no output. "
    )


def _beside_the_refit(report: ConversionReport) -> str:
    """What else was moved, by the rung that was kept."""
    kept = next((step.effort for step in reversed(report.steps) if step.is_kept), "refit")
    return {
        "refit": "",
        "place": "; the maps before the gates got the kink and the slope of each ReLU",
        "distill": "; these and the maps before the gates also took steps of Adam towards its outputs",
    }[kept]


def _results(report: ConversionReport, provenance: Provenance) -> str:
    parts = [whole_network(report)]
    scores = {name for _, evaluation in evaluations(report) for name in evaluation.original_metrics}
    if "perplexity" in scores:
        parts.append("Of perplexity, lower is better.")
    if provenance.evaluation:
        apart = "Nothing was fitted or chosen on it."
        if report.repeated:
            apart = f"{report.repeated:,} of its units are among those that the network was fitted and chosen on."
        parts.append(f"The second set is {plain(provenance.evaluation)}. {apart}")
    return "\n\n".join(parts)


def _recipe(report: ConversionReport, provenance: Provenance) -> str:
    return "\n\n".join(
        (
            what_was_done(report),
            f"The inputs are {provenance.samples:,} of {plain(provenance.data)}, chosen with seed "
            f"{provenance.seed}; nothing else was random. Their labels, where there are any, were used for the scores "
            "above alone.",
            f"Made on {plain(provenance.created[:10])} {made_with(provenance.hardware, provenance.versions)}",
        )
    )


def _limits(report: ConversionReport) -> str:
    lines = [
        "- Measured on the inputs named above and on no others. On inputs unlike the calibration set the network may "
        "be further from the original, and nothing on this card would show it.",
        "- What the original cannot do, or does wrong, this one does not do better.",
        f"- Only the gates are {report.target}: softmax, normalization and other parts are what they were.",
    ]
    if _target(report)[1]:
        lines.append(f"- Zeros of {report.target} are no speed-up by themselves; none is claimed.")
    if report.evaluation is None:
        lines.insert(1, "- It was not measured on a second set, independent of the calibration inputs.")
    if report.smooth_calls:
        lines.append(f"- Still smooth:\n{re.sub('^', '  ', still_smooth(report), flags=re.MULTILINE)}")
    return "\n".join(lines)


def _licence(license: str | None) -> str:
    if license:
        return f"`{license}`. What the original's licence asks for holds for this model too."
    return "The original's, which is not known here: ask who made it before you use or publish this model."


class _NoAliases(yaml.SafeLoader):
    """YAML without references, with which a few lines can grow to billions."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("a card's header holds no aliases")
        return super().compose_node(parent, index)


def original_licence(name_or_path: str | os.PathLike) -> str | None:
    """The licence that the card of a folder or Hub id states; None where there is no card, or none that states one."""
    card = Path(name_or_path) / REPOCARD_NAME
    try:
        if not card.is_file():
            if Path(name_or_path).exists():
                return None
            card = Path(hf_hub_download(str(name_or_path), REPOCARD_NAME))
        with card.open(encoding="utf-8") as file:
            text = file.read(_LONGEST_HEADER)
        header = re.match(r"---[ \t]*\n(.*?)\n---[ \t]*\n", text, re.DOTALL)
        fields = yaml.load(header[1], _NoAliases) if header else None  # a SafeLoader
    except (OSError, UnicodeDecodeError, yaml.YAMLError, HTTPError, HFValidationError):
        return None
    licence = fields.get("license") if isinstance(fields, dict) else None
    return licence if isinstance(licence, str) and is_licence(licence) else None
