"""Model cards: of a network that was trained with λ-GELU, and of one that was converted to ReLU.

Each has a template beside this file. What stands in a template and is not given is left out of the card.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel
from yaml import YAMLError

from hf_lgelu.activation.gates import check_gate
from hf_lgelu.comparing.distance import Distance, networks_table
from hf_lgelu.environment import hardware, package_versions
from hf_lgelu.files import whole_file
from hf_lgelu.formats import markdown_table, percent, quoted, score, significant
from hf_lgelu.models.checkpoint import MLP_CLASS, ONNX_CLASS, CheckpointFacts, facts_of_folder
from hf_lgelu.models.hardening import GateHardness, gates_by_site
from hf_lgelu.networks.sites import require_lambda_gelu
from hf_lgelu.refit.config import RUNGS
from hf_lgelu.refit.report import ConversionReport, evaluations, gates_in_words, what_was_done

if TYPE_CHECKING:
    from hf_lgelu.export.plain import CheckpointExport

# The MLP is this package's own class, and its ReLU network loads without the package, too.
_MLP_IN_TORCH = """\
import torch
from safetensors.torch import load_file

weights = load_file("model.safetensors")
modules = []
for name in [*(f"layers.{i}.linear" for i in range(len(weights) // 2 - 1)), "classifier"]:
    linear = torch.nn.Linear(*weights[f"{name}.weight"].T.shape)
    linear.load_state_dict({part: weights[f"{name}.{part}"] for part in ("weight", "bias")})
    modules += [linear, torch.nn.ReLU()]
model = torch.nn.Sequential(*modules[:-1]).eval()"""

TEMPLATE = Path(__file__).with_name("model_card_template.md")
_CONVERSION_TEMPLATE = Path(__file__).with_name("conversion_card_template.md")


def loading_code(checkpoint: CheckpointFacts, where: str, *, activation: str | None) -> dict[str, str]:
    """{"plain_code", "lgelu_code"}: Python that loads a checkpoint without this package, and with it; "" if none does.

    `where` is a folder or Hub id. `activation` is the name of its gates in transformers; None if it needs this package.
    """
    name, package = checkpoint.model_class, checkpoint.library.replace("-", "_")
    if name == ONNX_CLASS:
        return {"plain_code": f'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{where}/model.onnx")'}
    load = name if checkpoint.is_of_sentences else f"{name}.from_pretrained"
    without = f'from {package} import {name}\n\nmodel = {load}("{where}")'
    own = f'import hf_lgelu\nfrom {package} import {name}\n\nmodel = hf_lgelu.from_pretrained({name}, "{where}")'
    if name == MLP_CLASS:
        without = _MLP_IN_TORCH if activation == "relu" else ""
    return {"plain_code": without if activation else "", "lgelu_code": own}


def own_name(source: str) -> str:
    """The network's own name: the last part of a path or Hub id."""
    return Path(source).resolve().name if source else "model"


def stated_licence(name_or_path: str) -> str | None:
    """The licence that the card of a folder or Hub id states; None where there is no card, or none that states one."""
    path = Path(name_or_path)
    try:
        card = ModelCard.load(path / REPOCARD_NAME if path.exists() else name_or_path, ignore_metadata_errors=True)
    except (OSError, ValueError, HTTPError, YAMLError):
        return None
    return card.data.license if isinstance(card.data.license, str) else None


def write_card(
    model: PreTrainedModel, folder: str | os.PathLike, *, license: str | None = None, repo_id: str | None = None
) -> Path:
    """Write README.md into the folder of a model with λ-GELU, and return its path.

    Args:
        model: with λ-GELU, as it was trained.
        folder: of `model`.
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
    require_lambda_gelu(model)
    return _write(folder, gates_by_site(model), str(model.name_or_path), None, license=license, repo_id=repo_id)


def write_export_card(
    report: "CheckpointExport", folder: str | os.PathLike, *, top: str = "", license: str | None = None,
    repo_id: str | None = None,
) -> Path:  # fmt: skip
    """Write README.md into the folder of an export, as `write_card` does; `top` is the table below its title."""
    words = {"top": top, "change": report.change, "smooth_calls": report.smooth_calls}
    words |= {"license": license, "repo_id": repo_id}
    return _write(folder, report.gates, report.original, report.activation, **words)


def _write(
    folder: str | os.PathLike, gates: Mapping[str, GateHardness], original: str, activation: str | None, **words: Any
) -> Path:
    words["license"] = words["license"] or (stated_licence(original) if original else None)
    card = render_card(facts_of_folder(folder), gates, name=own_name(original), activation=activation, **words)
    return save_card(card, folder)


def render_card(
    checkpoint: CheckpointFacts, gates: Mapping[str, GateHardness], *, name: str, activation: str | None, **words: Any
) -> ModelCard:
    """The card of a network that was trained with λ-GELU; `words` are the template's, and arguments of `fill_card`.

    `gates` are its λ-gates by site. `activation` stands in their place: "relu", or a plain activation, with λ in the
    weights; None for the network as it was trained.
    """
    is_relu = activation == "relu"
    rows = [check_gate(gate) for gate in dict.fromkeys(gate.row for gate in gates.values())]
    hardness = [gate.hardness for gate in gates.values()]
    low, high = (f"{value:.4g}" for value in (min(hardness), max(hardness)))
    is_moved = any(gate.is_moved for gate in gates.values())
    given: dict[str, Any] = {
        "stages": {"as learned": {site: gate.learned for site, gate in gates.items()}} if is_moved else {},
        "is_relu": is_relu,
        "gates": gates,
        "learned": " and ".join(row.label for row in rows),
        "unlearned": " or ".join(row.plain_label for row in rows),
        "formulas": "; ".join(f"{row.formula}: λ = 1 is {row.plain_label}, and λ → ∞ is ReLU" for row in rows),
        "span": f"λ = {low}" if low == high else f"λ from {low} to {high}",
        "largest": max(row.swap_error for row in rows),
    }
    title = f"{name}-{activation or 'lambda-gelu'}"
    tags = ["lambda-gelu", *(["relu", "relufication"] if is_relu else [])]
    return fill_card(TEMPLATE, checkpoint, title, tags, activation=activation, **given | words)


@dataclass(frozen=True)
class Provenance:
    """The original (a Hub id, or its own name) and the data of a converted network; when and on what it was made.

    `samples` inputs were taken from the data by the `seed`. `evaluation` is the second set in words, if there is one.
    `created` is UTC in ISO 8601.
    """

    model: str
    data: str
    samples: int
    seed: int = 0
    model_is_on_hub: bool = False
    evaluation: str | None = None
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: Mapping[str, str] = field(default_factory=package_versions)
    hardware: Mapping[str, Any] = field(default_factory=hardware)


def render_conversion_card(
    report: ConversionReport, provenance: Provenance, checkpoint: CheckpointFacts, **words: Any
) -> ModelCard:
    """The card of a converted network; `words` may be `repo_id`, and `license`, which is the original's."""
    measured = evaluations(report)
    return fill_card(
        _CONVERSION_TEMPLATE,
        checkpoint,
        f"{provenance.model.rpartition('/')[2]}-relu",
        ["relu", "relufication", "lambda-gelu"],
        activation=None if checkpoint.needs_package else "relu",
        header={"base_model": provenance.model} if provenance.model_is_on_hub else {},
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
    header: Mapping[str, Any] | None = None,
    **words: Any,
) -> ModelCard:
    """A template with its header, the code that loads the checkpoint, and `words`; `name` is the title without a
    repository, `header` has more entries of ModelCardData. Raises ValueError for a repository that is not named as the
    Hub names it."""
    validate_repo_id(repo_id)
    title = repo_id.rpartition("/")[2] if repo_id else name
    entries = {"license": license, "library_name": checkpoint.library, "pipeline_tag": checkpoint.task, "tags": [*tags]}
    entries |= header or {}
    # The Hub wants a name next to results.
    data = ModelCardData(**entries, model_name=title if "eval_results" in entries else None)
    words = loading_code(checkpoint, repo_id or "FOLDER", activation=activation) | words
    words |= dict(license=license, activation=activation, title=plain(title), model_class=checkpoint.model_class)
    tools = {function.__name__: function for function in (plain, code, score, percent, quoted, significant)}
    return ModelCard.from_template(data, template_path=str(template), **tools, **words)


def save_card(card: ModelCard, folder: str | os.PathLike, name: str = REPOCARD_NAME) -> Path:
    """Write a card into a folder, whole or not at all, and return its path; a link in its place is replaced."""
    path = Path(folder) / name
    with whole_file(path, overwrite=True) as new:
        new.write_text(f"{str(card).rstrip()}\n", encoding="utf-8")
    return path


def plain(text: Any) -> str:
    """A text on one line, with what Markdown would take for markup escaped."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(str(text).split()))


def code(text: Any) -> str:
    """A name as inline code, which no character of it can end."""
    return f"`{' '.join(str(text).split()).replace('`', chr(39)).replace('|', chr(92) + '|')}`"
