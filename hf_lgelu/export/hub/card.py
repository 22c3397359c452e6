"""Model cards: of a network that was trained with λ-GELU, and of one that was converted to ReLU."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
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
from hf_lgelu.comparing.distance import Distance, networks_table
from hf_lgelu.environment import hardware, package_versions
from hf_lgelu.export.hub import loading
from hf_lgelu.export.hub.conversion_page import layer_table, whole_network
from hf_lgelu.export.hub.loading import CheckpointFacts
from hf_lgelu.files import is_hub_id, whole_file
from hf_lgelu.formats import markdown_table, percent, quoted, score
from hf_lgelu.models.hardening import hardness_profile
from hf_lgelu.networks.sites import LEARNED_KINDS, SMOOTH_KINDS, find_sites, require_lambda_gelu, sites_in_words
from hf_lgelu.refit.config import RUNGS, TARGETS
from hf_lgelu.refit.report import ConversionReport, evaluations, gates_in_words, what_was_done

if TYPE_CHECKING:
    from hf_lgelu.export.comparison import NetworkComparison

FORMS = ("relu", "gelu", "lambda_gelu")
"""What a card's network is: with ReLU in the place of its λ-gates, with λ in the weights, or as trained."""

TEMPLATE = Path(__file__).with_name("model_card_template.md")
_CONVERSION_TEMPLATE = Path(__file__).with_name("conversion_card_template.md")
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
        hardness: {gate: λ} at the end of training.
        gates: {gate: its name in a config}, such as "lambda_silu"; λ-GELU where it is left out.
        hardened: its gates were hardened, not only learned.
        earlier_hardness: {stage: {gate: λ}} before, in the order of time.
        trained_on: completes the sentence "A network of class X, trained on …".
        training, input_note, limits: how it was trained, in Markdown; sentences on its inputs and its limits.
        dataset, base_model: Hub ids of the data set that was read, and of the model that it was fine-tuned from.
        loading_code: {form: Python that loads it}, where `from_pretrained` of its class does not.
        license: the Hub's short name of it, e.g. "mit"; None says that none was stated.
    """

    name: str = "model"
    hardness: Mapping[str, float] = field(default_factory=dict)
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
    change: Distance | None = None,
    compared: "NetworkComparison | None" = None,
    license: str | None = None,
    repo_id: str | None = None,
) -> Path:
    """Write README.md into a folder and return its path; `export_relu` and `export_gelu` do so by themselves.

    Args:
        model: with λ-GELU, as it was trained.
        folder: of `model`, or of what an export made of it.
        form: what is in the folder: "lambda_gelu" (`model` itself), "relu" or "gelu" (λ in the weights).
        change: what an export did to the outputs on example inputs.
        compared: `compare_networks` of `model` and what is in the folder, for the table on top.
        license: the Hub's short name of it, such as "mit"; None takes that of the checkpoint's own card.
        repo_id: on the Hub, "user/name".

    Raises:
        ValueError: `model` has no λ-GELU, config.json has λ-gates where `form` says that they are gone, or a repository
            is not named as the Hub names it.
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
    still = f"It is no ReLU network throughout: it still has {had}, which were no λ-gates."
    facts = CardFacts(
        name=own_name(source) or "model",
        hardness=hardness_profile(model),
        gates={site.name: site.kind for site in find_sites(model, LEARNED_KINDS)},
        license=license or (stated_licence(source) if source else None),
        limits=[still] if had else [],
    )
    top = ""
    if compared is not None and (distance := compared.rows[1].distance) is not None:
        top = _top(compared.rows[0].metrics, distance)
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
    change: Distance | None = None,
    figure: str | None = None,
    top: str = "",
    repo_id: str | None = None,
) -> ModelCard:
    """The card of a network that was trained with λ-GELU, in one of FORMS; `figure` is the picture's path.

    `top` is the table below the title, in Markdown, where the facts have no scores.

    Raises ValueError for an unknown form, gates that are none, or a repository that is not named as the Hub names it.
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
        split = {"dataset_type": dataset, "dataset_name": dataset, "dataset_split": scores.split}
        results = [
            _result(checkpoint, scores.metric, measured, "" if scores.epoch is None else ", last epoch", **split)
        ]
    title = _title(repo_id, f"{facts.name}-{form.replace('_', '-')}")
    header = _header(checkpoint, title, results, facts.license, facts.base_model)
    header.tags = ["lambda-gelu", *(["relu", "relufication"] if form == "relu" else [])]
    header.datasets, header.metrics = [dataset] if dataset else None, [scores.metric] if scores else None
    activation = None if form == "lambda_gelu" else form
    own_code = facts.loading_code.get(form, "").strip()
    loaded = {"plain_code" if activation else "lgelu_code": own_code} if own_code else None
    return _filled(
        TEMPLATE,
        header,
        loaded or loading.python_code(checkpoint, repo_id, activation, rows[0].name),
        model_class=checkpoint.model_class,
        title=plain(title),
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
    """The original (a Hub id, or its own name) and the data of a converted network; when and on what it was made.

    `samples` inputs were taken from the data by the `seed`. `evaluation` is the second set in words, if there is one.
    `evaluation_source` is its Hub id where all rows of the split were read: its scores are then a result on the data
    set. `created` is UTC in ISO 8601.
    """

    model: str
    data: str
    samples: int
    seed: int = 0
    model_is_on_hub: bool = False
    evaluation: str | None = None
    evaluation_source: str | None = None
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: Mapping[str, str] = field(default_factory=package_versions)
    hardware: Mapping[str, Any] = field(default_factory=hardware)


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

    Raises ValueError for a repository that is not named as the Hub names it.
    """
    # After the target's title a report may have a slope.
    target = next(row for row in TARGETS.values() if row.title == report.target.partition("(")[0])
    metrics = report.evaluation.refitted.metrics if report.evaluation else {}
    measured = evaluations(report)[-1:]
    results, source = [], provenance.evaluation_source
    if source is not None:
        of = {"dataset_type": source, "dataset_name": provenance.evaluation or source}
        results = [_result(checkpoint, name, value, ", second set", **of) for name, value in metrics.items()]
    title = _title(repo_id, f"{provenance.model.rpartition('/')[2]}-{target.tag}")
    header = _header(checkpoint, title, results, license, provenance.model if provenance.model_is_on_hub else None)
    header.tags = [target.tag, *(["relufication"] if target.name == "relu" else []), "lambda-gelu"]
    header.metrics = list(metrics) or None
    return _filled(
        _CONVERSION_TEMPLATE,
        header,
        loading.python_code(checkpoint, repo_id, None if checkpoint.needs_package else target.name),
        model_class=checkpoint.model_class,
        title=plain(title),
        license=license,
        report=report,
        provenance=provenance,
        figure=figure,
        gates=gates_in_words(report),
        last_rung=next((RUNGS[step.effort] for step in reversed(report.steps) if step.is_kept), None),
        network_table=whole_network(report),
        top="".join(
            f"On the {name}, {of.size_in_words}:\n\n" + _top(of.original_metrics, of.refitted) for name, of in measured
        ),
        has_perplexity=any("perplexity" in found.original_metrics for _, found in evaluations(report)),
        done=what_was_done(report),
        layers=layer_table(report.layers),
        has_zeros=target.has_zeros,
        made_with=made_with(provenance.hardware, provenance.versions),
    )


