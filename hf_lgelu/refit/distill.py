"""The rung "distill": the whole converted network is moved towards the original's outputs, all layers together.

All parameters move except those of embeddings. The loss needs no labels. It is the KL to the original, or, for outputs
that are not class scores, the squared error of each column over its variance. For embeddings the cosine is added. The
result is the best state on the inputs that choose. Where no state is better than the start, a lower rate is tried.

A map is y = W(x - x̄) + b' with x̄ the mean of its inputs and b' = b + W·x̄. Adam's steps on W then leave the mean output
unchanged, however far the features are from zero. Units that are always on have a mean of several times their spread; a
step on plain W would mostly change the constant.

Several processes take every step together. Each runs its part of the batch, and gradients and sums over rows are added
up. So the steps equal those of a single process, up to rounding.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from hf_lgelu.comparing.net_comparison import samples_at_once
from hf_lgelu.comparing.output_comparison import kl_terms
from hf_lgelu.models.copies import independent_copy
from hf_lgelu.networks.batches import Batch
from hf_lgelu.networks.outputs import QUERIES, SIDES, Compared, OutputReader, in_order_of
from hf_lgelu.networks.run import call_alike, forward_pre_hooks, run_example
from hf_lgelu.processes import main_decides, own_part, sum_gradients, summed
from hf_lgelu.refit.folds import FoldBatch, Folds, evenly
from hf_lgelu.refit.moments import widened
from hf_lgelu.refit.task import OutOfTimeError, Student, Task, progress_log

_STEPS = 200
_LOOKS = 8  # number of comparisons on the held-out inputs
_RATES = (0.003, 0.0003, 0.00003)  # a lower one is for cases where those before find nothing nearer
_OF_CONVOLUTIONS = 10  # the rate of convolutions' weights is multiplied by this
_FAR_FROM_DONE, _LONGER = 0.9, 3  # below this share of the loss at the first look, the steps are multiplied
_KEPT_VALUES = 2**26  # the most values of the original's outputs that are kept
_NO_SPREAD = 1e-12  # of the largest column's square: rounding, not information
_MOST_WATCHED = 16  # the most batches that judge a state
_WARMUP = 10
_CALIBRATED, _CALIBRATIONS = 64, 3  # samples, and how often they pass
_MOST_TAKEN = 0.9  # of a class's chance
_FEW_INPUTS = 32
_LEAST_SIZE = 1e-3  # assumed mean absolute value of a parameter that is (almost) zero


class Distill:
    """The rung that moves the whole nearest student, except its embeddings."""

    effort = "distill"

    def __init__(self, task: Task) -> None:
        self.task = task

    def make(self, best: Student | None, deadline: float) -> Student:
        """A copy of the nearest student, moved until `deadline` (of time.perf_counter()) at the latest."""
        best = cast(Student, best)  # the refit comes before
        task, config = self.task, self.task.config
        student = independent_copy(best.model)
        if not (names := moved_names(student)):
            return best
        # The best rung and the number of steps may differ from call to call.
        work = task.work(f"distill-{best.effort}-{config.distill_steps or 'default'}{'-bf16' * config.bf16}")
        if work.done:
            work.restore(0, student)
        else:
            left = task.seconds_until(deadline)
            if left <= 0:
                raise OutOfTimeError
            work.begin(student)
            task.tell(f"{self.effort}: steps on the whole network")
            distill(
                task.model,
                student,
                task.folds,
                config.outputs,
                config.box_channels,
                names=names,
                steps=config.distill_steps,
                bf16=config.bf16,
                max_seconds=None if left == math.inf else left,
            )
            if task.seconds_until(deadline) > 0:  # else the time ran out, and another call may have more time
                work.save(0, student, None)
        held_out, gaps = task.compare(student)
        return replace(best, model=student, held_out=held_out, gaps=gaps)


def calibrate(original: OutputReader, converted: OutputReader, folds: Folds, names: Sequence[str]) -> None:
    """Set the biases `names`, which end a detector whose scores a sigmoid reads, to the least loss.

    A fit by least squares draws scores to their mean, which is that of empty places. So the few places with an object
    would fall below the threshold. A class whose chance is d times too low gets log(d), in a step of Newton's method
    for the exponent: a rare class gets its whole correction at once.
    """
    batches = evenly(folds.fitted, -(-_CALIBRATED // len(folds.first)))
    seen = [(share, batch := share.part.load(), original(batch.inputs)) for share in map(Share.of, batches)]
    with _learning(converted.model, names) as parameters, torch.enable_grad():
        biases = [*parameters.values()]
        for _ in range(_CALIBRATIONS):
            found = [torch.zeros_like(bias) for bias in 2 * biases]  # first and second derivatives
            for share, batch, reference in seen:
                loss = output_loss(reference, converted, batch, share.weight)
                slopes = torch.autograd.grad(loss, biases, create_graph=True, materialize_grads=True)
                total = torch.cat([slope.flatten() for slope in slopes]).sum()
                bends = torch.autograd.grad(total, biases, materialize_grads=True)
                found = [so_far + part.detach() for so_far, part in zip(found, (*slopes, *bends), strict=True)]
            found = list(map(summed, found))
            for bias, slope, bend in zip(biases, found[: len(biases)], found[len(biases) :], strict=True):
                bias.data += torch.log1p((-slope / bend).clamp(min=-_MOST_TAKEN)).where(bend > 0, 0.0)


def moved_names(model: nn.Module) -> list[str]:
    """The names of the parameters that steps move: all but embeddings, of which the inputs reach few rows."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    parameters = model.named_parameters()
    return [name for name, value in parameters if value.is_floating_point() and id(value) not in embeddings]


