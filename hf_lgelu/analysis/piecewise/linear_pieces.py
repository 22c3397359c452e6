"""Exact linear pieces of a ReLU network: the affine function that it is around an input (OpenBox).

Chu et al., "Exact and Consistent Interpretation for Piecewise Linear Neural Networks", KDD 2018, arXiv:1802.06259.
Inputs on which the same ReLUs are on share one affine function W·x + b. A smooth network has no such pieces.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from hf_lgelu.analysis.piecewise.input_flow import InputFlow, scores_of
from hf_lgelu.models.example_run import require_plain
from hf_lgelu.models.operable import uncompiled
from hf_lgelu.models.own_forward import independent_copy
from hf_lgelu.models.smooth_calls import find_smooth_calls

_TOLERANCE = 1e-8  # relative; what float64 rounding may leave of an exact equality
_HALVINGS = 30
_ROWS_AT_A_TIME = 256


@dataclass(frozen=True)
class ReLUSite:
    """One call of ReLU: the module's name, the shape of its input without the batch, its columns in a pattern."""

    name: str
    shape: tuple[int, ...]
    columns: slice


@dataclass(frozen=True)
class LocalLinearModels:
    """The affine function of a network around each of N inputs; everything in float64.

    `weight` (N, outputs, *input shape) and `bias` (N, outputs): f(z) = ⟨weight, z⟩ + bias for every z with the same
    `pattern` (N, units), bool: which ReLU is on, all calls of `sites` side by side. A unit whose input is exactly 0
    counts as off, as torch takes the derivative 0 there; `weight` is then that of the side on which it is off.
    """

    weight: Tensor
    bias: Tensor
    pattern: Tensor
    sites: tuple[ReLUSite, ...]
    network: nn.Module

    @property
    def distinct_regions(self) -> int:
        """How many different patterns the inputs have."""
        if self.pattern.shape[1] == 0:
            return 1  # a network without ReLU is one affine function
        return len(torch.unique(self.pattern, dim=0))

    def apply(self, inputs: Tensor) -> Tensor:
        """(N, outputs) float64: each affine function at the input of the same row.

        Exact for the network where `same_region(inputs)` is true. Raises ValueError for another shape.
        """
        inputs = self._checked(inputs)
        return torch.einsum("nki,ni->nk", self.weight.flatten(2), inputs.flatten(1)) + self.bias

    def same_region(self, inputs: Tensor) -> Tensor:
        """(N,) bool: whether each input turns on the same ReLUs as the one that its row was made from.

        Raises ValueError for another shape than that of the original inputs.
        """
        parts = zip(self._checked(inputs).split(_ROWS_AT_A_TIME), self.pattern.split(_ROWS_AT_A_TIME), strict=True)
        return torch.cat([(_run(self.network, part)[1] == pattern).all(1) for part, pattern in parts])

    def scores(self, inputs: Tensor) -> Tensor:
        """(N, outputs): the network itself in float64."""
        return torch.cat([_run(self.network, part)[0] for part in self._checked(inputs).split(_ROWS_AT_A_TIME)])

    def _checked(self, inputs: Tensor) -> Tensor:
        expected = (len(self.weight), *self.weight.shape[2:])
        if tuple(inputs.shape) != expected:
            raise ValueError(f"inputs must have shape {expected}, one for each piece, got {tuple(inputs.shape)}")
        return inputs.to(self.weight)


def local_linear_model(model: nn.Module, inputs: Tensor, *, batch_size: int = 64, seed: int = 0) -> LocalLinearModels:
    """The affine function that a ReLU network is around each input, computed in float64 on a copy.

    `model` stays as it is. Two checks make sure that it is exact. Every operation of the forward pass on each batch is
    held to a list of what is affine in the input (input_flow.py beside this file). And each affine function is compared
    with the network at a random point of its region.

    Args:
        model: takes one tensor and gives scores (batch, outputs) or an output with such `logits`: our MLP, a
            Sequential, a convolutional network without max-pooling, a ResNet of TimmWrapper.
        inputs: (N, ...), floating point.
        batch_size: inputs at a time; memory grows with batch_size · outputs · units.
        seed: of the random points.

    Raises:
        TypeError: `inputs` is not a floating-point tensor, or the output is of another kind.
        ValueError: the network is not piecewise linear: smooth gates (λ-GELU, GELU, SiLU, tanh, ...), attention,
            layer norm; or it holds an operation that is piecewise linear without being a ReLU (max-pooling, clamp),
            whose pieces are not recorded. Substitute λ-GELU first (hf_lgelu.substitute_relu). Or NaN or infinity, in
            the inputs or the scores.
        RuntimeError: a row depends on other rows, or a check found an affine function that is not the network's.

    Example:
        >>> import torch
        >>> from hf_lgelu import local_linear_model
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> inputs = torch.randn(5, 3)
        >>> pieces = local_linear_model(model, inputs)
        >>> torch.allclose(pieces.apply(inputs).float(), model(inputs), atol=1e-6)
        True
    """
    _check_inputs(inputs, batch_size)
    network = independent_copy(uncompiled(model)).double().eval()
    inputs = inputs.detach().double()
    inputs = inputs.to(next(network.parameters(), inputs).device)
    _refuse_smooth(network, inputs[:1].clone())  # a network may begin with a ReLU in place
    generator = torch.Generator().manual_seed(seed)
    parts = [_pieces(network, part, generator) for part in inputs.split(batch_size)]
    return _joined(parts)


