"""Texts of other people on a card: shown as text, without local paths, and never with an access token."""

import re
from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.modelcard import TASK_MAPPING

from hf_lgelu.export.hub.hub_id import is_hub_id

_LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,63}")
_MARKUP = re.compile(r"([\\`*\[\]<>|])")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}")  # of 34; shorter are names of Python: hf_transfer, hf_quantizer

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


def holds_token(text: str, token: str | None = None) -> bool:
    """Whether a text holds what looks like an access token of the Hub, or `token` itself."""
    return bool(_TOKEN.search(text)) or (token is not None and token in text)


def without_tokens(text: str) -> str:
    """The text with dots in the place of what looks like an access token."""
    return _TOKEN.sub("hf_…", text)


def plain(text: Any) -> str:
    """A text on one line, with what Markdown would take for markup escaped."""
    return _MARKUP.sub(r"\\\1", " ".join(str(text).split()))


def code(text: Any) -> str:
    """A name as inline code, which no character of it can end."""
    return f"`{' '.join(str(text).split()).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


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


def pipeline_tag(model_class: str) -> str | None:
    """The Hub's name of what models of this class do; None for a class that is not known here."""
    # Of several tasks the last, as on the cards that transformers' Trainer writes: BART is also in the one of masks.
    for task, classes in reversed(TASK_MAPPING.items()):
        if any(model_class in ([name] if isinstance(name, str) else name) for name in classes.values()):
            return task
    return next((task for ending, task in _OTHER_TASKS.items() if model_class.endswith(ending)), None)


def is_licence(text: str) -> bool:
    """Whether a text may be the Hub's short name of a licence."""
    return bool(_LICENCE.fullmatch(text))


def require_card_names(repo_id: str | None, license: str | None) -> None:
    """Raise ValueError unless a repository and a licence are named as the Hub names them."""
    if license is not None and not is_licence(license):
        raise ValueError(
            f"the licence is given by the Hub's short name of it, such as mit or apache-2.0, and not {license[:80]!r}"
        )
    if repo_id is not None:
        try:
            validate_repo_id(repo_id)
        except HFValidationError as error:
            raise ValueError(str(error)) from error


def require_no_token(card: ModelCard) -> None:
    """Raise ValueError if a card would show what looks like an access token."""
    if holds_token(card.content):
        raise ValueError("the card would show what looks like an access token; take it out of what the card is told")


def made_with(hardware: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """Hardware and versions in a few sentences; empty where nothing is known of either."""
    parts = []
    if hardware:
        processes = hardware.get("processes", 1)
        cores = f" ({hardware['cpu_cores']} cores)" if hardware.get("cpu_cores") else ""
        accelerators = ", ".join(hardware.get("accelerators") or ()) or "no accelerator"
        parts.append(
            f"with {processes} process{'' if processes == 1 else 'es'} on {hardware.get('cpu', 'an unnamed CPU')}"
            f"{cores}, {accelerators}"
            + (f", {hardware['platform'].partition('-')[0]}" if hardware.get("platform") else "")  # no kernel's build
        )
    if versions:
        parts.append("Versions: " + ", ".join(f"{package} {version}" for package, version in versions.items()))
    return plain(". ".join(parts) + "." if parts else "")