def distill(
    original: nn.Module,
    converted: nn.Module,
    folds: Folds,
    outputs: Sequence[str] | None = None,
    box_channels: int | None = None,
    *,
    names: Sequence[str],
    steps: int | None = None,
    bf16: bool = False,
    max_seconds: float | None = None,
) -> tuple[float, float]:
    """(the mean loss before, the least mean loss) of Adam on parameters of `converted`, on the samples that choose.

    Changes `converted` in place, if that brings it nearer to the original. The same inputs give the same steps, unless
    the time runs out.

    Args:
        original: the network whose outputs are the aim.
        converted: the network that is moved, in eval mode throughout.
        folds: the data; steps use every fold, and the samples that choose only judge.
        outputs: names of the outputs that count.
        box_channels: the leading channels of a detector's maps that are boxes.
        names: the parameters that are moved.
        steps: the number of steps, of one batch each; by default 200, or 600 where the first quarter of them takes a
            tenth of the loss away.
        bf16: run the steps under autocast, with products in bfloat16, and judge without autocast. A bfloat16 network is
            both moved and judged under autocast.
        max_seconds: a limit on the time.
    """
    started = time.perf_counter()

    def time_share() -> float:
        return 0.0 if max_seconds is None else main_decides((time.perf_counter() - started) / max_seconds)

    # A step of a thousandth of a weight is below the precision of bfloat16: it is taken on a copy in float32.
    is_narrow = any(converted.get_parameter(name).dtype.itemsize < 4 for name in names)
    moved = independent_copy(converted).float() if is_narrow else converted
    with _learning(moved, names) as parameters:
        read = partial(OutputReader, names=outputs, box_channels=box_channels)
        run = _Descent(read(original), read(moved), folds, parameters, bf16, is_narrow)
        best = run.start
        try:
            for rate in _RATES:
                if best is run.start:
                    best = run.nearest(rate, steps, time_share)
        finally:
            run.put(best)
            with torch.no_grad():
                for name in names if is_narrow else ():
                    converted.get_parameter(name).copy_(parameters[name])
    return run.start.loss, best.loss


