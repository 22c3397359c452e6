"""How a network that nobody here trained is judged, by what it is for."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from hf_lgelu.comparing.net_comparison import compare_networks_on
from hf_lgelu.networks.batches import Batch
from hf_lgelu.networks.outputs import OutputReader
from lgelu_lab.benchmarks.real_inputs import Inputs

Judged = dict[str, float | None]


@dataclass(frozen=True)
class Task:
    """How a kind of network is judged.

    `judge(original, network, batches)` gives the columns of a row, of `judged_at_once` units a batch: the logits of a
    text fill the memory.
    """

    metric: str
    judge: Callable[[nn.Module, nn.Module, list[Inputs]], Judged]
    judged_at_once: int = 16


def _judge(original: nn.Module, network: nn.Module, units: list[Inputs]) -> Judged:
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
    "text": Task("perplexity", _judge, 1),
}
