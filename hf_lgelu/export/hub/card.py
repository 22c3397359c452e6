"""Model cards: of a network that was trained with λ-GELU, and of one that was converted to ReLU."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel
from transformers.modelcard import TASK_MAPPING

from hf_lgelu.activation.gates import DEFAULT_GATE, check_gate
from hf_lgelu.activation.hardness import require_known, swap_error_bound
from hf_lgelu.comparing.output_comparison import OutputChange
from hf_lgelu.export.hub import loading
from hf_lgelu.export.hub.conversion_page import layer_table, network_table, whole_network
from hf_lgelu.export.hub.loading import CheckpointFacts
from hf_lgelu.files import is_hub_id, save_picture, whole_file
from hf_lgelu.formats import percent, quoted, score
from hf_lgelu.models.hardening import mean_of_several, smallest_by_site
from hf_lgelu.networks.sites import LEARNED_KINDS, SMOOTH_KINDS, find_sites, require_lambda_gelu, sites_in_words
from hf_lgelu.refit.config import RUNGS, TARGETS
from hf_lgelu.refit.report import ConversionReport, evaluations, gates_in_words, how_far, what_was_done

if TYPE_CHECKING:
    from hf_lgelu.export.comparison import NetworkComparison

FORMS = ("relu", "gelu", "lambda_gelu")
"""What a card's network is: with ReLU in the place of its λ-gates, with λ absorbed by the weights, or as trained."""

TEMPLATE = Path(__file__).with_name("model_card_template.md")
_CONVERSION_TEMPLATE = Path(__file__).with_name("conversion_card_template.md")
_LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,63}")
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}")  # of 34; shorter are names of Python: hf_transfer, hf_quantizer
_MARKUP = re.compile(r"([\\`*\[\]<>|])")

# By the endings of classes that transformers' table does not have: those of this package and of sentence-transformers,
# and new or rare ones of transformers.
_OTHER_TASKS = {
    "MLPForClassification": "tabular-classification",
    "SentenceTransformer": "sentence-similarity",
    "SparseEncoder": "feature-extraction",
    "CrossEncoder": "text-ranking",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForImageClassification": "image-classification",
    "ForSequenceClassification": "text-classification",
}


@dataclass(frozen=True)
class CardScores:
    """The scores of a λ-GELU network as trained, and with ReLU in the place of each gate (`relu_…`), if measured.

    `metric` is spelled as by `evaluate`; `measured` says on what and when, in Markdown, `epoch` after which epoch. Of
    scores of all rows of a `split` of `CardFacts.dataset` the card's header lists a result on that data set.
    """

    metric: str
    score: float
    greater_is_better: bool = True
    loss: float | None = None
    relu_score: float | None = None
    relu_loss: float | None = None
    relu_max_logit_change: float | None = None
    relu_unchanged_predictions: float | None = None
    measured: str = ""
    epoch: float | None = None
    split: str | None = None


@dataclass(frozen=True)
class CardFacts:
    """The facts of a card about a network that was trained with λ-GELU; the card leaves out what is not given.

    Args:
        name: the card's title without its last part, which is the form.
        hardness: {gate: λ} at the end of training, of a gate with several the smallest, which bounds its swap.
        mean_hardness: {gate: mean λ} of the gates with several λ.
        gates: {gate: its name in a config}, such as "lambda_silu"; λ-GELU where it is left out.
        hardened: its gates were hardened, not only learned.
        earlier_hardness: {stage: {gate: λ}} before, in the order of time; of several λ the mean.
        trained_on: completes the sentence "A network of class X, trained on …".
        training, input_note, limits: how it was trained, in Markdown; sentences on its inputs and its limits.
        dataset, base_model: Hub ids of the data set that was read, and of the model that it was fine-tuned from.
        loading_code: {form: Python that loads it}, where `from_pretrained` of its class does not.
        license: the Hub's short name of it, e.g. "mit"; None says that none was stated.
    """

    name: str = "model"
    hardness: Mapping[str, float] = field(default_factory=dict)
    mean_hardness: Mapping[str, float] = field(default_factory=dict)
    gates: Mapping[str, str] = field(default_factory=dict)
    hardened: bool = False
    earlier_hardness: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    trained_on: str = ""
    training: str = ""
    scores: CardScores | None = None
    dataset: str | None = None
    input_note: str = ""
    limits: Sequence[str] = ()
    loading_code: Mapping[str, str] = field(default_factory=dict)
    license: str | None = None
    base_model: str | None = None