@contextmanager
def _learning(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
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


class _Seen(NamedTuple):
    """A state of the parameters, and its loss on the watched inputs."""

    loss: float
    values: list[Tensor]


class Share(NamedTuple):
    """This process's part of a batch with `samples` samples that all processes run.

    A process without a sample of its own runs one with weight 0, because every process must take part in the sums.
    """

    part: FoldBatch
    weight: float
    samples: int

    @classmethod
    def of(cls, batch: FoldBatch) -> "Share":
        own = own_part(batch.numbers)
        part = replace(batch, numbers=tuple(own) or batch.numbers[:1])
        return cls(part, float(bool(own)), len(batch))


class _Descent:
    """Adam on some parameters, from their present values."""

    def __init__(
        self,
        original: OutputReader,
        converted: OutputReader,
        folds: Folds,
        parameters: Mapping[str, Tensor],
        bf16: bool,
        is_narrow: bool,
    ) -> None:
        self._original, self._converted = original, converted
        autocast = partial(torch.autocast, next(iter(parameters.values())).device.type, torch.bfloat16)
        self._stepping, self._judging = (partial(autocast, enabled=each) for each in (bf16 or is_narrow, is_narrow))
        most = samples_at_once(self._original, folds.fitted[-1].load())
        self._batches = [Share.of(piece) for batch in folds.fitted for piece in batch.pieces(most)]
        # A part with few rows may not show whether an output holds probabilities.
        first = next(folds.first.pieces(most)).load()
        self._are_logits = self._original(first.inputs).are_logits
        self._known: dict[int, Compared] = {}
        self._room = _KEPT_VALUES
        choosing = [piece for batch in folds.choosing for piece in batch.pieces(most)]
        self._watched = [Share.of(piece) for piece in evenly(choosing, _MOST_WATCHED)]
        self._parameters = list(parameters.values())
        with self._judging():
            loads = ((batch, batch.part.load()) for batch in self._watched)
            self._variances = column_variances(
                (self._reference(batch, loaded), loaded, batch.weight) for batch, loaded in loads
            )
            self._centred = centred_maps(converted.model, parameters.keys(), first)
        self.start = self._seen()

    @torch.no_grad()
    def put(self, seen: _Seen) -> None:
        """Set the parameters to a state."""
        for parameter, value in zip(self._parameters, seen.values, strict=True):
            parameter.copy_(value)

    def nearest(self, rate: float, steps: int | None, time_share: Callable[[], float]) -> _Seen:
        """The best state on the way of `steps` (as in `distill`) from the start, the start included.

        The steps end early where a quarter of them led to nothing nearer, or where `time_share`, the passed share of
        the time limit, is 1.
        """
        self.put(self.start)
        optimizer, best = CentredAdam(self._parameters, rate, self._centred), self.start
        count, begun = steps or _STEPS, time_share()
        every = max(1, count // _LOOKS)
        for step, number in enumerate(_order(len(self._batches))):
            share = time_share()
            is_over = share >= 1 or step == count
            if step and (is_over or step % every == 0):
                best = min(best, self._seen(), key=lambda seen: seen.loss)
                progress_log.info(f"distill: {step} of {count} steps, loss {self.start.loss:.4g} → {best.loss:.4g}")
                is_over |= best is self.start and 4 * step >= count
                goes_well = 4 * step <= count and best.loss < _FAR_FROM_DONE * self.start.loss
                if steps is None and count == _STEPS and goes_well:
                    count, every = _LONGER * count, _LONGER * every
            if is_over:
                break
            with torch.enable_grad(), self._stepping():
                loss = self._loss(self._batches[number])
            loss.backward()
            sum_gradients(self._parameters)
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
            optimizer.step(step, progress=max(step / count, (share - begun) / (1 - begun)))
        return best

    @torch.no_grad()
    def _seen(self) -> _Seen:
        """The present state."""
        with self._judging():
            losses = [self._loss(batch) * batch.samples for batch in self._watched]
        loss = float(summed(torch.stack(losses).sum())) / sum(batch.samples for batch in self._watched)
        return _Seen(loss, [parameter.detach().clone() for parameter in self._parameters])

    def _loss(self, batch: Share) -> Tensor:
        loaded = batch.part.load()
        reference = self._reference(batch, loaded)
        return output_loss(reference, self._converted, loaded, batch.weight, self._variances)

    @torch.no_grad()
    def _reference(self, batch: Share, loaded: Batch) -> Compared:
        """The outputs of the original for a batch; they are kept while the room lasts."""
        reference = self._known.get(id(batch))
        if reference is None:
            reference = self._original(loaded.inputs)
            reference = reference._replace(are_logits=self._are_logits)
            self._room -= sum(value.numel() for value in reference.tensors.values())
            if self._room >= 0:
                self._known[id(batch)] = reference
        return reference


def _order(count: int) -> Iterator[int]:
    """An endless stream of batch numbers, with every number once per turn; it is always the same stream."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from reversed(torch.randperm(count, generator=generator).tolist())


@dataclass(frozen=True)
class CentredMap:
    """A map's weight, (outputs, inputs) or `transposed`, its bias and the mean of its inputs."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    transposed: bool = False


class CentredAdam:
    """Adam on W and b' (see above), with the steps written into each map's weight and bias.

    The rates rise over the first steps, and fall to zero as a cosine.
    """

    def __init__(self, parameters: Sequence[Tensor], rate: float, maps: Sequence[CentredMap]) -> None:
        """`rate` is the highest learning rate of each parameter, as a share of the parameter's mean absolute value.

        Many inputs may all move an output the same way. So the rate of a map with n > 32 inputs is multiplied by
        √(32/n). For a convolution n is the number of channels, whatever the kernel, and the rate is ten times that.
        """
        transposed = {id(centred.weight) for centred in maps if centred.transposed}
        self._rates = []
        for value in parameters:
            inputs = 1 if value.ndim < 2 else len(value) if id(value) in transposed else value.shape[1]
            higher = _OF_CONVOLUTIONS if value.ndim > 2 else 1
            size = max(value.detach().abs().mean().item(), _LEAST_SIZE)
            self._rates.append(higher * rate * size * min(1.0, math.sqrt(_FEW_INPUTS / inputs)))
        self._adam = torch.optim.Adam([{"params": [value]} for value in parameters], betas=(0.9, 0.95))
        self._maps = maps

    @torch.no_grad()
    def step(self, done: int, progress: float) -> None:
        """Take a step and clear the gradients. `done` counts earlier steps; `progress` is the share of the descent."""
        share = min(1.0, (done + 1) / _WARMUP) * 0.5 * (1 + math.cos(math.pi * progress))
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        # A map without a gradient was reached by no input.
        maps = [centred for centred in self._maps if centred.bias.grad is not None]
        before = [centred.weight.detach().clone() for centred in maps]
        for centred in maps:
            moved = torch.outer(centred.bias.grad, centred.mean)
            centred.weight.grad.sub_(moved.mT if centred.transposed else moved)
        self._adam.step()
        for centred, old in zip(maps, before, strict=True):
            change = centred.weight - old
            centred.bias.sub_((change.mT if centred.transposed else change) @ centred.mean)
        self._adam.zero_grad()


@torch.no_grad()
def centred_maps(model: nn.Module, names: Collection[str], batch: Batch) -> list[CentredMap]:
    """The moved linear layers that have a bias, each with the mean of its inputs over a batch, 0 without an input."""
    modules = [
        module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D) and {f"{name}.weight", f"{name}.bias"} <= set(names)
    ]
    means: dict[nn.Module, Tensor] = {}

    def see(module: nn.Module, inputs: tuple) -> None:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        total = rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32))
        means[module] = total / max(1, len(rows))  # an expert may get no token

    with forward_pre_hooks(modules, see):
        run_example(model, batch.inputs)
    maps = []
    for module in modules:
        is_transposed = type(module) is Conv1D
        kept = widened(module.weight)
        mean = means.get(module, kept.new_zeros(kept.shape[0 if is_transposed else 1]))
        maps.append(CentredMap(module.weight, module.bias, mean.to(kept.dtype), is_transposed))
    return maps