def _check_inputs(inputs: Tensor, batch_size: int) -> None:
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        kind = inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__
        raise TypeError(f"inputs must be a floating-point tensor (N, ...), got {kind}")
    require_plain(inputs)
    if inputs.ndim < 2 or len(inputs) == 0 or batch_size < 1:
        raise ValueError(
            f"inputs must have shape (N, ...) with N ≥ 1 and batch_size be at least 1, got {tuple(inputs.shape)} "
            f"and {batch_size}"
        )
    if not bool(inputs.isfinite().all()):
        raise ValueError("inputs hold NaN or infinity; give finite ones")


def _refuse_smooth(network: nn.Module, example: Tensor) -> None:
    calls = find_smooth_calls(network, example)
    if calls:
        more = f"; and {len(calls) - 3} more" if len(calls) > 3 else ""
        raise ValueError(
            f"the network is smooth and has no linear pieces: {'; '.join(str(call) for call in calls[:3])}{more}. "
            "Harden λ-GELU and call hf_lgelu.substitute_relu(model) first"
        )


def _pieces(network: nn.Module, inputs: Tensor, generator: torch.Generator) -> LocalLinearModels:
    def single(x: Tensor) -> tuple[Tensor, Tensor]:
        scores = scores_of(network(x[None].clone()))  # as below
        if scores.ndim != 2:
            raise ValueError(
                f"the network must give scores (batch, outputs) of any number of rows, got shape {tuple(scores.shape)} "
                "of one"
            )
        return scores[0], scores[0]

    batch_scores, pattern, sites = _run(network, inputs)
    if batch_scores.ndim != 2 or not batch_scores.shape[1]:
        raise ValueError(f"the network must give scores (batch, outputs), got shape {tuple(batch_scores.shape)}")
    if not bool(batch_scores.isfinite().all()):
        raise ValueError("the network gives NaN or infinity on these inputs; look at its weights")
    with torch.no_grad():
        weight, scores = vmap(jacrev(single, has_aux=True))(inputs)
    weight, scores = weight.detach(), scores.detach()
    if not _equal(scores, batch_scores, scores.abs().amax(1)):
        raise RuntimeError("the scores of an input depend on other inputs of its batch; no row has pieces of its own")
    bias = scores - torch.einsum("nki,ni->nk", weight.flatten(2), inputs.flatten(1))
    pieces = LocalLinearModels(weight, bias, pattern, sites, network)
    _verify(pieces, inputs, generator)
    return pieces


class _Pattern(InputFlow):
    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.calls: list[tuple[str, tuple[int, ...], Tensor]] = []

    def relu(self, name: str, x: Tensor, output: Tensor) -> None:
        with self.paused():
            self.calls.append((name, tuple(x.shape[1:]), (x > 0).flatten(1)))


def _run(network: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor, tuple[ReLUSite, ...]]:
    """Scores, pattern and sites, with every operation checked."""
    flow = _Pattern(network)
    inputs = inputs.clone()  # a network may begin with a ReLU in place
    with flow.watching():
        scores = scores_of(network(flow.start(inputs)))
    sites, start = [], 0
    for name, shape, _ in flow.calls:
        sites.append(ReLUSite(name, shape, slice(start, start + math.prod(shape))))
        start += math.prod(shape)
    columns = [on for _, _, on in flow.calls]
    if any(len(on) != len(inputs) for on in columns):
        raise RuntimeError("a ReLU's input has another first axis than the batch; its pattern has no row per input")
    pattern = torch.cat(columns, 1) if columns else inputs.new_empty((len(inputs), 0), dtype=torch.bool)
    return scores, pattern, tuple(sites)


def _verify(pieces: LocalLinearModels, inputs: Tensor, generator: torch.Generator) -> None:
    """Compare with the network at a random point in each region, the farthest of a sequence of halved steps."""
    step = torch.randn(inputs.shape, generator=generator, dtype=torch.float64).to(inputs)
    step *= 0.1 * (inputs.flatten(1).abs().amax(1) + 1).view(-1, *[1] * (inputs.ndim - 1))
    inside = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
    for _ in range(_HALVINGS):
        inside = pieces.same_region(inputs + step)
        if bool(inside.all()):
            break
        step[~inside] /= 2
    points = inputs + step
    found, expected = pieces.apply(points)[inside], pieces.scores(points)[inside]
    # What is added up sets the size of the rounding: W·z and b may be large and cancel.
    terms = torch.einsum("nki,ni->nk", pieces.weight.flatten(2).abs(), points.flatten(1).abs()) + pieces.bias.abs()
    if not _equal(found, expected, terms[inside].amax(1)):
        worst = (found - expected).abs().max().item()
        raise RuntimeError(f"W·z + b differs from the network by {worst:.3g} within a region; please report this")


def _equal(found: Tensor, expected: Tensor, scale: Tensor) -> bool:
    return bool(((found - expected).abs() <= _TOLERANCE * (scale[:, None] + 1e-300)).all())


def _joined(parts: list[LocalLinearModels]) -> LocalLinearModels:
    def whole(name: str) -> Any:
        return torch.cat([getattr(part, name) for part in parts])

    return LocalLinearModels(whole("weight"), whole("bias"), whole("pattern"), parts[0].sites, parts[0].network)
