"""Both maps of a block moved, not only the one behind the gate: some hundred steps of Adam on the block's own inputs.

The target is the ridge's: what the original has behind the block, less what reaches the sum beside it. Labels are not
needed, and memory is that of one block's inputs. What the steps do is kept only where rows that they did not see are
nearer to the target for it (block-wise reconstruction as in BRECQ, arXiv:2102.05426).

Several processes take every step together, each on those of the rows drawn that it has; gradients and sums are added
up, so that all get the same maps. Which rows are drawn hangs on who has which: one process alone draws others, just as
many.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.nn import functional as F

from hf_lgelu.models.dataflow.affine_operations import AffineOperation
from hf_lgelu.refit.centred import CentredAdam, CentredMap
from hf_lgelu.refit.moments import Moments, widened
from hf_lgelu.refit.processes import each_has, mean_of_rows, sum_gradients, summed_numbers
from hf_lgelu.refit.widen import Block

STEPS = 150
_ROWS_A_STEP = 1024
_RATE = 0.02
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class BlockRows:
    """Of one block: its inputs (n, features) in the converted network, and what its output should be (n, outputs)."""

    inputs: Tensor
    targets: Tensor

    @classmethod
    def of(cls, parts: Sequence["BlockRows"]) -> "BlockRows":
        """All rows of several."""
        return cls(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))

    @classmethod
    def none(cls, model: nn.Module, block: Block) -> "BlockRows":
        """No row, of a block's sizes."""
        before, down = block.maps[0], block.maps[-1]
        inputs, targets = (widened(model.get_parameter(operation.weight_name).detach()) for operation in (before, down))
        inputs = inputs if before.output_axis == 0 else inputs.T
        return cls(inputs[:0], (targets.T if down.output_axis == 0 else targets)[:0])


@dataclass(frozen=True)
class BlockStep:
    """Σ‖output - target‖² over the rows held out, before and after; `is_kept` where it fell."""

    before: float
    after: float

    @property
    def is_kept(self) -> bool:
        """Whether the block was changed."""
        return self.after < self.before


class BlockFunction:
    """output = W_down·(gate(W_gate·x + b_gate)·(W_up·x + b_up)) + b_down, with copies of a block's parameters."""

    def __init__(self, model: nn.Module, block: Block, gate: nn.Module) -> None:
        self._gate, self._model = gate, model
        self._maps = block.maps
        self.parameters = {
            name: widened(model.get_parameter(name).detach().clone())
            for operation in self._maps
            for name in operation.parameters
        }

    def features(self, inputs: Tensor) -> Tensor:
        """What the map behind the gate is given."""
        z = self._apply(self._maps[0], inputs)
        value = self._gate.forward(z.clone() if getattr(self._gate, "inplace", False) else z)
        return value * self._apply(self._maps[1], inputs) if len(self._maps) == 3 else value

    def __call__(self, inputs: Tensor) -> Tensor:
        return self._apply(self._maps[-1], self.features(inputs))

    def optimizer(self, rows: BlockRows) -> CentredAdam:
        """Adam on all parameters, which now need gradients; each map's inputs are centred at the mean of some rows."""
        inputs = rows.inputs[:_ROWS_AT_ONCE]
        with torch.no_grad():
            seen = [inputs] * (len(self._maps) - 1) + [self.features(inputs)]
            means = [mean_of_rows(values.sum(0), len(values)) for values in seen]
        parameters = [value.requires_grad_(True) for value in self.parameters.values()]
        maps = [
            CentredMap(
                self.parameters[operation.weight_name],
                self.parameters[operation.bias],
                mean,
                operation.output_axis != 0,
            )
            for operation, mean in zip(self._maps, means, strict=True)
            if operation.bias is not None
        ]
        return CentredAdam(parameters, _RATE, maps)

    def _apply(self, operation: AffineOperation, rows: Tensor) -> Tensor:
        weight = self.parameters[operation.weight_name]
        bias = None if operation.bias is None else self.parameters[operation.bias]
        return F.linear(rows, weight if operation.output_axis == 0 else weight.T, bias)

    @torch.no_grad()
    def write(self) -> None:
        """Into the model."""
        for name, value in self.parameters.items():
            self._model.get_parameter(name).copy_(value)

    @torch.no_grad()
    def squared_error(self, rows: BlockRows) -> float:
        """Σ‖output - target‖² over the rows of all processes."""
        parts = zip(rows.inputs.split(_ROWS_AT_ONCE), rows.targets.split(_ROWS_AT_ONCE), strict=True)
        return summed_numbers(sum((self(inputs) - targets).double().square().sum().item() for inputs, targets in parts))


def reconstruct_block(
    model: nn.Module,
    block: Block,
    gate: nn.Module,
    fitted: BlockRows,
    unseen: BlockRows,
    steps: int = STEPS,
) -> BlockStep:
    """Adam on a block's maps. Changes `model` in place, where the rows `unseen` are the nearer to their targets for it.

    The same rows and weights give the same result. Of several processes each gives the rows that it has.
    """
    function = BlockFunction(model, block, gate)
    before = function.squared_error(unseen)
    if not before > 0 or not math.isfinite(before):
        return BlockStep(before, before)
    parameters = list(function.parameters.values())
    optimizer = function.optimizer(fitted)
    generator = torch.Generator().manual_seed(0)
    scale = summed_numbers(len(unseen.inputs)) / before
    counts = each_has(len(fitted.inputs))
    drawn, first = min(_ROWS_A_STEP, sum(counts)), sum(counts[: PartialState().process_index])
    with torch.enable_grad():
        for step in range(steps):
            rows = torch.randint(sum(counts), (drawn,), generator=generator) - first
            rows = rows[(rows >= 0) & (rows < len(fitted.inputs))].to(fitted.inputs.device)
            error = (function(fitted.inputs[rows]) - fitted.targets[rows]).square().sum() / drawn * scale
            optimizer.zero_grad()
            error.backward()
            sum_gradients(parameters)
            optimizer.step(step, step / steps)
    for parameter in parameters:
        parameter.requires_grad_(False)
    done = BlockStep(before, function.squared_error(unseen))
    if done.is_kept:
        function.write()
    return done


@torch.no_grad()
def block_moments(model: nn.Module, block: Block, gate: nn.Module, folds: Sequence[BlockRows]) -> list[Moments]:
    """The sums of the ridge behind a block as it is now, one a fold, over the rows of all processes."""
    function = BlockFunction(model, block, gate)
    sums = []
    for rows in folds:
        outputs = rows.targets.shape[-1]
        total = Moments.zeros(1, block.width, outputs, rows.inputs.device)
        parts = zip(rows.inputs.split(_ROWS_AT_ONCE), rows.targets.split(_ROWS_AT_ONCE), strict=True)
        for inputs, targets in filter(lambda part: len(part[0]), parts):
            residuals = targets - function(inputs)
            total.add(function.features(inputs)[:, None], residuals[:, None], targets[:, None])
        sums.append(total.reduce_over_processes())
    return sums