def output_loss(
    reference: Compared,
    converted: OutputReader,
    batch: Batch,
    weight: float = 1.0,
    variances: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The distance of a network's outputs from the original's, without padding, summed over the outputs: a scalar.

    For a first output of class scores, the distance is the mean KL(original ‖ converted). For other outputs it is the
    mean square error of a column over the column's variance, averaged over columns. `variances` gives the variances (by
    default of this batch). For embeddings, 1 − cos of each sample's mean over positions is added. A detector's
    scores that a sigmoid reads have a KL for each class. A box's error counts four times, with the original's
    certainty. Both are divided by the sum of the certainties. With several processes, the result is this process's
    part of the mean over all rows, and its rows count with its `weight`.
    """
    given = in_order_of(reference, converted(batch.inputs, call_alike))
    variances = column_variances([(reference, batch, weight)]) if variances is None else variances
    total = torch.zeros((), device=next(converted.model.parameters()).device)
    certainty = reference.certainty()
    for number, (name, expected) in enumerate(reference.tensors.items()):
        pair = (expected, given.tensors[name])
        if number == 0 and reference.are_embeddings:
            counted = batch.counted(expected, name, channels_last=True)
            cosines = F.cosine_similarity(*(_pooled(value.float(), counted) for value in pair), dim=-1)
            total = total + (1 - cosines).sum() / summed(total.new_tensor(weight * len(cosines)))
        wanted, found = (batch.without_padding(value, name, -1).float() for value in pair)
        shares = wanted.new_ones(len(wanted))
        if certainty is not None and name in QUERIES:
            shares = batch.without_padding(certainty[..., None], name, -1)[:, 0]
        rows = summed(weight * shares.sum()).clamp(min=1)
        if number == 0 and (reference.are_logits or certainty is not None):
            if not reference.are_logits:  # a sigmoid of z is a softmax of z and 0
                wanted, found = (torch.stack([scores, torch.zeros_like(scores)], -1) for scores in (wanted, found))
            total = total + kl_terms(wanted, found).sum() / rows
        else:
            varies = variances[name] > 0
            error = (shares @ (found - wanted).square())[varies] / variances[name][varies].to(found.dtype)
            sides = SIDES if certainty is not None and name in QUERIES else 1
            total = total + sides * error.sum() / rows / max(int(varies.sum()), 1)
    return weight * total


def column_variances(batches: Iterable[tuple[Compared, Batch, float]]) -> dict[str, Tensor]:
    """{output: variance of each column over the rows of all batches and processes}, 0 for a column that does not vary.

    `batches` are (outputs of the original, batch, weight of its rows). Class scores have no variance here.
    """
    sums: dict[str, Tensor] = {}
    for reference, batch, weight in batches:
        for number, (name, value) in enumerate(reference.tensors.items()):
            if number == 0 and reference.are_logits:
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
