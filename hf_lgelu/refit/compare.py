"""The whole networks beside each other: original, direct swap and refit, on inputs that nothing was fitted on."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_lgelu.models.channels import ChannelAxes
from hf_lgelu.models.comparison import are_probabilities, classes_last, difference, kl_terms
from hf_lgelu.models.example_run import run_example
from hf_lgelu.models.outputs import IGNORED_LABEL, are_class_scores, is_causal, task_outputs
from hf_lgelu.models.substitution import TemporaryRelu
from hf_lgelu.refit.batches import TRIED, Batch
from hf_lgelu.refit.processes import each_has
from hf_lgelu.refit.report import Evaluation, NetChange
from hf_lgelu.refit.samples import cut_batches

_SCORES_AT_ONCE = 2**26  # values of the outputs: 256 MiB, of which a comparison or a loss holds several copies
_SLICE = 2**21  # numbers that are looked at together, in float64
_QUERIES = ("logits", "pred_boxes")
_NETWORKS = ("original", "direct", "refitted")
_OF_UNITS = ("kl_of_units", "error_of_units")
_LARGEST = "max_change"  # of which the largest of two batches counts, where of the others it is the sum

Sums = dict[Any, Any]
"""What a batch's numbers are made of: {what: number}, {(network, what): number} and so on."""


def evaluate_conversion(
    original: nn.Module,
    converted: nn.Module,
    substitution: TemporaryRelu,
    batches: Iterable[Batch],
    outputs: Sequence[str] | None = None,
) -> Evaluation | None:
    """Run the three networks on every batch; None if no process has one with a prediction that is no padding.

    Args:
        original: the given model.
        converted: the refitted one.
        substitution: puts ReLU at the original's gates: the direct swap.
        batches: of this process; every process must call.
        outputs: names of those that count, as in `hf_lgelu.models.outputs.task_outputs`.
    """
    sums = conversion_sums(original, converted, substitution, batches, outputs)
    return None if sums is None else evaluation_of(sums)


def conversion_sums(
    original: nn.Module,
    converted: nn.Module,
    substitution: TemporaryRelu,
    batches: Iterable[Batch],
    outputs: Sequence[str] | None = None,
) -> Sums | None:
    """What the numbers of `evaluate_conversion` are made of, over the batches of all processes."""
    found: list[Sums] = []
    for batch in _affordable(original, batches, outputs):
        reference = compared_outputs(original, batch.inputs, outputs)
        with substitution.applied():
            direct = compared_outputs(original, batch.inputs, outputs)
        others = [direct, compared_outputs(converted, batch.inputs, outputs)]
        networks = [reference, *(in_order_of(reference, other) for other in others)]
        sums = batch_sums([network.tensors for network in networks], batch, original)
        if sums["rows"]:
            sums["logits"] = sums["rows"] * reference.are_logits
            found = [functools.reduce(add_sums, [*found, sums])]
    found = [sums for part in each_has(found) for sums in part]
    return functools.reduce(add_sums, found) if found else None


def _affordable(model: nn.Module, batches: Iterable[Batch], outputs: Sequence[str] | None) -> Iterator[Batch]:
    """The batches, in pieces of as many units as `units_at_once` says."""
    sizes, most = None, 1
    for batch in batches:
        of_batch = {name: value.shape[1:] for name, value in batch.tensors.items()}
        if of_batch != sizes:  # the longest come last
            sizes, most = of_batch, units_at_once(model, batch, outputs)
        yield from cut_batches([batch], most)