def _top(scores: Mapping[str, float], change: Distance) -> str:
    """The table on a card's top: the original with its scores, and the card's network."""
    return markdown_table(*networks_table(scores, {"this model": change}, main=True), text_columns=1)


def _title(repo_id: str | None, name: str) -> str:
    """The name of the repository, or `name` where there is none. Raises ValueError for what the Hub cannot have."""
    validate_repo_id(repo_id)
    return repo_id.rpartition("/")[2] if repo_id else name


def _result(checkpoint: CheckpointFacts, metric: str, value: float, of: str, **dataset: str) -> EvalResult:
    task = pipeline_tag(checkpoint.model_class) or "other"
    shown_value = float(score(metric, value))
    return EvalResult(task, metric_type=metric, metric_name=f"{metric}{of}", metric_value=shown_value, **dataset)


def _header(
    checkpoint: CheckpointFacts, title: str, results: list[EvalResult], license: str | None, base_model: str | None
) -> ModelCardData:
    """What the headers of all cards have in common."""
    return ModelCardData(
        license=license,
        library_name=checkpoint.library,
        pipeline_tag=pipeline_tag(checkpoint.model_class),
        base_model=base_model if is_hub_id(base_model) else None,
        eval_results=results or None,
        model_name=title if results else None,
    )


def _filled(template: Path, header: ModelCardData, loading_code: Mapping[str, str], **words: Any) -> ModelCard:
    """The template with these words in it."""
    tools = {"plain": plain, "code": code, "score": score, "percent": percent, "quoted": quoted}
    return ModelCard.from_template(header, template_path=str(template), **tools, **loading_code, **words)


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
    found = re.search(r"""^license:[ \t]*(["']?)([\w.+-]+)\1[ \t]*$""", header, re.MULTILINE)
    return found[2] if found else None


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
