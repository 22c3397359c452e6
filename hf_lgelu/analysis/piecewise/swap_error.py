"""How far ReLU in the place of λ-gates can move each number of a network, carried from layer to layer.

Let z be a number of the network with λ-gates, z′ the same number of the network with ReLU, and e ≥ |z − z′| a bound,
0 at the input. With r = ReLU, a(x) = x·G(λx) and κ = max u(1 − G(u)):

- affine layer: |(Wz + b) − (Wz′ + b)| ≤ |W|·e, elementwise. Sums add their bounds, and averages average them.
- gate, for every input: |a(z) − r(z′)| ≤ |a(z) − r(z)| + |r(z) − r(z′)| ≤ κ/λ + e. What was wrong before passes
  through the *ReLU* network's gate, whose Lipschitz constant is 1. (Splitting at a(z′) instead would cost λ-GELU's,
  1.129, at each layer.)
- gate, where z is known: z′ lies in [z − e, z + e] and r does not decrease, so that
  |a(z) − r(z′)| ≤ max(|a(z) − r(z − e)|, |a(z) − r(z + e)|). No bound from z and e alone is smaller.
- a ReLU that was there before: the same with a = r; e for every input.

The bounds are evaluated in float64 and hold in exact arithmetic; float32 rounding of either network is not in them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_lgelu.activation.functional import apply_gate
from hf_lgelu.activation.gates import GATES
from hf_lgelu.analysis.piecewise.input_flow import (
    NONNEGATIVE_LINEAR,
    SHAPE_PRESERVING_SUMS,
    InputFlow,
    NotPiecewiseAffineError,
    scores_of,
)
from hf_lgelu.models.own_forward import independent_copy
from hf_lgelu.models.sites import LEARNED_KINDS, find_sites


def bound_swap(model: nn.Module, inputs: Tensor, *, every_input: bool) -> tuple[Tensor, Tensor]:
    """(scores of the λ-GELU network, bounds on how far each moves), both float64 of the scores' shape.

    With `every_input`, the bounds hold for all inputs of that shape, not only for `inputs`.

    Raises NotPiecewiseAffineError for a network that is not made of affine operations, λ-GELU and ReLU, and TypeError
    for an output that holds no scores.
    """
    network = independent_copy(model).double().eval()
    flow = _SwapError(network, every_input)
    for site in find_sites(network, LEARNED_KINDS):
        site.put(_Gate(flow, site.module))
    inputs = inputs.detach().to(next(network.parameters(), inputs).device)
    inputs = flow.start(inputs.double().clone())
    with flow.watching():
        scores = scores_of(network(inputs))
    return scores, flow.bound(scores)


class _Gate(nn.Module):
    def __init__(self, flow: "_SwapError", module: nn.Module) -> None:
        super().__init__()
        self._flow, self._gate = (flow,), (module,)  # in tuples: neither is a part of the network

    def forward(self, x: Tensor) -> Tensor:
        return self._flow[0].gate(x, self._gate[0].hardness, self._gate[0].gate)


class _SwapError(InputFlow):
    def __init__(self, network: nn.Module, every_input: bool) -> None:
        super().__init__(network)
        self._every_input = every_input
        self._bounds: dict[int, Tensor] = {}
        self._holders: dict[int, set[int]] = {}  # storage → tensors with a bound in it

    def start(self, inputs: Tensor) -> Tensor:
        super().start(inputs)
        self._set(inputs, torch.zeros_like(inputs))
        return inputs

    def bound(self, value: Tensor) -> Tensor:
        """The bound of a tensor; 0 where it does not depend on the input."""
        if id(value) in self._bounds:
            return self._bounds[id(value)]
        if self.depends(value):
            raise NotPiecewiseAffineError("a tensor was written through a view, which is not followed")
        return torch.zeros_like(value)

    def gate(self, x: Tensor, hardness: Tensor, gate: str) -> Tensor:
        with self.paused():
            hardness = hardness.double()
            output = apply_gate(x, hardness, gate)
            if not self.depends(x):
                # The bound starts at a constant here: as if its error were 0 so far.
                self.mark(x)
                self._set(x, torch.zeros_like(x))
            added = (GATES[gate].swap_error / hardness).expand_as(x)
            bound = self.bound(x) + added if self._every_input else _worst(output, x, self.bound(x))
            self.mark(output)
            self._set(output, bound)
        return output

    def relu(self, name: str, x: Tensor, output: Tensor) -> None:
        with self.paused():
            # In place, the bound before is found under the output's name.
            before = self.bound(x) if id(x) in self._bounds else self.bound(output)
            self._set(output, before if self._every_input else _worst(output, x, before))

    def affine(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        with self.paused():
            bounds = _carried(name, function, args, kwargs, output, self.bound, self.depends)
            outputs = output if isinstance(output, list | tuple) else (output,)
            for tensor, bound in zip(outputs, bounds, strict=True):
                self._set(tensor, bound)

    def _set(self, tensor: Tensor, bound: Tensor) -> None:
        storage = tensor.untyped_storage()._cdata
        holders = self._holders.setdefault(storage, set())
        if id(tensor) in self._bounds and len(holders) > 1:
            raise NotPiecewiseAffineError("a tensor of which there are views was written in place; not followed")
        holders.add(id(tensor))
        self._bounds[id(tensor)] = bound
        self._kept.append(tensor)


def _worst(output: Tensor, x: Tensor, bound: Tensor) -> Tensor:
    return torch.maximum((output - (x - bound).relu()).abs(), (output - (x + bound).relu()).abs())


def _carried(
    name: str,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    bound: Callable[[Tensor], Tensor],
    depends: Callable[[Any], bool],
) -> list[Tensor]:
    """The bounds of an affine operation's outputs: its linear part with |coefficients|, on the inputs' bounds."""

    def error(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(error(item) for item in value)
        return bound(value) if isinstance(value, Tensor) else value

    def factor(value: Any) -> Any:
        if depends(value):
            return bound(value)
        return value.abs() if isinstance(value, Tensor) and value.dtype != torch.bool else abs(value * 1.0)

    if name in NONNEGATIVE_LINEAR:
        arguments = (error(args[0]), *args[1:2], 0) if name == "constant_pad_nd" else (error(args[0]), *args[1:])
        result = function(*arguments, **kwargs)
        return list(result) if isinstance(result, list | tuple) else [result]
    if name in SHAPE_PRESERVING_SUMS:
        terms = [bound(value) if isinstance(value, Tensor) else 0.0 for value in args[:2]]
        return [(terms[0] + abs(kwargs.get("alpha", 1)) * terms[1]).expand_as(output)]
    if name == "neg":
        return [bound(args[0])]
    if name in ("mul", "mm", "bmm", "mv"):
        operation = {"mul": torch.mul, "mm": torch.mm, "bmm": torch.bmm, "mv": torch.mv}[name]
        return [operation(factor(args[0]), factor(args[1]))]
    if name in ("addmm", "baddbmm"):
        product = torch.matmul(factor(args[1]), factor(args[2]))
        return [abs(kwargs.get("beta", 1)) * bound(args[0]) + abs(kwargs.get("alpha", 1)) * product]
    if name == "div":
        return [(bound(args[0]) / abs(args[1])).expand_as(output)]
    if name == "linear":
        return [torch.matmul(bound(args[0]), args[1].abs().mT)]
    if name == "convolution":
        return [function(bound(args[0]), args[1].abs(), None, *args[3:], **kwargs)]
    return _normalized(args, output, bound)


def _normalized(args: tuple[Any, ...], output: Any, bound: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x, scale, _, _, variance, *_, epsilon = args
    factor = (variance + epsilon).rsqrt() * (1 if scale is None else scale.abs())
    carried = bound(x) * factor.view(1, -1, *[1] * (x.ndim - 2))
    return [carried, *(torch.zeros_like(statistic) for statistic in output[1:])]
