"""What a card says of a checkpoint: its name, licence, library and task on the Hub, and the Python that loads it."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.constants import CONFIG_NAME, REPOCARD_NAME
from huggingface_hub.errors import HFValidationError, HTTPError
from transformers.modelcard import TASK_MAPPING

from hf_lgelu.activation.gates import GATES
from hf_lgelu.models import mlp
from hf_lgelu.models.record import RECORD_KEY

_MLP_CLASS = mlp.MLPForClassification.__name__
SENTENCE_CLASSES = ("SentenceTransformer", "SparseEncoder", "CrossEncoder")
"""Of sentence-transformers: embeddings, embeddings over a vocabulary, scores of pairs."""

ONNX_CLASS = "OnnxNetwork"

MODULES_FILE = "modules.json"
"""What a checkpoint of sentence-transformers has: the list of its modules and their folders."""

SENTENCE_SETTINGS = "config_sentence_transformers.json"
"""Where a checkpoint of sentence-transformers has the name of its class."""

_MLP = """\
import torch
from safetensors.torch import load_file

weights = load_file("model.safetensors")
modules = []
for name in [*(f"layers.{{i}}.linear" for i in range({layers})), "classifier"]:
    linear = torch.nn.Linear(*weights[f"{{name}}.weight"].T.shape)
    linear.load_state_dict({{part: weights[f"{{name}}.{{part}}"] for part in ("weight", "bias")}})
    modules += [linear, torch.nn.{activation}]
model = torch.nn.Sequential(*modules[:-1]).eval()"""

_TRANSFORMERS = """\
from transformers import {model_class}

model = {model_class}.from_pretrained("{where}")"""

_SENTENCE_TRANSFORMERS = """\
from sentence_transformers import {model_class}

model = {model_class}("{where}")"""

_ONNX = """\
import onnxruntime

session = onnxruntime.InferenceSession("{where}/model.onnx")"""

_HF_LGELU = """\
import hf_lgelu
from {package} import {model_class}

model = hf_lgelu.from_pretrained({model_class}, "{where}")"""


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
class CheckpointFacts:
    """The facts of a checkpoint that decide how it is loaded.

    `layers` are the hidden layers of an `MLPForClassification`; `needs_package` says that the config alone does not
    build the network (`from_pretrained`). A checkpoint of sentence-transformers is of one of SENTENCE_CLASSES, whatever
    its encoder.
    """

    model_class: str
    layers: int | None = None
    needs_package: bool = False

    @property
    def library(self) -> str:
        """The Hub's name of the library that loads it."""
        if self.model_class == ONNX_CLASS:
            return "onnx"
        return "sentence-transformers" if self.model_class in SENTENCE_CLASSES else "transformers"

    @property
    def task(self) -> str | None:
        """The Hub's name of what models of this class do; None for a class that is not known here."""
        # Of several tasks the last, as on the cards of transformers' Trainer: BART is also in the one of masks.
        for task, classes in reversed(TASK_MAPPING.items()):
            if any(self.model_class in ([name] if isinstance(name, str) else name) for name in classes.values()):
                return task
        return next((task for ending, task in _OTHER_TASKS.items() if self.model_class.endswith(ending)), None)


def facts_of_folder(folder: str | os.PathLike) -> CheckpointFacts:
    """The facts of a saved model, from its config.json. Raises FileNotFoundError, or ValueError for no class in it."""
    config = json.loads((Path(folder) / CONFIG_NAME).read_text(encoding="utf-8"))
    name = str((config.get("architectures") or [""])[0])
    if (Path(folder) / MODULES_FILE).is_file():
        name = sentence_class(Path(folder) / SENTENCE_SETTINGS)
    if not name.isidentifier():  # it becomes Python on the card
        raise ValueError(f"{folder} names no class of a model, but {name[:80]!r}; use save_pretrained")
    return CheckpointFacts(
        model_class=name,
        layers=config.get("num_hidden_layers") if name == _MLP_CLASS else None,
        needs_package=RECORD_KEY in config,
    )


def sentence_class(settings: Path | None) -> str:
    """The class that the settings of a checkpoint name: as in sentence-transformers SentenceTransformer by default."""
    named = json.loads(settings.read_text(encoding="utf-8")) if settings is not None and settings.is_file() else {}
    return str(named.get("model_type", SENTENCE_CLASSES[0]))


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


def python_code(checkpoint: CheckpointFacts, repo_id: str | None, activation: str | None) -> dict[str, str]:
    """{"plain_code", "lgelu_code"}: Python that loads a checkpoint without this package, and with it.

    The first is "" without `activation`, which is as in `without_hf_lgelu`.
    """
    where = repo_id or "FOLDER"
    without = without_hf_lgelu(checkpoint, where, activation=activation) if activation else ""
    return {"plain_code": without, "lgelu_code": with_hf_lgelu(checkpoint.model_class, where)}


def with_hf_lgelu(model_class: str, where: str) -> str:
    """Python that loads a checkpoint with this package; `where` is a folder or Hub id. "" for an ONNX file."""
    if model_class == ONNX_CLASS:
        return ""
    package = "hf_lgelu" if model_class == _MLP_CLASS else "transformers"
    package = "sentence_transformers" if model_class in SENTENCE_CLASSES else package
    return _HF_LGELU.format(package=package, model_class=model_class, where=where)


def without_hf_lgelu(checkpoint: CheckpointFacts, where: str, *, activation: str) -> str:
    """Python that loads a checkpoint without this package; "" if there is none.

    `activation` is the name of its gates in transformers.
    """
    if checkpoint.model_class == _MLP_CLASS:
        # torch prints the form of GELU that needs no argument, too.
        plain = {row.plain_names[0]: repr(row.plain_module()) for row in GATES.values()}
        modules = {"relu": "ReLU()"} | {name: text.replace("approximate='none'", "") for name, text in plain.items()}
        module = modules.get(activation)  # none of two gates
        return _MLP.format(layers=checkpoint.layers, activation=module) if module else ""
    form = _SENTENCE_TRANSFORMERS if checkpoint.model_class in SENTENCE_CLASSES else _TRANSFORMERS
    form = _ONNX if checkpoint.model_class == ONNX_CLASS else form
    return form.format(model_class=checkpoint.model_class, where=where)