def write_card(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    form: str = "lambda_gelu",
    change: OutputChange | None = None,
    compared: "NetworkComparison | None" = None,
    license: str | None = None,
    repo_id: str | None = None,
) -> Path:
    """Write README.md into a folder and return its path; `export_relu` and `export_gelu` do so by themselves.

    Args:
        model: with λ-GELU, as it was trained.
        folder: of `model`, or of what an export made of it.
        form: what is in the folder: "lambda_gelu" (`model` itself), "relu" or "gelu" (λ absorbed by the weights).
        change: what an export did to the outputs on example inputs.
        compared: `compare_networks` of `model` and what is in the folder, for the table on top.
        license: the Hub's short name of it, such as "mit"; None takes that of the checkpoint's own card.
        repo_id: on the Hub, "user/name".

    Raises:
        ValueError: `model` has no λ-GELU, config.json has λ-gates where `form` says that they are gone, or a licence or
            repository is not named as the Hub names it.
        FileNotFoundError: no config.json.

    Example:
        >>> import tempfile
        >>> from hf_lgelu import MLPConfig, MLPForClassification
        >>> from hf_lgelu.export.hub.card import write_card
        >>> model = MLPForClassification(MLPConfig(num_features=3, hidden_size=4, num_hidden_layers=1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     write_card(model, folder, license="mit").name
        'README.md'
    """
    require_lambda_gelu(model)
    source = str(model.name_or_path)
    if (Path(source).parent / loading.MODULES_FILE).is_file():  # the encoder of a checkpoint of sentence-transformers
        source = str(Path(source).parent)
    checkpoint = loading.facts_of_folder(folder)
    if checkpoint.gates and form != "lambda_gelu":
        raise ValueError(
            f"{folder}/config.json says {', '.join(checkpoint.gates)}, and a card of form={form!r} would say that they "
            "are gone; give form='lambda_gelu', or the folder that export_relu or export_gelu saved"
        )
    others = [kind for kind in SMOOTH_KINDS if kind not in LEARNED_KINDS]
    had = sites_in_words(model, others) if form == "relu" and find_sites(model, others) else ""
    still = f"It is no ReLU network throughout: beside its λ-gates it had {had}, and has them still."
    facts = CardFacts(
        name=own_name(source) or "model",
        hardness=smallest_by_site(model),
        mean_hardness=mean_of_several(model),
        gates={site.name: site.kind for site in find_sites(model, LEARNED_KINDS)},
        license=license or (stated_licence(source) if source else None),
        limits=[still] if had else [],
    )
    top = ""
    if compared is not None and (distance := compared.rows[1].change) is not None:
        top = network_table(compared.rows[0].metrics, {"this model": distance}, main=True)
    card = render_card(facts, checkpoint, form=form, change=change, top=top, repo_id=repo_id)
    return save_card(card, folder)


def own_name(source: str) -> str:
    """The network's own name: the last part of a Hub id; of a folder the title of its card, or else its own name."""
    path = Path(source)
    if not source or not path.exists():
        return source.rpartition("/")[2]
    path = path.resolve()
    if path.parent.name == "snapshots":  # models--USER--NAME/snapshots/REVISION in the Hub's cache
        return path.parent.parent.name.rpartition("--")[2]
    titled = re.match(r"\s*# ([\w.-]+)[ \t]*\n", _header_and_text(path)[1])  # a name, no sentence
    return titled[1] if titled else path.name


def save_card(card: ModelCard, folder: str | os.PathLike, name: str = REPOCARD_NAME) -> Path:
    """Write a card into a folder, whole or not at all, and return its path; a link in its place is replaced."""
    path = Path(folder) / name
    with whole_file(path, overwrite=True) as new:
        new.write_text(f"{str(card).rstrip()}\n", encoding="utf-8")
    return path