@torch.no_grad()
def units_at_once(model: nn.Module, batch: Batch, outputs: Sequence[str] | None = None) -> int:
    """Of how many units like these the outputs are held at once: of large vocabularies they need more memory than all
    else, and several networks' are compared."""
    few = batch[:TRIED]
    scores = sum(value.numel() for value in compared_outputs(model, few.inputs, outputs).tensors.values())
    return max(1, _SCORES_AT_ONCE * len(few) // max(1, scores))


class Compared(NamedTuple):
    """Outputs by name, the one that is compared closest first; whether that one holds class scores.

    `queries_are_chosen` of a detector that ranks places of a picture and gives a box for the best ones, in the order of
    their rank: another network's n-th box may be of another place.
    """

    tensors: dict[str, Tensor]
    are_logits: bool
    queries_are_chosen: bool = False


def compared_outputs(
    model: nn.Module,
    inputs: Any,
    outputs: Sequence[str] | None = None,
    call: Callable[[nn.Module, Any], Any] = run_example,
) -> Compared:
    """What of a model's output is compared: that of `task_outputs`, the last axis of each being its classes.

    Of maps they are moved there from the axis on which the layer before has them (`class_axes`); one number a unit (N,)
    becomes (N, 1). Probabilities are no scores (`are_probabilities`). `call` may leave gradients.
    Raises ValueError where there is no tensor, or the first is one number for all units.
    """
    whole = call(model, inputs)
    found = task_outputs(whole, outputs)
    name = next(iter(found), "")
    if not found or found[name].ndim == 0:
        raise ValueError(
            f"{type(model).__name__} gives {'one number for all inputs' if found else 'no tensor'}: networks "
            "are compared by an output whose leading axis counts the inputs. Convert the part that gives one, or name "
            "another output (outputs=)"
        )
    are_logits = found[name].ndim > 1 and _exclude_each_other(getattr(model, "config", None), name, found)
    axes = class_axes(model, inputs, found)
    tensors = {name: classes_last(value, axes.get(name)) for name, value in found.items() if value.ndim}
    are_logits = are_logits and tensors[name].shape[-1] > 1 and not are_probabilities(tensors[name].detach())
    chosen = isinstance(whole, Mapping) and "enc_topk_logits" in whole and {*_QUERIES} <= found.keys()
    return Compared(tensors, are_logits, chosen)


def _exclude_each_other(config: Any, name: str, found: Mapping[str, Tensor]) -> bool:
    """Whether the columns of an output are scores of classes of which one is right, so that softmax makes shares of
    them: the KL does not see a number that is added to all of them, which would move a sigmoid of each."""
    if not are_class_scores(name) or config is None or name != "logits":
        return are_class_scores(name)
    labels = getattr(config, "num_labels", None)
    if {*_QUERIES} <= found.keys() and labels is not None:
        return found[name].shape[-1] == labels + 1  # a softmax has one more for a place where nothing is
    one_each = getattr(config, "problem_type", None) in ("regression", "multi_label_classification")
    return not one_each and labels != 1


def in_order_of(reference: Compared, other: Compared) -> Compared:
    """Where queries are chosen: for each of the reference's the other's that is nearest to it, in scores and box."""
    if not reference.queries_are_chosen:
        return other
    places = [
        torch.cat([network.tensors["logits"].sigmoid(), network.tensors["pred_boxes"]], -1).detach()
        for network in (reference, other)
    ]
    nearest = torch.cdist(*places, p=1).argmin(-1)[..., None]
    tensors = {
        name: value.gather(1, nearest.expand(-1, -1, value.shape[-1])) if name in _QUERIES else value
        for name, value in other.tensors.items()
    }
    return other._replace(tensors=tensors)


def class_axes(model: nn.Module, inputs: Any, outputs: Mapping[str, Tensor]) -> dict[str, int]:
    """{name: the axis that counts classes} of outputs that are maps, where it can be followed to the layer before.

    1 behind a convolution, as in torch's losses, the last behind a linear layer. Of three axes only where the output is
    one tensor: those with names have their classes last. Found out once for each model.
    """
    maps = {name for name, value in outputs.items() if value.ndim > (2 if name == "" else 3)}
    known = _CLASS_AXES.setdefault(model, {})
    if not maps <= known.keys():
        axes = ChannelAxes(model)
        with axes.watching():
            found = task_outputs(run_example(model, inputs), list(outputs))
        known |= {name: axes.followed(found[name]) for name in maps}
    return {name: axis for name in maps if (axis := known[name])}


_CLASS_AXES: WeakKeyDictionary[nn.Module, dict[str, int | None]] = WeakKeyDictionary()


def batch_sums(networks: Sequence[Mapping[str, Tensor]], batch: Batch, model: nn.Module) -> Sums:
    """Of one batch, from the outputs of the three networks."""
    first = next(iter(networks[0]))
    sums: Sums = {"units": len(batch)}
    for name in networks[0]:
        counted = batch.counted(networks[0][name], name, channels_last=True)
        values = [network[name] for network in networks]
        rows = [value.reshape(-1, value.shape[-1]) if counted is None else value[counted] for value in values]
        units = _unit_of_rows(values[0], counted)
        if name == first:
            sums["rows"] = len(rows[0])
            for network, value in zip(_NETWORKS, values, strict=True):
                scores = metric_sums(value, batch.labels, counted, is_causal(model))
                sums |= {(network, what): score for what, score in scores.items()}
        size = max(1, _SLICE // values[0].shape[-1])
        for owners, *part in zip(units.split(size), *(value.split(size) for value in rows), strict=True):
            reference, *others = map(_double, part)
            new = _spread_sums(name, reference)
            for network, other in zip(_NETWORKS[1:], others, strict=True):
                new[network, "error", name] = difference(other, reference).square().sum().item()
                if name == first:
                    changes = change_sums(reference, other, owners.to(reference.device), len(values[0]))
                    new |= {(network, what): change for what, change in changes.items()}
            sums = add_sums(sums, new)
    # Of several batches these stand behind each other, where all else is added up.
    return sums | {key: tuple(value.tolist()) for key, value in sums.items() if key[-1] in _OF_UNITS}


def _unit_of_rows(output: Tensor, counted: Tensor | None) -> Tensor:
    """Of which of a batch's units each prediction is."""
    leading = output.shape[:-1]
    numbers = torch.arange(len(output), device=output.device)
    numbers = numbers.reshape(-1, *[1] * (len(leading) - 1)).expand(leading)
    return numbers.reshape(-1) if counted is None else numbers[counted]


def _spread_sums(name: str, rows: Tensor) -> Sums:
    """What ‖y − ȳ‖² of an output is made of; the mean is one over rows of as many columns."""
    rows = rows.masked_fill(rows.isinf(), 0.0)
    return {
        ("square", name): rows.square().sum().item(),
        ("total", name, rows.shape[-1]): rows.sum(0).cpu(),
        ("count", name, rows.shape[-1]): len(rows),
    }


def change_sums(reference: Tensor, output: Tensor, units: Tensor | None = None, count: int = 1) -> Sums:
    """How far `output` (rows, classes) is from `reference`, both float64, added up over rows.

    Two of them also over the rows of each unit, (count,): `units` (rows,) says of which one each row is, None of one.
    """
    kl = kl_terms(reference, output)
    change = difference(output, reference).abs()
    units = torch.zeros(len(output), dtype=torch.long, device=output.device) if units is None else units
    by_unit = (value.new_zeros(count).index_add(0, units, value.sum(-1)).cpu() for value in (kl, change.square()))
    return {
        "kl": kl.sum().item(),
        "unchanged": int((reference.argmax(-1) == output.argmax(-1)).sum()),
        _LARGEST: change.max().item() if change.numel() else 0.0,
        **dict(zip(_OF_UNITS, by_unit, strict=True)),
    }


def unit_gaps(sums: Sums) -> tuple[float, ...]:
    """How far the converted network is from the original on each unit: what the KL, of outputs that are no class scores
    the error, is the sum of."""
    return sums[_NETWORKS[-1], _OF_UNITS[0 if _are_all_logits(sums) else 1]]


def _are_all_logits(sums: Sums) -> bool:
    return sums["logits"] == sums["rows"]


def add_sums(one: Sums, other: Sums) -> Sums:
    """Sums over the rows of both."""
    total = dict(one)
    for what, value in other.items():
        if what not in total:
            total[what] = value
        else:
            total[what] = _larger(total[what], value) if _LARGEST in (what, what[-1]) else total[what] + value
    return total


def _larger(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)  # max keeps what it has before a NaN


def metric_sums(output: Tensor, labels: Tensor | None, counted: Tensor | None, is_causal: bool) -> Sums:
    """What the score of one batch is made of; all zero without labels.

    Args:
        output: logits (…, classes); a single column is no choice between classes, and has no score.
        labels: (…) integers of any width; −100 does not count. Of a causal language model the tokens themselves, not
            shifted. Labels of another shape or kind are none.
        counted: (…) bool, which predictions are no padding; None for all.
        is_causal: whether the model predicts the next token of each, as a causal language model does.
    """
    sums: Sums = {"correct": 0, "labelled": 0, "loss": 0.0, "predicted": 0}
    if labels is None or labels.is_floating_point() or not labels_fit(labels, output) or output.shape[-1] < 2:
        return sums
    labels = labels.to(output.device, torch.long)
    if counted is not None:
        labels = labels.masked_fill(~counted, IGNORED_LABEL)
        if is_causal:  # nor what is predicted from padding: the first token behind it
            labels[..., 1:] = labels[..., 1:].masked_fill(~counted[..., :-1], IGNORED_LABEL)
    if not is_causal:
        valid = labels != IGNORED_LABEL
        return sums | {"correct": int((output.argmax(-1) == labels)[valid].sum()), "labelled": int(valid.sum())}
    for logits, tokens in zip(output, labels, strict=True):  # a sequence at a time: vocabularies are large
        following = tokens[1:]
        valid = int((following != IGNORED_LABEL).sum())
        if valid:
            summed = F.cross_entropy(logits[:-1].float(), following, ignore_index=IGNORED_LABEL, reduction="none")
            sums["loss"] += summed.sum(dtype=torch.float64 if summed.device.type != "mps" else None).item()
            sums["predicted"] += valid
    return sums


def labels_fit(labels: Tensor, output: Tensor) -> bool:
    """Whether there is a label for each row of scores."""
    return labels.shape == output.shape[:-1]


def metric_values(sums: Sums) -> dict[str, float]:
    """{"accuracy": …} or {"perplexity": …}, empty without labels."""
    found = {}
    if sums["labelled"]:
        found["accuracy"] = sums["correct"] / sums["labelled"]
    if sums["predicted"]:
        found["perplexity"] = math.exp(min(sums["loss"] / sums["predicted"], 700.0))
    return found


def evaluation_of(sums: Sums) -> Evaluation:
    """What sums over all batches say of the networks."""
    rows, names = sums["rows"], [what[1] for what in sums if what[0] == "square"]
    changes = []
    for network in _NETWORKS[1:]:
        errors = {name: _relative(sums[network, "error", name], _spread(sums, name)) for name in names}
        kl = sums[network, "kl"] / rows if _are_all_logits(sums) else None
        agreement, largest = sums[network, "unchanged"] / rows, sums[network, _LARGEST]
        scores = metric_values(_of(sums, network))
        changes.append(NetChange(kl, agreement, largest, errors[names[0]], scores, errors if len(names) > 1 else {}))
    return Evaluation(rows, sums["units"], metric_values(_of(sums, "original")), *changes)


def _of(sums: Sums, network: str) -> Sums:
    return {what[1]: value for what, value in sums.items() if what[0] == network}


def _spread(sums: Sums, name: str) -> float:
    means = (
        (total.square().sum() / sums["count", name, what[2]]).item()
        for what, total in sums.items()
        if what[:2] == ("total", name)
    )
    return sums["square", name] - sum(means)


def _relative(error: float, spread: float) -> float:
    if math.isnan(error):
        return math.nan
    return error / spread if spread > 0 else float(error > 0)


def _double(rows: Tensor) -> Tensor:
    return (rows.cpu() if rows.device.type == "mps" else rows).double()
