"""How a checkpoint is loaded elsewhere: the Python on its card, and the MLP's own source beside its weights."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.constants import CONFIG_NAME
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_lgelu.activation.gates import DEFAULT_GATE, GATES
from hf_lgelu.files import whole_file
from hf_lgelu.models import mlp
from hf_lgelu.models.config_keys import gate_names
from hf_lgelu.models.record import RECORD_KEY
from hf_lgelu.refit.config import TARGETS

CODE_FILE = "mlp.py"
_MLP_CLASS = mlp.MLPForClassification.__name__
SENTENCE_CLASSES = ("SentenceTransformer", "SparseEncoder", "CrossEncoder")
"""Of sentence-transformers: embeddings, embeddings over a vocabulary, scores of pairs."""

MODULES_FILE = "modules.json"
"""What a checkpoint of sentence-transformers has: the list of its modules and their folders."""

_FILE_ENDINGS = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".arrow", ".txt", ".safetensors", ".bin", ".onnx")
_SENTENCE_SETTINGS = "config_sentence_transformers.json"
_AUTO_MAP = {"AutoConfig": f"mlp.{mlp.MLPConfig.__name__}", "AutoModel": f"mlp.{_MLP_CLASS}"}

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

_CARRIED = """\
from transformers import AutoModel

model = AutoModel.from_pretrained("{where}", trust_remote_code=True)  # runs mlp.py: read it first"""

_HF_LGELU = """\
import hf_lgelu
from {package} import {model_class}

model = hf_lgelu.from_pretrained({model_class}, "{where}")"""


def could_be_hub_id(name: str) -> bool:
    """Whether the Hub could have a repository of that name: no path, and not named like a file."""
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.endswith(_FILE_ENDINGS):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_hub_id(name: str | None) -> bool:
    """Whether a name stands for a repository on the Hub: it could be one, and no file or folder has that name."""
    return name is not None and could_be_hub_id(name) and not Path(name).exists()


@dataclass(frozen=True)
class CheckpointFacts:
    """The facts of a checkpoint that decide how it is loaded.

    `layers` are the hidden layers of an `MLPForClassification`; `own_code` says that mlp.py lies beside the weights
    (`attach_model_code`), `needs_package` that the config alone does not build the network (`from_pretrained`). A
    checkpoint of sentence-transformers is of one of SENTENCE_CLASSES, whatever its encoder.
    """

    model_class: str
    layers: int | None = None
    own_code: bool = False
    needs_package: bool = False

    @property
    def library(self) -> str:
        """The Hub's name of the library that loads it."""
        return "sentence-transformers" if self.model_class in SENTENCE_CLASSES else "transformers"


def facts_of_folder(folder: str | os.PathLike) -> CheckpointFacts:
    """The facts of a saved model, from its config.json. Raises FileNotFoundError, or ValueError for no class in it."""
    if (Path(folder) / MODULES_FILE).is_file():
        return CheckpointFacts(sentence_class(folder))
    config = json.loads((Path(folder) / CONFIG_NAME).read_text(encoding="utf-8"))
    names = config.get("architectures")
    if not names:
        raise ValueError(f"{folder}/config.json names no architectures; save the model with save_pretrained")
    if not str(names[0]).isidentifier():
        raise ValueError(f"{folder}/config.json names the class {str(names[0])[:80]!r}, which is no name in Python")
    return CheckpointFacts(
        model_class=names[0],
        layers=config.get("num_hidden_layers") if names[0] == _MLP_CLASS else None,
        own_code="auto_map" in config,
        needs_package=RECORD_KEY in config,
    )


def sentence_class(folder: str | os.PathLike) -> str:
    """The class of a checkpoint of sentence-transformers: SentenceTransformer where it says none, as in that package.

    Raises ValueError for one that is not among SENTENCE_CLASSES.
    """
    name = sentence_settings(folder).get("model_type", SENTENCE_CLASSES[0])
    if name not in SENTENCE_CLASSES:
        raise ValueError(
            f"{folder} is a {str(name)[:80]} of sentence-transformers, and read from folders are "
            f"{', '.join(SENTENCE_CLASSES)}. Load it and give the model itself: "
            "hf_lgelu.convert_to_relu(model, texts, options=ConversionConfig(data_collator=model.preprocess))"
        )
    return name


def sentence_settings(folder: str | os.PathLike) -> dict[str, Any]:
    """The class and prompts that sentence-transformers keeps in a file beside its modules; {} without that file."""
    path = Path(folder) / _SENTENCE_SETTINGS
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return settings if isinstance(settings, dict) else {}


