"""Comparison of networks with an original over batches: the scores of each, and its distance from the original."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_lgelu.comparing.distance import Distance, deciding
from hf_lgelu.networks.batches import TRIED, Batch, cut_batches
from hf_lgelu.networks.masks import counted_rows
from hf_lgelu.networks.outputs import (
    BOXES,
    IGNORED_LABEL,
    SCORES,
    SIDES,
    Kind,
    OutputReader,
    Outputs,
    as_of_softmax,
    is_causal,
    with_nearest_queries,
)
from hf_lgelu.networks.run import Inputs, forward_hooks
from hf_lgelu.processes import each_has

_VALUES_AT_ONCE = 2**26  # values of the outputs, 256 MiB; a comparison or a loss holds several copies of these
_VARIES = 1e-9  # least variance, as a share of the mean square, of an output that is not constant up to rounding
_NUMBERS_AT_ONCE = 2**21  # compared in float64
_TIE = 1e-7  # of cosines: rounding may part equally near samples by this much
MOST_NEIGHBOURS = 2048
"""The most samples among which nearest neighbours are searched: the products of all pairs are in memory."""


def compare_outputs(
    reader: OutputReader,
    others: Mapping[str, Callable[[Any], Outputs]],
    batches: Iterable[Batch],
    *,
    over_processes: bool = False,
) -> tuple[dict[str, float], dict[str, "NetComparison"]]:
    """(the metrics of the original, {name: a network's distance from it}); `reader` runs the original.

    `others` are functions of the inputs. `over_processes` adds up the results of all processes, each on batches of its
    own. Then every process must call.

    Raises ValueError for labels that are none of the classes, and for outputs of another shape than the original's.
    """
    causal, sums, compared = is_causal(reader.model), Counter[str](), {name: NetComparison() for name in others}
    sizes, most = None, 1
    for batch in batches:
        of_batch = {name: value.shape[1:] for name, value in batch.tensors.items()}
        if of_batch != sizes:  # the longest batches come last
            sizes, most = of_batch, samples_at_once(reader, batch)
        for piece in cut_batches([batch], most):
            reference = reader(piece.inputs)
            sums.update(label_sums_of(reference, piece, causal))
            for name, run in others.items():
                compared[name].add(piece, reference, run(piece.inputs), causal)
    (sums, compared), *elsewhere = each_has((sums, compared)) if over_processes else [(sums, compared)]
    for their_sums, theirs in elsewhere:
        sums.update(their_sums)
        for name, comparison in compared.items():
            comparison.merge(theirs[name])
    return metrics_of(sums), compared


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


class PlacesComparison:
    """The distance of a detector from the original, a sum over all places (queries of DETR, cells of YOLO):

        (Σ KL(scores) + 4 · Σ certainty · ‖box − original's box‖² / variance of the original's boxes) / Σ certainty

    The certainty is the original's (`Outputs.certainty`), and the sum of certainties over all pictures is at least 1.
    The variance is the sum of the variances of a box's columns, over all boxes, whatever their certainty. A certain box
    whose squared error is this variance counts 4, 1 for each side. An empty place has nearly equal scores in both
    networks, so it adds little to the first sum, and nothing to the second.
    """

    def __init__(self) -> None:
        self._certainty = 0.0
        self._kls: list[float] = []  # of each sample the sum over its places, like the errors
        self._errors: list[float] = []

    def add(self, batch: Batch, original: Outputs, student: Outputs) -> None:
        """Add a batch of both detectors, place by place.

        Places of padding count, too: there the original's certainty is near 0.
        """
        scores = [original.scores(SCORES, network.tensors[SCORES]) for network in (original, student)]
        scores = [*map(as_of_softmax, scores)] if original.is_sigmoid_detector else scores
        parts = [*scores, *(network.tensors[BOXES] for network in (original, student)), original.certainty()]
        if batch.is_sample:
            parts = [part[None] for part in parts]
        for sample in zip(*parts, strict=True):  # scores of all places in float64 are large
            wanted, given, box, given_box, certainty = (part.to("cpu", torch.float64) for part in sample)
            self._certainty += certainty.sum().item()
            self._kls.append(kl_terms(wanted, given).sum().item())  # of empty places, too: an invented object counts
            self._errors.append((certainty * difference(given_box, box).square().sum(-1)).sum().item())

    def merge(self, other: "PlacesComparison") -> None:
        """Add the sums of the comparison of another process."""
        self._certainty += other._certainty
        self._kls += other._kls
        self._errors += other._errors

    def gaps(self, variance: float) -> tuple[float, ...]:
        """Each sample's part of the distance; `variance` is that of the original's boxes."""
        certainty, variance = max(1.0, self._certainty), variance or 1.0  # boxes that are all 0 do not vary
        pairs = zip(self._kls, self._errors, strict=True)
        return tuple((kl + SIDES * error / variance) / certainty for kl, error in pairs)


class NetComparison:
    """The distance of a network from the original in each output that counts, and its sums of labels, over batches.

    A detector's scores and boxes are compared as outputs, and together in `PlacesComparison`.
    """

    def __init__(self) -> None:
        self.label_sums = Counter[str]()  # the sums of `label_sums_of`
        self._outputs: dict[str, OutputComparison] = {}
        self._places: PlacesComparison | None = None  # None for a network that is no detector

    def add(self, batch: Batch, original: Outputs, student: Outputs, is_causal: bool = False) -> None:
        """Add the outputs of both networks for one batch.

        Raises ValueError for other outputs, or outputs of other shapes.
        """
        shapes, theirs = (
            {name or "a tensor": tuple(x.shape) for name, x in each.tensors.items()} for each in (original, student)
        )
        if shapes != theirs:
            raise ValueError(
                f"the original gives {shapes} and the other {theirs} for the same inputs; only equal shapes "
                "are compared: give networks for the same task, and outputs whose length no network chooses itself"
            )
        masks = {name: batch.counted(value, name, channels_last=True) for name, value in original.tensors.items()}
        of_first = next(iter(masks.values()))
        if of_first is not None and not of_first.any():
            return  # a batch of nothing but padding
        student = with_nearest_queries(original, student)
        if original.is_detector:
            self._places = self._places or PlacesComparison()
            self._places.add(batch, original, student)
        for name, counted in masks.items():
            wanted, given = (original.scores(name, network.tensors[name]) for network in (original, student))
            if batch.is_sample:
                wanted, given, counted = wanted[None], given[None], None if counted is None else counted[None]
            self._outputs.setdefault(name, OutputComparison()).add(wanted, given, counted, kind=original.kinds[name])
        self.label_sums.update(label_sums_of(student, batch, is_causal))

    def merge(self, other: "NetComparison") -> None:
        """Add the comparison of another process."""
        self.label_sums.update(other.label_sums)
        for name, change in other._outputs.items():
            self._outputs.setdefault(name, OutputComparison()).merge(change)
        if other._places is not None:
            self._places = self._places or PlacesComparison()
            self._places.merge(other._places)

    @property
    def rows(self) -> int:
        """The number of predictions, or rows of values, of the first output; 0 if all that was added is padding."""
        return next((comparison.rows for comparison in self._outputs.values()), 0)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Each sample's part of the distance."""
        farthest = self.distance
        return self._outputs[farthest.output].gaps if farthest.detection is None else self._gaps_of_detector()

    def _gaps_of_detector(self) -> tuple[float, ...]:
        return () if self._places is None else self._places.gaps(self._outputs[BOXES].variance)

    @property
    def distance(self) -> Distance:
        """The numbers that are reported about the network, of the output that is farthest from the original.

        Of a detector's scores and boxes, `detection` decides.
        """
        distances = {name: comparison.record(name) for name, comparison in self._outputs.items()}
        if self._places is not None:
            distances[SCORES] = replace(distances[SCORES], detection=sum(self._gaps_of_detector()))
        farthest = max(deciding(distances), key=lambda distance: distance.value)
        return replace(farthest, metrics=metrics_of(self.label_sums), outputs=distances if len(distances) > 1 else {})


@torch.no_grad()
def samples_at_once(reader: OutputReader, batch: Batch) -> int:
    """The number of samples like these whose outputs are in memory at once: a large vocabulary needs much memory."""
    few = batch[:TRIED]
    scores = sum(value.numel() for value in reader(few.inputs).tensors.values())
    return max(1, _VALUES_AT_ONCE * len(few) // max(1, scores))


def label_sums_of(network: Outputs, batch: Batch, is_causal: bool) -> Counter[str]:
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
    """{"accuracy": …} or {"perplexity": …} of the sums of `label_sums_of`, empty without labels."""
    metrics = {}
    if sums.get("labelled"):
        metrics["accuracy"] = sums["correct"] / sums["labelled"]
    if sums.get("predicted"):
        metrics["perplexity"] = math.exp(min(sums["loss"] / sums["predicted"], 700.0))
    return metrics


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


class OutputComparison:
    """The distance of one network's output from another's on the same samples, added up over predictions.

    A prediction is a row of numbers along the last axis (`classes_last`). Numbers are compared in float64, in large
    outputs a few rows at a time. An infinity that both networks give at one place is no change.

    Class scores have a `kl`, embeddings an `embedding`, and all values a `relative_error`.
    """

    def __init__(self) -> None:
        self.rows = self._unchanged = self._rows_of_scores = 0
        self.largest_change = self.largest_output = self._squares = 0.0
        self._columns: dict[int, tuple[int, Tensor]] = {}  # {columns: (rows with as many, sum of each column)}
        self._kls: list[float] = []  # of each sample, like the errors
        self._errors: list[float] = []
        self._cosines: list[float] = []
        self._vectors: list[Tensor] = []  # (2, samples, columns) of both networks, for the neighbours

    def add(
        self, original: Tensor, student: Tensor, counted: Tensor | None = None, *, kind: Kind = "values"
    ) -> "OutputComparison":
        """This comparison, with a batch of outputs added, (samples, ..., columns).

        `counted` (samples, ...) says which predictions count; None for all. If a sample's embedding has several
        positions, it is the mean of the positions that count, as sentence-transformers pools by default. Probabilities
        must come as scores (`Outputs.scores`).
        """
        samples = torch.arange(len(original)).reshape(-1, *[1] * (original.ndim - 2)).expand(original.shape[:-1])
        if counted is None:
            rows = [samples.flatten(), original.reshape(-1, original.shape[-1]), student.reshape(-1, student.shape[-1])]
        else:
            rows = [samples[counted.cpu()], original[counted], student[counted]]
        kls, errors = torch.zeros(2, len(original), dtype=torch.float64)
        size = max(1, _NUMBERS_AT_ONCE // original.shape[-1])
        for owners, wanted, found in zip(*(part.split(size) for part in rows), strict=True):
            if not len(owners):
                continue
            wanted, found = ((part.cpu() if part.device.type == "mps" else part).double() for part in (wanted, found))
            change, finite = difference(found, wanted), wanted.nan_to_num(0.0, 0.0, 0.0)
            self.rows += len(owners)
            self._unchanged += int(same_classes(wanted, found).sum())
            self.largest_change = float(np.maximum(self.largest_change, change.abs().max().item()))
            self.largest_output = max(self.largest_output, finite.abs().max().item())
            self._squares += finite.square().sum().item()
            self._add_columns(len(owners), finite.sum(0).cpu())
            errors.index_add_(0, owners, change.square().sum(-1).cpu())
            if kind in ("scores", "probabilities"):
                self._rows_of_scores += len(owners)
                kls.index_add_(0, owners, kl_terms(wanted, found).sum(-1).cpu())
        self._kls += kls.tolist()
        self._errors += errors.tolist()
        if kind == "embeddings":
            vectors = torch.stack([_vectors(outputs, counted) for outputs in (original, student)])
            self._vectors.append(vectors[:, : max(0, MOST_NEIGHBOURS - len(self._cosines))])
            self._cosines += F.cosine_similarity(*vectors.double(), dim=-1).tolist()
        return self

    def merge(self, other: "OutputComparison") -> None:
        """Add the sums of the comparison of another process."""
        for sums in ("rows", "_unchanged", "_rows_of_scores", "_squares", "_kls", "_errors", "_cosines", "_vectors"):
            setattr(self, sums, getattr(self, sums) + getattr(other, sums))
        self.largest_change = float(np.maximum(self.largest_change, other.largest_change))  # with NaN, not as max
        self.largest_output = max(self.largest_output, other.largest_output)
        for count, total in other._columns.values():
            self._add_columns(count, total)

    def _add_columns(self, count: int, total: Tensor) -> None:
        before, sum_before = self._columns.get(len(total), (0, torch.zeros_like(total)))
        self._columns[len(total)] = before + count, sum_before + total

    @property
    def agreement(self) -> float | None:
        """The share of predictions whose largest score stays where it is; None without scores of classes."""
        return self._unchanged / self.rows if self._are_scores else None

    def record(self, output: str = "") -> Distance:
        """The distance of the output of this name."""
        return Distance(
            output,
            self.rows,
            self.kl,
            self.agreement,
            self.largest_change,
            self.largest_output,
            self.relative_error,
            self.embedding,
        )

    @property
    def embedding(self) -> dict[str, float]:
        """Measures of the distance of embeddings, by samples; empty for other outputs.

        "cosine" is the mean cosine of a sample's two embeddings, "least_cosine" the least. "same_neighbour" is the
        share of samples whose nearest other sample by cosine stays the nearest, among the first `MOST_NEIGHBOURS`. With
        fewer than three samples it is left out. Of equally near samples any is the nearest.
        """
        if not self._cosines:
            return {}
        cosines = torch.tensor(self._cosines, dtype=torch.float64)
        found = {"cosine": cosines.mean().item(), "least_cosine": cosines.min().item()}
        units = F.normalize(torch.cat(self._vectors, 1)[:, :MOST_NEIGHBOURS].double(), dim=-1)
        if units.shape[1] > 2:
            original, student = ((each @ each.T).fill_diagonal_(-math.inf) for each in units)
            of_chosen = original.gather(1, student.argmax(1, keepdim=True))
            found["same_neighbour"] = (of_chosen >= original.amax(1, keepdim=True) - _TIE).double().mean().item()
        return found

    @property
    def kl(self) -> float | None:
        """The mean over predictions of KL(original ‖ student), in nats; None unless all rows are scores of classes."""
        return sum(self._kls) / self.rows if self._are_scores else None

    @property
    def relative_error(self) -> float:
        """Σ(student − original)² / Σ(original − its mean)²: a share of squares, with a mean for each column.

        If an output does not vary, as with a single row, its error is relative to Σ original².
        """
        error = sum(self._errors)
        if not self._scale:  # the original is 0 everywhere, or NaN
            return error if math.isnan(error) else float(error > 0)
        return error / self._scale

    @property
    def variance(self) -> float:
        """The sum of the original's variances in each column; if it does not vary, its mean square."""
        return self._scale / self.rows

    @property
    def _scale(self) -> float:
        varying = self._squares - sum((total.square().sum() / count).item() for count, total in self._columns.values())
        return varying if varying > _VARIES * self._squares else self._squares

    @property
    def gaps(self) -> tuple[float, ...]:
        """Each sample's part of the KL, or of an output without scores of classes its part of the relative error."""
        terms, whole = (self._kls, self.rows) if self._are_scores else (self._errors, self._scale)
        return tuple(term / (whole or 1.0) for term in terms)

    @property
    def _are_scores(self) -> bool:
        return 0 < self._rows_of_scores == self.rows


def _vectors(output: Tensor, counted: Tensor | None) -> Tensor:
    """(samples, columns) float32 on the CPU: the mean over a sample's positions; a sample without one is left out."""
    if counted is None:
        rows = list(output.reshape(len(output), -1, output.shape[-1]))
    else:
        rows = [sample[kept] for sample, kept in zip(output, counted, strict=True)]
    means = [row.float().mean(0).cpu() for row in rows if len(row)]
    return torch.stack(means) if means else torch.empty(0, output.shape[-1])


def difference(output: Tensor, other: Tensor) -> Tensor:
    """`output - other`, with 0 where both are the same infinity, which models give for impossible classes."""
    return torch.where(output == other, 0.0, output - other)


def same_classes(output: Tensor, other: Tensor) -> Tensor:
    """The mask (...) of rows of (..., classes) without NaN in which both have the largest score at the same class."""
    (largest, classes), (other_largest, other_classes) = output.max(-1), other.max(-1)
    return (classes == other_classes) & ~largest.isnan() & ~other_largest.isnan()  # the largest of a NaN is NaN


def kl_terms(original: Tensor, student: Tensor) -> Tensor:
    """p·log(p/q) + q - p of every class, (..., classes), from logits: the sum over all classes is Σ p·log(p/q).

    No term is negative. The terms p·log(p/q) cancel: of two networks close to the original, the nearer one could look
    farther.
    """
    expected, given = F.log_softmax(original, dim=-1), F.log_softmax(student, dim=-1)
    p, q, ratio = expected.exp(), given.exp(), expected - given
    rise = torch.where(ratio.abs() < 1, p * torch.expm1(-ratio.clamp(-1, 1)), q - p)
    return p * ratio.masked_fill(expected == -math.inf, 0.0) + rise


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
    def shares(self) -> dict[str, float]:
        """{gate: the share of its outputs that are not zero}, of the gates that ran."""
        return {name: self.live[name] / count for name, count in self.outputs.items() if count}
