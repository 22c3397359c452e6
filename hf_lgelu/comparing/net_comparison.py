"""Comparison of networks with an original over batches: the scores of each, and its distance from the original."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_lgelu.comparing.distance import Distance
from hf_lgelu.comparing.output_comparison import OutputComparison
from hf_lgelu.networks.batches import TRIED, Batch, cut_batches
from hf_lgelu.networks.masks import counted_rows
from hf_lgelu.networks.outputs import (
    IGNORED_LABEL,
    QUERIES,
    SIDES,
    OutputReader,
    Outputs,
    as_of_softmax,
    in_order_of,
    is_causal,
)
from hf_lgelu.networks.run import Inputs, forward_hooks
from hf_lgelu.processes import each_has

_SCORES_AT_ONCE = 2**26  # values of the outputs, 256 MiB; a comparison or a loss holds several copies of these


def compare_outputs(
    read: OutputReader,
    others: Mapping[str, Callable[[Any], Outputs]],
    batches: Iterable[Batch],
    *,
    over_processes: bool = False,
) -> tuple[dict[str, float], dict[str, "NetComparison"]]:
    """(the metrics of the original, which `read` reads, {name: a network's distance from it}). `others` are functions.

    `over_processes` adds up the results of all processes, each on batches of its own. Then every process must call.

    Raises ValueError for labels that are none of the classes, and for outputs of another shape than the original's.
    """
    causal, scores, found = is_causal(read.model), Counter[str](), {name: NetComparison() for name in others}
    sizes, most = None, 1
    for batch in batches:
        of_batch = {name: value.shape[1:] for name, value in batch.tensors.items()}
        if of_batch != sizes:  # the longest batches come last
            sizes, most = of_batch, samples_at_once(read, batch)
        for piece in cut_batches([batch], most):
            reference = read(piece.inputs)
            scores.update(scores_of(reference, piece, causal))
            for name, run in others.items():
                found[name].add(piece, reference, run(piece.inputs), causal)
    (scores, found), *elsewhere = each_has((scores, found)) if over_processes else [(scores, found)]
    for their_scores, theirs in elsewhere:
        scores.update(their_scores)
        for name, comparison in found.items():
            comparison.merge(theirs[name])
    return metrics_of(scores), found


def compare_models(model: nn.Module, other: nn.Module, inputs: Inputs) -> Distance:
    """The distance of `other` from `model` on these inputs.

    Raises ValueError for outputs of different shapes, for no or empty outputs, and for NaN of `model`.
    """
    before, after = (OutputReader(network)(inputs) for network in (model, other))
    for name, value in before.tensors.items():
        if not value.numel():
            raise ValueError(f"the outputs on the example inputs, of shape {tuple(value.shape)}, are empty; give a row")
        if value.isnan().any():
            raise ValueError(
                f"the model gives NaN{f' in {name}' if name else ''} on the example inputs; give finite inputs, or "
                "look at its weights"
            )
    comparison = NetComparison()
    comparison.add(Batch(inputs), before, after)
    return comparison.distance


class NetComparison:
    """The distance of a network from the original in each output that counts, and its scores, added up over batches.

    A detector's distance is that of its scores and boxes together, for each box that the original is certain of: the KL
    of the scores, plus four times the relative error of the boxes. A box's error counts with the original's certainty.
    """

    def __init__(self) -> None:
        self.scores = Counter[str]()  # the sums of `scores_of`
        self._outputs: dict[str, OutputComparison] = {}
        self._certainty = 0.0  # the number of a detector's boxes, each counted with the original's certainty
        self._places = {name: OutputComparison() for name in QUERIES}

    def add(self, batch: Batch, reference: Outputs, other: Outputs, is_causal: bool = False) -> None:
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
            parts = (reference.scores(name, value), reference.scores(name, other.tensors[name]), counted, certainty)
            wanted, given, counted, sure = (
                part[None] if batch.is_sample and part is not None else part for part in parts
            )
            if sure is not None and name in QUERIES:
                self._add_places(name, wanted, given, sure, reference.has_classes("logits"))
            self._outputs.setdefault(name, OutputComparison()).add(wanted, given, counted, kind=reference.kinds[name])
        self.scores.update(scores_of(other, batch, is_causal))

    def _add_places(self, name: str, value: Tensor, given: Tensor, certainty: Tensor, have_classes: bool) -> None:
        if name == QUERIES[0]:
            self._certainty += certainty.sum(dtype=torch.float64).item()
            if not have_classes:
                value, given = map(as_of_softmax, (value, given))
        else:
            given = value + certainty.sqrt()[..., None] * (given - value)
        self._places[name].add(value, given, kind="scores" if name == QUERIES[0] else "values")

    def merge(self, other: "NetComparison") -> None:
        """Add the comparison of another process."""
        self.scores.update(other.scores)
        self._certainty += other._certainty
        for name, change in other._outputs.items():
            self._outputs.setdefault(name, OutputComparison()).merge(change)
        for name, change in other._places.items():
            self._places[name].merge(change)

    @property
    def rows(self) -> int:
        """The number of predictions, or rows of values, of the first output; 0 if all that was added is padding."""
        return next((comparison.rows for comparison in self._outputs.values()), 0)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Each sample's part of the distance."""
        farthest = self.distance
        return self._gaps_of_places() if farthest.detection is not None else self._outputs[farthest.output].gaps

    def _gaps_of_places(self) -> tuple[float, ...]:
        scores, boxes = self._places.values()
        number = max(1.0, self._certainty)
        pairs = zip(scores.gaps, boxes.gaps, strict=True)
        return tuple(
            (of_scores * scores.rows + SIDES * boxes.rows * of_boxes) / number for of_scores, of_boxes in pairs
        )

    @property
    def distance(self) -> Distance:
        """The numbers that are reported about the network, of the output that is farthest from the original."""
        found = {name: comparison.distance(name) for name, comparison in self._outputs.items()}
        decide = dict(found)
        if self._places[QUERIES[1]].rows:
            scores, _ = QUERIES
            decide = {name: each for name, each in found.items() if name not in QUERIES}
            decide[scores] = found[scores] = replace(found[scores], detection=sum(self._gaps_of_places()))
        farthest = max(decide.values(), key=lambda each: each.value)
        return replace(farthest, metrics=metrics_of(self.scores), outputs=found if len(found) > 1 else {})


@torch.no_grad()
def samples_at_once(read: OutputReader, batch: Batch) -> int:
    """The number of samples like these whose outputs are in memory at once: a large vocabulary needs much memory."""
    few = batch[:TRIED]
    scores = sum(value.numel() for value in read(few.inputs).tensors.values())
    return max(1, _SCORES_AT_ONCE * len(few) // max(1, scores))


def scores_of(network: Outputs, batch: Batch, is_causal: bool) -> Counter[str]:
    """The sums that make a network's accuracy or perplexity on one batch by its labels; empty without labels.

    Labels are integers of any width; −100 does not count. The labels of a causal language model (`is_causal`) are the
    tokens, not shifted. Labels of another shape or kind give no score, nor does an output of one column.

    Raises ValueError for labels that are none of the classes.
    """
    name, output = next(iter(network.tensors.items()))
    counted, labels = batch.counted(output, name, channels_last=True), batch.labels
    if labels is None or labels.is_floating_point() or not labels_fit(labels, output) or output.shape[-1] < 2:
        return Counter()
    labels = labels.to(output.device, torch.long)
    if counted is not None:
        labels = labels.masked_fill(~counted, IGNORED_LABEL)
    if is_causal:  # a token is predicted at the position before, unless that is padding
        labels = F.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL)
        labels = labels if counted is None else labels.masked_fill(~counted, IGNORED_LABEL)
    valid = require_classes(labels, output)
    if not is_causal:
        return Counter(correct=int((output.argmax(-1) == labels)[valid].sum()), labelled=int(valid.sum()))
    loss = 0.0
    for logits, tokens in zip(output, labels, strict=True):  # a sequence at a time: vocabularies are large
        losses = F.cross_entropy(logits.float(), tokens, ignore_index=IGNORED_LABEL, reduction="none")
        loss += losses.cpu().double().sum().item()
    return Counter(loss=loss, predicted=int(valid.sum()))  # type: ignore[call-overload]  # it adds up floats, too


def metrics_of(sums: Mapping[str, float]) -> dict[str, float]:
    """{"accuracy": …} or {"perplexity": …} of the sums of `scores_of`, empty without labels."""
    found = {}
    if sums.get("labelled"):
        found["accuracy"] = sums["correct"] / sums["labelled"]
    if sums.get("predicted"):
        found["perplexity"] = math.exp(min(sums["loss"] / sums["predicted"], 700.0))
    return found


def require_classes(labels: Tensor, output: Tensor) -> Tensor:
    """The mask of the labels that count for an output (..., classes).

    Raises ValueError if one of these is none of the classes.
    """
    valid, classes = labels != IGNORED_LABEL, output.shape[-1]
    strange = labels[valid & ((labels < 0) | (labels >= classes))]
    if len(strange) and classes > 1:
        raise ValueError(
            f"a label is {strange[0].item()}, and the network gives scores of {classes} classes, 0 to {classes - 1}: "
            f"give the labels as the network numbers its classes ({IGNORED_LABEL} for what does not count), or leave "
            "them out"
        )
    return valid


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