def gates_of_folder(folder: str | os.PathLike) -> list[str]:
    """The λ-gates that the config.json of a saved model names; none where there is no file."""
    path = Path(folder) / CONFIG_NAME
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    recorded = [entry for entry in json.loads(text).get(RECORD_KEY) or [] if "activation" not in entry]
    return sorted(gate_names(text)) or ["gates that surgery put in"] * bool(recorded)


def with_hf_lgelu(model_class: str, where: str) -> str:
    """Python that loads a checkpoint with this package; `where` is a folder or Hub id."""
    if model_class in SENTENCE_CLASSES:
        return f"import hf_lgelu\n{_SENTENCE_TRANSFORMERS.format(model_class=model_class, where=where)}"
    package = "hf_lgelu" if model_class == _MLP_CLASS else "transformers"
    return _HF_LGELU.format(package=package, model_class=model_class, where=where)


def without_hf_lgelu(checkpoint: CheckpointFacts, where: str, *, activation: str, gate: str = DEFAULT_GATE) -> str:
    """Python that loads a checkpoint without this package; "" for an MLP whose gates torch does not have.

    Args:
        checkpoint: what it is.
        where: folder or Hub id.
        activation: a name of TARGETS, or "gelu" with λ absorbed by the weights.
        gate: of the latter the row of GATES, whose plain form its gates are.
    """
    if checkpoint.model_class == _MLP_CLASS:
        plain = GATES[gate].plain_module()
        # torch prints the form of GELU that needs no argument, too.
        of_torch = (
            repr(plain).replace("approximate='none'", "") if type(plain).__module__.startswith("torch.nn.") else ""
        )
        module = of_torch if activation == "gelu" else TARGETS[activation].torch_module
        return _MLP.format(layers=checkpoint.layers, activation=module) if module else ""
    form = _SENTENCE_TRANSFORMERS if checkpoint.model_class in SENTENCE_CLASSES else _TRANSFORMERS
    return form.format(model_class=checkpoint.model_class, where=where)


def with_carried_code(where: str) -> str:
    """Python that loads an MLP with its own source (`attach_model_code`); `where` is a folder or Hub id."""
    return _CARRIED.format(where=where)


def attach_model_code(folder: str | os.PathLike) -> Path:
    """Put mlp.py, which needs torch and transformers alone, into an MLP's folder, and name it in config.json.

    Who loads the folder without hf_lgelu says so: `AutoModel.from_pretrained(folder, trust_remote_code=True)` runs
    that file. With hf_lgelu the installed class is taken and nothing is run; nor is anything needed to read the
    tensors into `torch.nn.Sequential`, as the model card shows. Transformers' `register_for_auto_class` would do the
    same to every MLP that this process saves from then on.

    Args:
        folder: an `MLPForClassification` checkpoint with an activation of transformers, such as ReLU.

    Returns:
        The path of the copied file.

    Raises:
        ValueError: another model, or one with λ-GELU, kept gates or a slope, which the file alone cannot build.
        FileNotFoundError: there is no config.json.

    Example:
        >>> import tempfile
        >>> from hf_lgelu import MLPConfig, MLPForClassification
        >>> from hf_lgelu.export.hub.loading import attach_model_code
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     MLPForClassification(MLPConfig(num_features=2, hidden_act="relu")).save_pretrained(folder)
        ...     attach_model_code(folder).name
        'mlp.py'
    """
    folder = Path(folder)
    path = folder / CONFIG_NAME
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("model_type") != mlp.MLPConfig.model_type:
        raise ValueError(
            f"{folder} holds a model of type {config.get('model_type')!r}; only {mlp.MLPConfig.model_type!r} has code "
            "to carry, the others are in transformers or timm"
        )
    if config["hidden_act"] in GATES:
        raise ValueError(
            f"{folder} has hidden_act {config['hidden_act']!r}, which is built by hf_lgelu; export the model with "
            "export_relu or export_gelu first"
        )
    if RECORD_KEY in config:
        raise ValueError(
            f"{folder} has gates that its config alone does not build (several λ a layer, gates that a conversion "
            "kept, a slope): that takes hf_lgelu.from_pretrained. Export λ-GELU with export_relu or export_gelu first, "
            "convert all gates, or take a target without a slope of its own"
        )
    config["auto_map"] = _AUTO_MAP
    with whole_file(folder / CODE_FILE, overwrite=True) as new:
        shutil.copyfile(mlp.__file__, new)
    with whole_file(path, overwrite=True) as new:
        new.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return folder / CODE_FILE
