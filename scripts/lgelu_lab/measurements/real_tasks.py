"""How a network that nobody here trained is fed and judged, by what it is for."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.signal import resample_poly
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from hf_lgelu.environment import require
from hf_lgelu.models.batches import Batch
from hf_lgelu.models.outputs import IGNORED_LABEL, compared_outputs
from hf_lgelu.refit.compare import compare_networks_on
from lgelu_lab.measurements.conversion import change_of_outputs

Inputs = dict[str, Tensor]
Judged = dict[str, float | None]
_FEWEST_WORDS = 8


@dataclass(frozen=True)
class Task:
    """How a kind of network is loaded, fed and judged.

    `units(texts, images or sounds, labels, processor, length)` makes one batch of a unit each, `judge(original,
    network, batches, processor)` the columns of a row, of `judged_at_once` units a batch: the logits of a text fill
    the memory. `processor_class` is transformers' class that loads the processor.
    """

    metric: str
    units: Callable[[Sequence[Any], Sequence[Any] | None, Any, int], list[Inputs]]
    judge: Callable[[nn.Module, nn.Module, list[Inputs], Any], Judged]
    judged_at_once: int = 16


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


def in_batches(units: Sequence[Inputs], pad: int, at_once: int, *, labelled: bool = True) -> list[Inputs]:
    """Batches of units, with or without their labels; units of about the same length go together."""
    kept = [{name: tensor for name, tensor in unit.items() if labelled or name != "labels"} for unit in units]
    ordered = sorted(kept, key=lambda unit: next(iter(unit.values())).shape[-1])  # of sounds, the text's
    return [joined(ordered[start : start + at_once], pad) for start in range(0, len(ordered), at_once)]


def joined(units: Sequence[Inputs], pad: int) -> Inputs:
    """One batch, the sequences padded behind where the units differ in length."""
    fill = {"input_ids": pad, "decoder_input_ids": pad, "attention_mask": 0, "decoder_attention_mask": 0}
    if units[0].get("labels", torch.empty(0)).ndim > 1:  # of tokens, not of a unit
        fill["labels"] = IGNORED_LABEL
    longest = {name: max(unit[name].shape[1] for unit in units) for name in fill if name in units[0]}
    return {
        name: torch.cat(
            [
                F.pad(unit[name], (0, longest[name] - unit[name].shape[1]), value=fill[name])
                if name in fill
                else unit[name]
                for unit in units
            ]
        )
        for name in units[0]
    }


def _texts(texts: Sequence[str], labels: Sequence[int] | None, tokenizer: Any, length: int) -> list[Inputs]:
    units = []
    for index, text in enumerate(texts):
        encoded = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
        unit = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        units.append(unit if labels is None else {**unit, "labels": torch.tensor([labels[index]])})
    return units


def _blocks(texts: Sequence[str], labels: Sequence[int] | None, tokenizer: Any, length: int) -> list[Inputs]:
    tokens = torch.tensor(tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"])
    return [{"input_ids": block[None]} for block in tokens.split(length) if len(block) == length]


def _sounds(
    sounds: Sequence[Mapping[str, Any]], texts: Sequence[str] | None, processor: Any, length: int
) -> list[Inputs]:
    """Each with its text for the decoder, where the network can hear it to its end and the text has `length` tokens."""
    units, extractor = [], processor.feature_extractor
    for sound, text in zip(sounds, texts or (), strict=True):
        wave = _wave(sound, extractor.sampling_rate)
        tokens = torch.tensor([processor.tokenizer(text)["input_ids"]])
        if len(wave) > extractor.n_samples or tokens.shape[1] > length:
            continue
        heard = extractor(wave, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        read = {"decoder_input_ids": tokens[:, :-1], "decoder_attention_mask": torch.ones_like(tokens[:, 1:])}
        units.append({**read, "input_features": heard["input_features"], "labels": tokens[:, 1:]})
    return units


def _wave(sound: Mapping[str, Any], rate: int) -> np.ndarray:
    """(samples,) float32 at `rate` Hz, of a file as datasets holds it undecoded."""
    soundfile = require("soundfile", "benchmarks")
    file = io.BytesIO(sound["bytes"]) if sound["bytes"] is not None else sound["path"]
    samples, written_at = soundfile.read(file, dtype="float32", always_2d=True)
    return resample_poly(samples.mean(1), rate, written_at)


def _judge_speech(original: nn.Module, network: nn.Module, batches: list[Inputs], processor: Any) -> Judged:
    """Errors of what the network writes by itself, greedily, over the words spoken; the rest with the text given."""
    score = None
    if isinstance(network, PreTrainedModel):  # what onnxruntime runs has no loop that writes
        jiwer = require("jiwer", "benchmarks")
        heard = [text for batch in batches for text in written(network, batch, processor.tokenizer)]
        spoken = [text for batch in batches for text in _spoken(batch["labels"], processor.tokenizer)]
        score = jiwer.wer(*([_NORMALIZE(text) for text in texts] for texts in (spoken, heard)))
    change = change_of_outputs(original, network, batches)
    return {"score": score, "kl": change["kl"], "agreement": change["agreement"]}


@torch.no_grad()
def written(network: PreTrainedModel, batch: Inputs, tokenizer: Any) -> list[str]:
    """What a speech network writes of each sound, the likeliest token at every step.

    One that does not end by itself is stopped at twice the tokens of the batch's longest text.
    """
    most = min(2 * batch["labels"].shape[1], network.config.max_target_positions - 2)
    tokens = network.generate(batch["input_features"], num_beams=1, do_sample=False, max_new_tokens=most)
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


def _spoken(labels: Tensor, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(row[row != IGNORED_LABEL], skip_special_tokens=True) for row in labels]


_NORMALIZE = EnglishTextNormalizer({})
"""Words without signs and case, numbers in digits; British spellings stay."""


def _judge(original: nn.Module, network: nn.Module, units: list[Inputs], processor: Any) -> Judged:
    """The score by the labels, which of a text are its tokens; of embeddings the neighbours that stay."""
    batches = []
    for unit in units:
        inputs = {name: tensor for name, tensor in unit.items() if name != "labels"}
        batches.append(Batch(inputs, unit["labels"] if "labels" in unit else unit["input_ids"]))
    _, found = compare_networks_on(original, {"": lambda inputs: compared_outputs(network, inputs)}, batches)
    change = found[""].change
    if change.embedding:
        same = change.embedding["same_neighbour"]
        cosines = {name: change.embedding[name] for name in ("cosine", "least_cosine")}
        return {"score": same, "agreement": same, **cosines}
    (score,) = change.metrics.values()
    return {"score": score, "kl": change.kl, "agreement": change.agreement}


TASKS: dict[str, Task] = {
    "classification": Task("accuracy", _texts, _judge),
    "embedding": Task("same_neighbour", _texts, _judge),
    "speech": Task("word_error_rate", _sounds, _judge_speech),
    "text": Task("perplexity", _blocks, _judge, 1),
}
