"""Comparison of networks with an original over batches: the score of each, and its distance from the original."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_lgelu.comparing.net_change import NetChange
from hf_lgelu.comparing.output_comparison import OutputComparison
from hf_lgelu.networks.batches import TRIED, Batch, cut_batches
from hf_lgelu.networks.masks import counted_rows
from hf_lgelu.networks.outputs import (
    IGNORED_LABEL,
    QUERIES,
    SIDES,
    Compared,
    OutputReader,
    as_of_softmax,
    in_order_of,
    is_causal,
)
from hf_lgelu.networks.run import forward_hooks
from hf_lgelu.processes import each_has

_SCORES_AT_ONCE = 2**26  # values of the outputs, 256 MiB; a comparison or a loss holds several copies of these


def compare_networks_on(
    read: OutputReader,
    others: Mapping[str, Callable[[Any], Compared]],
    batches: Iterable[Batch],
    *,
    over_processes: bool = False,
) -> tuple["Score", dict[str, "NetComparison"]]:
    """(the score of the original, which `read` reads, {name: a network's distance from it}). `others` are functions.

    `over_processes` adds up the results of all processes, each on batches of its own. Then every process must call.
    """
    score, found, causal = Score(), {name: NetComparison() for name in others}, is_causal(read.model)
    sizes, most = None, 1
    for batch in batches:
        of_batch = {name: value.shape[1:] for name, value in batch.tensors.items()}
        if of_batch != sizes:  # the longest batches come last
            sizes, most = of_batch, samples_at_once(read, batch)
        for piece in cut_batches([batch], most):
            reference = read(piece.inputs)
            score += Score.of(reference, piece, causal)
            for name, run in others.items():
                found[name].add(piece, reference, run(piece.inputs), causal)
    (score, found), *elsewhere = each_has((score, found)) if over_processes else [(score, found)]
    for other_score, theirs in elsewhere:
        score += other_score
        for name, comparison in found.items():
            comparison.merge(theirs[name])
    return score, found


class NetComparison:
    """The distance of a network from the original in each output that counts, and its score, added up over batches.

    A detector's distance is that of its scores and boxes together, for each box that the original is certain of: the KL
    of the scores, plus four times the relative error of the boxes. A box's error counts with the original's certainty.
    """

    def __init__(self) -> None:
        self._score = Score()
        self._outputs: dict[str, OutputComparison] = {}  # first the output that is compared closest
        self._certainty = 0.0  # the number of a detector's boxes, each counted with the original's certainty
        self._places = {name: OutputComparison() for name in QUERIES}

    def add(self, batch: Batch, reference: Compared, other: Compared, is_causal: bool = False) -> None:
        """Add the outputs of the original and the network for one batch.

        Raises ValueError for other outputs, or outputs of other shapes.
        """
        shapes, theirs = (
            {name or "a tensor": tuple(x.shape) for name, x in each.tensors.items()} for each in (reference, other)
        )
        if shapes != theirs:
            raise ValueError(
                f"the original gives {shapes} and the other {theirs} for the same inputs; only equal shapes "
                "are compared: give networks for the same task, and `outputs` whose length no network chooses itself"
            )
        other, certainty = in_order_of(reference, other), reference.certainty()
        for number, (name, value) in enumerate(reference.tensors.items()):
            counted = batch.counted(value, name, channels_last=True)
            if number == 0 and counted is not None and not counted.any():
                return
            parts = (value, other.tensors[name], counted, certainty)
            wanted, given, counted, sure = (
                part[None] if batch.is_sample and part is not None else part for part in parts
            )
            if sure is not None and name in QUERIES:
                self._add_places(name, wanted, given, sure, reference.are_logits)
            self._outputs.setdefault(name, OutputComparison()).add(
                wanted,
                given,
                counted,
                are_scores=reference.are_logits and number == 0,
                are_embeddings=reference.are_embeddings and number == 0,
            )
        self._score += Score.of(other, batch, is_causal)

    def _add_places(self, name: str, value: Tensor, given: Tensor, certainty: Tensor, are_logits: bool) -> None:
        if name == QUERIES[0]:
            self._certainty += certainty.sum(dtype=torch.float64).item()
            if not are_logits:
                value, given = map(as_of_softmax, (value, given))
        else:
            given = value + certainty.sqrt()[..., None] * (given - value)
        self._places[name].add(value, given, are_scores=name == QUERIES[0])

    def merge(self, other: "NetComparison") -> None:
        """Add the comparison of another process."""
        self._score += other._score
        self._certainty += other._certainty
        for name, change in other._outputs.items():
            self._outputs.setdefault(name, OutputComparison()).merge(change)
        for name, change in other._places.items():
            self._places[name].merge(change)

    @property
    def first(self) -> OutputComparison:
        """The comparison of the first output."""
        return next(iter(self._outputs.values()), OutputComparison())

    @property
    def gaps(self) -> tuple[float, ...]:
        """The distance of each sample; a detector's add up to its distance."""
        scores, boxes = self._places.values()
        if not boxes.rows:
            return self.first.gaps
        error = SIDES * boxes.rows * boxes.relative_error / (sum(boxes.gaps) or 1.0)
        pairs = zip(scores.gaps, boxes.gaps, strict=True)
        return tuple((of_scores + error * of_boxes) / max(1.0, self._certainty) for of_scores, of_boxes in pairs)

    @property
    def change(self) -> NetChange:
        """The numbers that are reported about the network."""
        first, scores = self.first, self._score.values
        errors = {name: change.relative_error for name, change in self._outputs.items()}
        return NetChange(
            first.kl,
            first.agreement,
            first.largest_change,
            first.relative_error,
            scores,
            errors if len(errors) > 1 else {},
            first.embedding,
            sum(self.gaps) if self._places[QUERIES[1]].rows else None,
        )


@torch.no_grad()
def samples_at_once(read: OutputReader, batch: Batch) -> int:
    """The number of samples like these whose outputs are in memory at once: a large vocabulary needs much memory."""
    few = batch[:TRIED]
    scores = sum(value.numel() for value in read(few.inputs).tensors.values())
    return max(1, _SCORES_AT_ONCE * len(few) // max(1, scores))


@dataclass(frozen=True)
class Score:
    """The sums that make a network's accuracy or perplexity; all are zero without labels."""

    correct: int = 0
    labelled: int = 0
    loss: float = 0.0
    predicted: int = 0

    def __add__(self, other: "Score") -> "Score":
        return Score(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def of(cls, network: Compared, batch: Batch, is_causal: bool) -> "Score":
        """The score on one batch by its labels, which are integers of any width; −100 does not count.

        The labels of a causal language model (`is_causal`) are the tokens, not shifted. Labels of another shape or kind
        give no score, nor does an output of one column.
        """
        name, output = next(iter(network.tensors.items()))
        counted, labels = batch.counted(output, name, channels_last=True), batch.labels
        if labels is None or labels.is_floating_point() or not labels_fit(labels, output) or output.shape[-1] < 2:
            return cls()
        labels = labels.to(output.device, torch.long)
        if counted is not None:
            labels = labels.masked_fill(~counted, IGNORED_LABEL)
        if is_causal:  # a token is predicted at the position before, unless that is padding
            labels = F.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL)
            labels = labels if counted is None else labels.masked_fill(~counted, IGNORED_LABEL)
        valid = labels != IGNORED_LABEL
        if not is_causal:
            return cls(correct=int((output.argmax(-1) == labels)[valid].sum()), labelled=int(valid.sum()))
        loss = 0.0
        for logits, tokens in zip(output, labels, strict=True):  # a sequence at a time: vocabularies are large
            losses = F.cross_entropy(logits.float(), tokens, ignore_index=IGNORED_LABEL, reduction="none")
            loss += losses.cpu().double().sum().item()
        return cls(loss=loss, predicted=int(valid.sum()))

    @property
    def values(self) -> dict[str, float]:
        """{"accuracy": …} or {"perplexity": …}, empty without labels."""
        found = {}
        if self.labelled:
            found["accuracy"] = self.correct / self.labelled
        if self.predicted:
            found["perplexity"] = math.exp(min(self.loss / self.predicted, 700.0))
        return found


def labels_fit(labels: Tensor, output: Tensor) -> bool:
    """Whether there is a label for each row of scores."""
    return labels.shape == output.shape[:-1]


class LiveUnits:
    """Counts the outputs of gates that are not exactly zero, without padding, while a network runs."""

    def __init__(self, gates: Mapping[str, nn.Module]) -> None:
        """`gates` are modules by their names."""
        self._gates = gates
        self.live, self.outputs = Counter[str](), Counter[str]()  # {gate: outputs not zero}, {gate: all outputs}

    @contextmanager
    def counting(self, inputs: Any) -> Iterator[None]:
        """A block in which the network runs on `inputs`."""

        def see(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
            counted = counted_rows(inputs if isinstance(inputs, Mapping) else {}, output, name)
            values = output if counted is None else output[counted]
            self.live[name] += int(values.count_nonzero())
            self.outputs[name] += values.numel()

        with ExitStack() as hooks:
            for name, gate in self._gates.items():
                hooks.enter_context(forward_hooks([gate], partial(see, name)))
            yield

    @property
    def share(self) -> float | None:
        """The live share of all outputs together; None if no gate ran."""
        return self.live.total() / self.outputs.total() if self.outputs.total() else None

    @property
    def shares(self) -> dict[str, float]:
        """{gate: the share of its outputs that are not zero}, of the gates that ran."""
        return {name: self.live[name] / count for name, count in self.outputs.items() if count}