def render_card(
    facts: CardFacts,
    checkpoint: CheckpointFacts,
    *,
    form: str = "relu",
    change: OutputChange | None = None,
    figure: str | None = None,
    top: str = "",
    repo_id: str | None = None,
) -> ModelCard:
    """The card of a network that was trained with λ-GELU, in one of FORMS; `figure` is the picture's path.

    `top` is the table below the title, in Markdown, where the facts have no scores.

    Raises ValueError for an unknown form, gates that are none, a licence or repository that is not named as the Hub
    names it, or if the card would show an access token.
    """
    require_known("form", form, FORMS)
    gates = {site: facts.gates.get(site, DEFAULT_GATE) for site in facts.hardness}
    rows = [check_gate(gate) for gate in dict.fromkeys(gates.values())]
    low, high = (f"{value(facts.hardness.values()):.4g}" for value in (min, max))
    dataset, scores = facts.dataset if is_hub_id(facts.dataset) else None, facts.scores
    measured = None if scores is None else scores.relu_score if form == "relu" else scores.score
    results = []
    # A ReLU model that was not evaluated has no result, least of all the smooth one's.
    if scores is not None and measured is not None and dataset and scores.split is not None:
        told = {"dataset_type": dataset, "dataset_name": dataset, "dataset_split": scores.split}
        results = [_result(checkpoint, scores.metric, measured, "" if scores.epoch is None else ", last epoch", **told)]
    return _rendered(
        TEMPLATE,
        checkpoint,
        f"{facts.name}-{form.replace('_', '-')}",
        repo_id,
        facts.license,
        activation=None if form == "lambda_gelu" else form,
        gate=rows[0].name,
        own_code=facts.loading_code.get(form, "").strip(),
        tags=["lambda-gelu", *(["relu", "relufication"] if form == "relu" else [])],
        base_model=facts.base_model,
        datasets=[dataset] if dataset else None,
        metrics=[scores.metric] if scores else None,
        results=results,
        facts=facts,
        form=form,
        change=change,
        figure=figure,
        top=top,
        learned=" and ".join(row.label for row in rows),
        unlearned=" or ".join(row.plain_label for row in rows),
        formulas="; ".join(f"{row.formula}: λ = 1 is {row.plain_label}, and λ → ∞ is ReLU" for row in rows),
        span=f"λ = {low}" if low == high else f"λ from {low} to {high}",
        bounds={site: swap_error_bound(value, gates[site]) for site, value in facts.hardness.items()},
        largest=max(row.swap_error for row in rows),
        stages={label: stage for label, stage in facts.earlier_hardness.items() if stage},
    )


