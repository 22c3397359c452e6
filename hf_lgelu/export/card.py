"""Model cards: of a network that was trained with λ-GELU, and of one that was converted to ReLU.

Each has a template beside this file. What stands in a template and is not given is left out of the card.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel

from hf_lgelu.activation.gates import check_gate
from hf_lgelu.activation.hardness import swap_error_bound
from hf_lgelu.comparing.distance import Distance, networks_table
from hf_lgelu.environment import hardware, package_versions
from hf_lgelu.export.checkpoint_facts import (
    CheckpointFacts,
    facts_of_folder,
    own_name,
    python_code,
    stated_licence,
)
from hf_lgelu.files import is_hub_id, whole_file
from hf_lgelu.formats import markdown_table, percent, quoted, score, significant
from hf_lgelu.models.hardening import hardness_profile, learned_hardness
from hf_lgelu.refit.config import RUNGS
from hf_lgelu.refit.report import ConversionReport, evaluations, gates_in_words, what_was_done

if TYPE_CHECKING:
    from hf_lgelu.export.plain import CheckpointExport

TEMPLATE, _CONVERSION_TEMPLATE = (
    Path(__file__).with_name(f"{name}_card_template.md") for name in ("model", "conversion")
)


def write_card(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    report: "CheckpointExport | None" = None,
    top: str = "",
    license: str | None = None,
    repo_id: str | None = None,
) -> Path:
    """Write README.md into a folder and return its path; `export_relu` and `export_gelu` do so by themselves.

    Args:
        model: with λ-GELU, as it was trained.
        folder: of `model`, or of what an export made of it.
        report: of the export; None for the folder of `model` itself.
        top: the table below the title, in Markdown.
        license: the Hub's short name of it, such as "mit"; None takes that of the checkpoint's own card.
        repo_id: on the Hub, "user/name".

    Raises ValueError where `model` has no λ-GELU or a repository is not named as the Hub names it, and
    FileNotFoundError without a config.json.

    >>> import tempfile
    >>> from hf_lgelu import MLPConfig, MLPForClassification
    >>> from hf_lgelu.export.card import write_card
    >>> model = MLPForClassification(MLPConfig(num_features=3, hidden_size=4, num_hidden_layers=1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save_pretrained(folder)
    ...     write_card(model, folder, license="mit").name
    'README.md'
    """
    hardness = hardness_profile(model) if report is None else report.hardness
    learned, source = learned_hardness(model), str(model.name_or_path)
    is_moved = not all(math.isclose(learned[site], value, rel_tol=1e-4) for site, value in hardness.items())
    card = render_card(
        facts_of_folder(folder),
        hardness,
        {site: str(model.get_submodule(site).gate) for site in hardness},
        name=own_name(source) or "model",
        activation=None if report is None else report.activation,
        repo_id=repo_id,
        license=license or (stated_licence(source) if source else None),
        top=top,
        stages={"as learned": learned} if is_moved else None,
        change=None if report is None else report.change,
        smooth_calls=[] if report is None else report.smooth_calls,
    )
    return save_card(card, folder)


def render_card(
    checkpoint: CheckpointFacts,
    hardness: Mapping[str, float],
    gates: Mapping[str, str],
    *,
    name: str,
    activation: str | None,
    **words: Any,
) -> ModelCard:
    """The card of a network that was trained with λ-GELU; `words` are the template's, and arguments of `fill_card`.

    `hardness` is {gate: λ}, `gates` {gate: its row of GATES}. `activation` stands in the place of the λ-gates: "relu",
    or a plain activation, with λ in the weights; None for the network as it was trained.
    """
    is_relu = activation == "relu"
    rows = [check_gate(gate) for gate in dict.fromkeys(gates.values())]
    low, high = (f"{value(hardness.values()):.4g}" for value in (min, max))
    return fill_card(
        TEMPLATE,
        checkpoint,
        f"{name}-{activation or 'lambda-gelu'}",
        ["lambda-gelu", *(["relu", "relufication"] if is_relu else [])],
        activation=activation,
        is_relu=is_relu,
        hardness=hardness,
        learned=" and ".join(row.label for row in rows),
        unlearned=" or ".join(row.plain_label for row in rows),
        formulas="; ".join(f"{row.formula}: λ = 1 is {row.plain_label}, and λ → ∞ is ReLU" for row in rows),
        span=f"λ = {low}" if low == high else f"λ from {low} to {high}",
        bounds={site: swap_error_bound(value, gates[site]) for site, value in hardness.items()},
        largest=max(row.swap_error for row in rows),
        **words,
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
    report: ConversionReport, provenance: Provenance, checkpoint: CheckpointFacts, **words: Any
) -> ModelCard:
    """The card of a converted network; `words` may be `repo_id`, and `license`, which is the original's."""
    measured, metrics = evaluations(report), report.evaluation.refitted.metrics if report.evaluation else {}
    results, source = [], provenance.evaluation_source
    if source is not None:
        of = {"dataset_type": source, "dataset_name": provenance.evaluation or source}
        results = [result_on(checkpoint, name, value, ", second set", **of) for name, value in metrics.items()]
    return fill_card(
        _CONVERSION_TEMPLATE,
        checkpoint,
        f"{provenance.model.rpartition('/')[2]}-relu",
        ["relu", "relufication", "lambda-gelu"],
        activation=None if checkpoint.needs_package else "relu",
        base_model=provenance.model if provenance.model_is_on_hub else None,
        results=results,
        metrics=list(metrics),
        report=report,
        provenance=provenance,
        gates=gates_in_words(report),
        last_rung=next((RUNGS[step.effort] for step in reversed(report.steps) if step.is_kept), None),
        measured=[
            (title, found, top_table(found.original_metrics, found.networks, main=False)) for title, found in measured
        ],
        top="".join(
            f"On the {title}, {of.size_in_words}:\n\n" + top_table(of.original_metrics, {"this model": of.refitted})
            for title, of in measured[-1:]
        ),
        done=what_was_done(report),
        made_with=made_with(provenance.hardware, provenance.versions),
        **words,
    )


def top_table(scores: Mapping[str, float], networks: Mapping[str, Distance], *, main: bool = True) -> str:
    """A table in Markdown of the original with its scores, and of networks next to it."""
    return markdown_table(*networks_table(scores, networks, main=main), text_columns=1)


def fill_card(
    template: Path,
    checkpoint: CheckpointFacts,
    name: str,
    tags: Sequence[str],
    *,
    repo_id: str | None = None,
    license: str | None = None,
    activation: str | None = None,
    base_model: str | None = None,
    results: Sequence[EvalResult] = (),
    metrics: Sequence[str] = (),
    datasets: Sequence[str] = (),
    **words: Any,
) -> ModelCard:
    """A template with its header, the code that loads the checkpoint, and `words`; `name` is the title without a
    repository. Raises ValueError for a repository that is not named as the Hub names it."""
    validate_repo_id(repo_id)
    title = repo_id.rpartition("/")[2] if repo_id else name
    header = ModelCardData(
        license=license,
        library_name=checkpoint.library,
        pipeline_tag=checkpoint.task,
        base_model=base_model if is_hub_id(base_model) else None,
        eval_results=list(results) or None,
        model_name=title if results else None,
        tags=list(tags),
        metrics=list(metrics) or None,
        datasets=list(datasets) or None,
    )
    words = python_code(checkpoint, repo_id, activation) | {"license": license, "activation": activation} | words
    words |= {"title": plain(title), "model_class": checkpoint.model_class}
    tools = {function.__name__: function for function in (plain, code, score, percent, quoted, significant)}
    return ModelCard.from_template(header, template_path=str(template), **tools, **words)


def save_card(card: ModelCard, folder: str | os.PathLike, name: str = REPOCARD_NAME) -> Path:
    """Write a card into a folder, whole or not at all, and return its path; a link in its place is replaced."""
    path = Path(folder) / name
    with whole_file(path, overwrite=True) as new:
        new.write_text(f"{str(card).rstrip()}\n", encoding="utf-8")
    return path


def result_on(checkpoint: CheckpointFacts, metric: str, value: float, of: str, **dataset: str) -> EvalResult:
    """A score on a data set, for the card's header."""
    shown = float(score(metric, value))
    return EvalResult(
        checkpoint.task or "other", metric_type=metric, metric_name=f"{metric}{of}", metric_value=shown, **dataset
    )


def plain(text: Any) -> str:
    """A text on one line, with what Markdown would take for markup escaped."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(str(text).split()))


def code(text: Any) -> str:
    """A name as inline code, which no character of it can end."""
    return f"`{' '.join(str(text).split()).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


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
