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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_lgelu.comparing.comparison import samples_at_once
from hf_lgelu.models.copies import independent_copy
from hf_lgelu.networks.batches import Batch
from hf_lgelu.networks.outputs import OutputReader, Outputs
from hf_lgelu.networks.run import forward_pre_hooks, run_example
from hf_lgelu.processes import sum_gradients, summed
from hf_lgelu.refit.folds import FoldBatch, Folds, evenly, load_own
from hf_lgelu.refit.moments import widened
from hf_lgelu.refit.output_loss import column_variances, learning, output_loss
from hf_lgelu.refit.task import Student, Task, progress_log

_STEPS = 200
_LOOKS = 8  # number of comparisons on the held-out inputs
_RATES = (0.003, 0.0003, 0.00003)  # a lower one is for cases where those before find nothing nearer
_OF_CONVOLUTIONS = 10  # the rate of convolutions' weights is multiplied by this
_FAR_FROM_DONE, _LONGER = 0.9, 3  # below this share of the loss in the first quarter, the steps are multiplied
_KEPT_VALUES = 2**26  # the most values of the original's outputs that are kept
_MOST_WATCHED = 16  # the most batches that judge a state
_WARMUP = 10
_FEW_INPUTS = 32
_LEAST_SIZE = 1e-3  # assumed mean absolute value of a parameter that is (almost) zero


class Distill:
    """The rung that moves the whole nearest student, except its embeddings."""

    effort = "distill"

    def __init__(self, task: Task) -> None:
        self.task = task

    def make(self, best: Student | None) -> Student:
        """A moved copy of the nearest student."""
        best = cast(Student, best)  # the refit comes before
        task, config = self.task, self.task.config
        student = independent_copy(best.model)
        if not (names := moved_names(student)):
            return best
        task.tell(f"{self.effort}: steps on the whole network")
        distill(task.read, student, task.folds, names=names, steps=config.distill_steps, bf16=config.bf16)
        held_out, gaps = task.evaluate(student, load_own(task.folds.choosing))
        return replace(best, model=student, held_out=held_out, gaps=gaps)


def moved_names(model: nn.Module) -> list[str]:
    """The names of the parameters that steps move: all but embeddings, of which the inputs reach few rows."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    parameters = model.named_parameters()
    return [name for name, value in parameters if value.is_floating_point() and id(value) not in embeddings]


def distill(
    original: OutputReader,
    student: nn.Module,
    folds: Folds,
    *,
    names: Sequence[str],
    steps: int | None = None,
    bf16: bool = False,
) -> tuple[float, float]:
    """(the mean loss before, the least mean loss) of Adam on parameters of `student`, on the samples that choose.

    Changes `student` in place, if that brings it nearer to the original. The same inputs give the same steps.

    Args:
        original: reads the network whose outputs are the aim.
        student: the network that is moved, in eval mode throughout.
        folds: the data; steps use every fold, and the samples that choose only judge.
        names: the parameters that are moved.
        steps: the number of steps, of one batch each; by default 200, or 600 where the first quarter of them takes a
            tenth of the loss away.
        bf16: run the steps under autocast, with products in bfloat16, and judge without autocast. A bfloat16 network is
            both moved and judged under autocast.
    """
    # A step of a thousandth of a weight is below the precision of bfloat16: it is taken on a copy in float32.
    is_narrow = any(student.get_parameter(name).dtype.itemsize < 4 for name in names)
    moved = independent_copy(student).float() if is_narrow else student
    with learning(moved, names) as parameters:
        run = _Descent(original, original.of(moved), folds, parameters, bf16, is_narrow)
        best = run.start
        try:
            for rate in _RATES:
                if best is run.start:
                    best = run.nearest(rate, steps)
        finally:
            run.put(best)
            with torch.no_grad():
                for name in names if is_narrow else ():
                    student.get_parameter(name).copy_(parameters[name])
    return run.start.loss, best.loss


class _Seen(NamedTuple):
    """A state of the parameters, and its loss on the watched inputs."""

    loss: float
    values: list[Tensor]


class _Descent:
    """Adam on some parameters, from their present values."""

    def __init__(
        self,
        original: OutputReader,
        student: OutputReader,
        folds: Folds,
        parameters: Mapping[str, Tensor],
        bf16: bool,
        is_narrow: bool,
    ) -> None:
        self._original, self._student = original, student
        autocast = partial(torch.autocast, next(iter(parameters.values())).device.type, torch.bfloat16)
        self._stepping, self._judging = (partial(autocast, enabled=each) for each in (bf16 or is_narrow, is_narrow))
        most = samples_at_once(self._original, folds.fitted[-1].load())
        self._batches = [piece for batch in folds.fitted for piece in batch.pieces(most)]
        # A part with few rows may not show whether an output holds probabilities.
        first = next(folds.first.pieces(most)).load()
        self._kinds = self._original(first.inputs).kinds
        self._known: dict[int, Outputs] = {}
        self._room = _KEPT_VALUES
        choosing = [piece for batch in folds.choosing for piece in batch.pieces(most)]
        self._watched = evenly(choosing, _MOST_WATCHED)
        self._parameters = list(parameters.values())
        with self._judging():
            self._variances = column_variances(map(self._shared, self._watched))
            self._centred = centred_maps(student.model, parameters.keys(), first)
        self.start = self._seen()

    @torch.no_grad()
    def put(self, seen: _Seen) -> None:
        """Set the parameters to a state."""
        for parameter, value in zip(self._parameters, seen.values, strict=True):
            parameter.copy_(value)

    def nearest(self, rate: float, steps: int | None) -> _Seen:
        """The best state on the way of `steps` (as in `distill`) from the start, the start included.

        The steps end early where a quarter of them led to nothing nearer.
        """
        self.put(self.start)
        optimizer, best = CentredAdam(self._parameters, rate, self._centred), self.start
        count = steps or _STEPS
        every = max(1, count // _LOOKS)
        for step, number in enumerate(_order(len(self._batches))):
            is_over = step == count
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
            optimizer.step(step, progress=step / count)
        return best

    @torch.no_grad()
    def _seen(self) -> _Seen:
        """The present state."""
        with self._judging():
            losses = [self._loss(batch) * len(batch) for batch in self._watched]
        loss = float(summed(torch.stack(losses).sum())) / sum(map(len, self._watched))
        return _Seen(loss, [parameter.detach().clone() for parameter in self._parameters])

    def _loss(self, batch: FoldBatch) -> Tensor:
        outputs, loaded, weight = self._shared(batch)
        return output_loss(outputs, self._student, loaded, weight, self._variances)

    @torch.no_grad()
    def _shared(self, batch: FoldBatch) -> tuple[Outputs, Batch, float]:
        """(the original's outputs, this process's part, its weight); the outputs are kept while the room lasts."""
        part, weight = batch.share()
        loaded, outputs = part.load(), self._known.get(id(batch))
        if outputs is None:
            outputs = self._original(loaded.inputs)
            outputs = outputs._replace(kinds=self._kinds)
            self._room -= sum(value.numel() for value in outputs.tensors.values())
            if self._room >= 0:
                self._known[id(batch)] = outputs
        return outputs, loaded, weight


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
