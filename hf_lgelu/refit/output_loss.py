"""A loss near the distance of a network's outputs from the original's, and a detector's last biases at its least."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_lgelu.comparing.comparison import kl_terms
from hf_lgelu.networks.batches import Batch
from hf_lgelu.networks.outputs import BOXES, SCORES, SIDES, OutputReader, Outputs, as_of_softmax, with_nearest_queries
from hf_lgelu.networks.run import call_alike
from hf_lgelu.processes import summed
from hf_lgelu.refit.folds import Folds, evenly

_NO_SPREAD = 1e-12  # of the largest column's square: rounding, not information
_CALIBRATED, _CALIBRATIONS = 64, 3  # samples, and how often they pass
_MOST_TAKEN = 0.9  # of a class's chance


@contextmanager
def learning(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """The parameters of these names; only they need gradients inside the block, and no gradient is left after it."""
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in wanted:
        parameter.requires_grad_(False)
    try:
        yield {name: model.get_parameter(name).requires_grad_(True) for name in names}
    finally:
        for parameter, was_needed in wanted:
            parameter.grad = None
            parameter.requires_grad_(was_needed)


def output_loss(
    original: Outputs,
    student: OutputReader,
    batch: Batch,
    weight: float = 1.0,
    variances: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The distance of a network's outputs from the original's, without padding, summed over the outputs: a scalar.

    For class scores, the distance is the mean KL(original ‖ student). For other outputs it is the mean square error
    of a column over the column's variance, averaged over columns. `variances` gives the variances (by default of this
    batch). For embeddings, 1 − cos of each sample's mean over positions is added. A detector's scores that a sigmoid
    reads have a KL for each class. A box's error counts four times, with the original's certainty. Both are divided by
    the sum of the certainties. With several processes, the result is this process's part of the mean over all rows,
    and its rows count with its `weight`.
    """
    given = with_nearest_queries(original, student(batch.inputs, call_alike))
    variances = column_variances([(original, batch, weight)]) if variances is None else variances
    total = torch.zeros((), device=next(student.model.parameters()).device)
    for name, expected in original.tensors.items():
        pair = [original.scores(name, value) for value in (expected, given.tensors[name])]
        if original.kinds[name] == "embeddings":
            counted = batch.counted(expected, name, channels_last=True)
            cosines = F.cosine_similarity(*(_pooled(value.float(), counted) for value in pair), dim=-1)
            total = total + (1 - cosines).sum() / summed(total.new_tensor(weight * len(cosines)))
        wanted, found = (batch.without_padding(value, name, -1).float() for value in pair)
        shares = wanted.new_ones(len(wanted))
        is_of_places = original.is_detector and name in (SCORES, BOXES)
        if is_of_places:
            shares = batch.without_padding(original.certainty()[..., None], name, -1)[:, 0]
        rows = summed(weight * shares.sum()).clamp(min=1)
        has_classes = original.has_classes(name)
        if has_classes or (is_of_places and name == SCORES):
            if not has_classes:
                wanted, found = map(as_of_softmax, (wanted, found))
            total = total + kl_terms(wanted, found).sum() / rows
        else:
            varies = variances[name] > 0
            error = (shares @ (found - wanted).square())[varies] / variances[name][varies].to(found.dtype)
            sides = SIDES if is_of_places else 1
            total = total + sides * error.sum() / rows / max(int(varies.sum()), 1)
    return weight * total


def column_variances(batches: Iterable[tuple[Outputs, Batch, float]]) -> dict[str, Tensor]:
    """{output: variance of each column over the rows of all batches and processes}, 0 for a column that does not vary.

    `batches` are (outputs of the original, batch, weight of its rows). Class scores have no variance here.
    """
    sums: dict[str, Tensor] = {}
    for original, batch, weight in batches:
        for name, value in original.tensors.items():
            if original.has_classes(name):
                continue
            rows = batch.without_padding(value, name, -1).double()
            seen = weight * torch.stack([torch.ones_like(rows).sum(0), rows.sum(0), rows.square().sum(0)])
            sums[name] = sums.get(name, 0) + seen
    variances = {}
    for name, total in sums.items():
        count, first, second = summed(total)
        variance = second / count - (first / count).square()
        variances[name] = variance.where(variance > _NO_SPREAD * (second / count).max(), 0.0)
    return variances


def _pooled(states: Tensor, counted: Tensor | None) -> Tensor:
    """(samples, columns): the sum over the positions that count, whose direction is that of the mean."""
    kept = states if counted is None else states * counted[..., None]
    return kept.reshape(len(kept), -1, kept.shape[-1]).sum(1)


def fit_last_biases(original: OutputReader, student: OutputReader, folds: Folds, names: Sequence[str]) -> None:
    """Set the biases `names`, which end a detector whose scores a sigmoid reads, to the least loss.

    A fit by least squares draws scores to their mean, which is that of empty places. So the few places with an object
    would fall below the threshold. A class whose chance is d times too low gets log(d), in a step of Newton's method
    for the exponent: a rare class gets its whole correction at once.
    """
    batches = evenly(folds.fitted, -(-_CALIBRATED // len(folds.first)))
    parts = ((part.load(), weight) for part, weight in (batch.share() for batch in batches))
    seen = [(batch, weight, original(batch.inputs)) for batch, weight in parts]
    with learning(student.model, names) as parameters, torch.enable_grad():
        biases = [*parameters.values()]
        for _ in range(_CALIBRATIONS):
            found = [torch.zeros_like(bias) for bias in 2 * biases]  # first and second derivatives
            for batch, weight, outputs in seen:
                loss = output_loss(outputs, student, batch, weight)
                slopes = torch.autograd.grad(loss, biases, create_graph=True, materialize_grads=True)
                total = torch.cat([slope.flatten() for slope in slopes]).sum()
                bends = torch.autograd.grad(total, biases, materialize_grads=True)
                found = [so_far + part.detach() for so_far, part in zip(found, (*slopes, *bends), strict=True)]
            found = list(map(summed, found))
            for bias, slope, bend in zip(biases, found[: len(biases)], found[len(biases) :], strict=True):
                bias.data += torch.log1p((-slope / bend).clamp(min=-_MOST_TAKEN)).where(bend > 0, 0.0)
