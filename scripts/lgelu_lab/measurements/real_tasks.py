"""How a network that nobody here trained is judged, by what it is for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from hf_lgelu.comparing.net_comparison import compare_networks_on
from hf_lgelu.environment import require
from hf_lgelu.networks.batches import Batch
from hf_lgelu.networks.outputs import IGNORED_LABEL, OutputReader
from lgelu_lab.benchmarks.real_inputs import Inputs
from lgelu_lab.measurements.conversion import change_of_outputs

Judged = dict[str, float | None]


@dataclass(frozen=True)
class Task:
    """How a kind of network is judged.

    `judge(original, network, batches, processor)` gives the columns of a row, of `judged_at_once` units a batch: the
    logits of a text fill the memory.
    """

    metric: str
    judge: Callable[[nn.Module, nn.Module, list[Inputs], Any], Judged]
    judged_at_once: int = 16


def _judge_speech(original: nn.Module, network: nn.Module, batches: list[Inputs], processor: Any) -> Judged:
    """Errors of what the network writes by itself, greedily, over the words spoken; the rest with the text given."""
    score = None
    if isinstance(network, PreTrainedModel):  # what onnxruntime runs has no loop that writes
        jiwer = require("jiwer", "benchmarks")
        heard = [text for batch in batches for text in written(network, batch, processor.tokenizer)]
        labels = [row[row != IGNORED_LABEL] for batch in batches for row in batch["labels"]]
        spoken = [processor.tokenizer.decode(row, skip_special_tokens=True) for row in labels]
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


_NORMALIZE = EnglishTextNormalizer({})
"""Words without signs and case, numbers in digits; British spellings stay."""


def _judge(original: nn.Module, network: nn.Module, units: list[Inputs], processor: Any) -> Judged:
    """The score by the labels, which of a text are its tokens; of embeddings the neighbours that stay."""
    batches = []
    for unit in units:
        inputs = {name: tensor for name, tensor in unit.items() if name != "labels"}
        batches.append(Batch(inputs, unit["labels"] if "labels" in unit else unit["input_ids"]))
    _, found = compare_networks_on(OutputReader(original), {"": OutputReader(network)}, batches)
    change = found[""].change
    if change.embedding:
        same = change.embedding["same_neighbour"]
        cosines = {name: change.embedding[name] for name in ("cosine", "least_cosine")}
        return {"score": same, "agreement": same, **cosines}
    (score,) = change.metrics.values()
    return {"score": score, "kl": change.kl, "agreement": change.agreement}


TASKS: dict[str, Task] = {
    "classification": Task("accuracy", _judge),
    "embedding": Task("same_neighbour", _judge),
    "speech": Task("word_error_rate", _judge_speech),
    "text": Task("perplexity", _judge, 1),
}