@dataclass(frozen=True)
class Provenance:
    """How a converted network came about: of which original (a Hub id, or the last part of its folder's path) and data.

    `samples` inputs were taken from the data by the `seed`. `evaluation` is the second set in words, if there is one,
    and `evaluation_source` its Hub id. `evaluation_is_whole` says that no row of its split was left out: only then are
    its scores a result on the data set. `created` is UTC in ISO 8601.
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


def render_conversion_card(
    report: ConversionReport,
    provenance: Provenance,
    checkpoint: CheckpointFacts,
    *,
    figure: str | None = None,
    repo_id: str | None = None,
    license: str | None = None,
) -> ModelCard:
    """The card of a converted network; `figure` is the path of `draw_conversion`'s picture, relative to the card.

    `license` is the Hub's short name of it; the original's holds for this model too.

    Raises ValueError for a licence or repository that is not named as the Hub names it, or if the card would show an
    access token.
    """
    # A report has the target's title, with a slope of its own behind it or without.
    target = next(row for row in TARGETS.values() if row.title == report.target.partition("(")[0])
    metrics = report.evaluation.refitted.metrics if report.evaluation else {}
    measured = evaluations(report)[-1:]
    results, source = [], provenance.evaluation_source
    if source is not None and is_hub_id(source) and provenance.evaluation_is_whole:
        told = {"dataset_type": source, "dataset_name": provenance.evaluation or source}
        results = [_result(checkpoint, name, value, ", second set", **told) for name, value in metrics.items()]
    return _rendered(
        _CONVERSION_TEMPLATE,
        checkpoint,
        f"{provenance.model.rpartition('/')[2]}-{target.tag}",
        repo_id,
        license,
        activation=None if checkpoint.needs_package else target.name,
        tags=[target.tag, *(["relufication"] if target.name == "relu" else []), "lambda-gelu"],
        base_model=provenance.model if provenance.model_is_on_hub else None,
        metrics=list(metrics) or None,
        results=results,
        report=report,
        provenance=provenance,
        figure=figure,
        gates=gates_in_words(report),
        how_far=how_far(report),
        last_rung=next((RUNGS[step.effort] for step in reversed(report.steps) if step.is_kept), None),
        network_table=whole_network(report),
        top="".join(network_table(of.original_metrics, {"this model": of.refitted}, main=True) for _, of in measured),
        has_perplexity=any("perplexity" in found.original_metrics for _, found in evaluations(report)),
        recipe=what_was_done(report),
        layers=layer_table(report.layers),
        has_zeros=target.has_zeros,
        made_with=made_with(provenance.hardware, provenance.versions),
    )


def _result(checkpoint: CheckpointFacts, metric: str, value: float, of: str, **dataset: str) -> EvalResult:
    task = pipeline_tag(checkpoint.model_class) or "other"
    shown_value = float(score(metric, value))
    return EvalResult(task, metric_type=metric, metric_name=f"{metric}{of}", metric_value=shown_value, **dataset)


def _rendered(
    template: Path,
    checkpoint: CheckpointFacts,
    name: str,
    repo_id: str | None,
    license: str | None,
    *,
    activation: str | None,
    gate: str = DEFAULT_GATE,
    own_code: str = "",
    tags: list[str],
    base_model: str | None,
    metrics: list[str] | None,
    results: list[EvalResult],
    datasets: list[str] | None = None,
    **told: Any,
) -> ModelCard:
    """The card of a template. Raises ValueError for names that the Hub cannot have, and for a token on the card.

    `name` is the title where there is no repository; `activation` is what builds the gates without this package, None
    where nothing does.
    """
    if license is not None and not _LICENCE.fullmatch(license):
        raise ValueError(
            f"the licence is given by the Hub's short name of it, such as mit or apache-2.0, and not {license[:80]!r}"
        )
    if repo_id is not None:
        validate_repo_id(repo_id)
    title, where = repo_id.rpartition("/")[2] if repo_id else name, repo_id or "FOLDER"
    lgelu_code, plain_code = loading.with_hf_lgelu(checkpoint.model_class, where), ""
    if activation is not None:
        plain_code = loading.without_hf_lgelu(checkpoint, where, activation=activation, gate=gate)
    if own_code:
        lgelu_code, plain_code = (own_code, "") if activation is None else ("", own_code)
    data = ModelCardData(
        license=license,
        library_name=checkpoint.library,
        pipeline_tag=pipeline_tag(checkpoint.model_class),
        tags=tags,
        base_model=base_model if is_hub_id(base_model) else None,
        datasets=datasets,
        metrics=metrics,
        eval_results=results or None,
        model_name=title if results else None,
    )
    tools = {"plain": plain, "code": code, "score": score, "percent": percent, "quoted": quoted}
    card = ModelCard.from_template(
        data,
        template_path=str(template),
        license=license,
        title=plain(title),
        model_class=checkpoint.model_class,
        plain_code=plain_code,
        lgelu_code=lgelu_code,
        **tools,
        **told,
    )
    if holds_token(card.content):
        raise ValueError("the card would show what looks like an access token; remove it from the card's texts")
    return card


def draw_hardness(
    path: str | os.PathLike,
    earlier: Mapping[str, Mapping[str, float]],
    final: Mapping[str, float],
    means: Mapping[str, float],
) -> Path:
    """Write a PNG with a bar of λ for each gate, in the order of the mapping, on a logarithmic axis.

    `earlier`, {stage: {gate: λ}}, is drawn as points over the bars; a stage may be empty, or lack some gates. Of gates
    with several λ the mean, in `means`, is drawn in the place of that in `final`.
    """
    from matplotlib.figure import Figure  # half a second

    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.add_subplot()
    places = range(1, len(final) + 1)
    shown = [means.get(gate, value) for gate, value in final.items()]
    axes.bar(places, shown, color="#a9c4de", label="trained")
    for (label, stage), (marker, color) in zip(earlier.items(), (("o", "#ee6677"), ("D", "#1b4f7a")), strict=False):
        if stage:
            values = [stage.get(gate, math.nan) for gate in final]
            axes.plot(places, values, marker, color=color, markersize=5, label=label)
    height = "mean hardness λ" if means else "hardness λ"
    axes.set(yscale="log", xlabel="gate, in the order of the network", ylabel=height)
    axes.set_ylim(0.8, max(shown) * 1.6)
    axes.set_xticks(list(places) if len(final) <= 20 else list(places)[:: len(final) // 10])
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return save_picture(figure, path, 120)


def plain(text: Any) -> str:
    """A text on one line, with what Markdown would take for markup escaped."""
    return _MARKUP.sub(r"\\\1", " ".join(str(text).split()))


def code(text: Any) -> str:
    """A name as inline code, which no character of it can end."""
    return f"`{' '.join(str(text).split()).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def made_with(hardware: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """Hardware and versions in a few sentences; empty where nothing is known of either."""
    parts = []
    if hardware:
        processes = hardware.get("processes", 1)
        cores = f" ({hardware['cpu_cores']} cores)" if hardware.get("cpu_cores") else ""
        told = [
            f"with {processes} process{'' if processes == 1 else 'es'}"
            f" on {hardware.get('cpu', 'an unnamed CPU')}{cores}",
            ", ".join(hardware.get("accelerators") or ()) or "no accelerator",
            (hardware.get("platform") or "").partition("-")[0],  # without the build of the kernel
        ]
        parts.append(", ".join(filter(None, told)))
    if versions:
        parts.append("Versions: " + ", ".join(f"{package} {version}" for package, version in versions.items()))
    return plain(". ".join(parts) + "." if parts else "")


def pipeline_tag(model_class: str) -> str | None:
    """The Hub's name of what models of this class do; None for a class that is not known here."""
    # Of several tasks the last, as on the cards that transformers' Trainer writes: BART is also in the one of masks.
    for task, classes in reversed(TASK_MAPPING.items()):
        if any(model_class in ([name] if isinstance(name, str) else name) for name in classes.values()):
            return task
    return next((task for ending, task in _OTHER_TASKS.items() if model_class.endswith(ending)), None)


def stated_licence(name_or_path: str | os.PathLike) -> str | None:
    """The licence that the card of a folder or Hub id states; None where there is no card, or none that states one."""
    header, _ = _header_and_text(name_or_path)  # one line of it: no YAML of others is run
    found = re.search(r"""^license:[ \t]*(["']?)([^"'\s]+)\1[ \t]*$""", header, re.MULTILINE)
    return found[2] if found and _LICENCE.fullmatch(found[2]) else None


def _header_and_text(name_or_path: str | os.PathLike) -> tuple[str, str]:
    """The card of a folder or Hub id, in two parts; both empty where there is none."""
    path = Path(name_or_path)
    try:
        card = path / REPOCARD_NAME if path.exists() else Path(hf_hub_download(str(name_or_path), REPOCARD_NAME))
        text = card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, HTTPError, HFValidationError):
        return "", ""
    header = re.match(r"---[ \t]*\n(.*?)\n---[ \t]*\n", text, re.DOTALL)
    return (header[1], text[header.end() :]) if header else ("", text)


def holds_token(text: str, token: str | None = None) -> bool:
    """Whether a text holds what looks like an access token of the Hub, or `token` itself."""
    return bool(TOKEN.search(text)) or (token is not None and token in text)
