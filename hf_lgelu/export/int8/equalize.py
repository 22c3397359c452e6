"""Units of a ReLU network brought to ranges that int8 can hold together, by an exchange that changes no output.

ReLU(s·z) = s·ReLU(z) for s > 0, so a unit may be made louder in the map before its gate and softer in the map behind
it, and nothing else changes: cross-layer equalization (Nagel, van Baalen, Blankevoort, Welling, 2019,
arXiv:1906.04721). No smooth gate allows it. In int8 all units of a layer share one scale, which the loudest one sets;
in a network that became ReLU without training some are fifty times as loud as most.

What is loud in the features is better soft in the weights, and the other way round (SmoothQuant: Xiao et al., 2022,
arXiv:2211.10438, equation 4): each layer takes, of scales s = r^-a · w^b with r the largest value of a unit and w the
largest weight behind it, those that leave the least error of its map's output with both in int8. They are rounded to
powers of two, so that floating-point numbers keep all their digits, and the network in float is the same to the bit.
"""

import itertools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from hf_lgelu.comparing.output_comparison import OutputComparison
from hf_lgelu.export.absorption.scaling import plan_scaling, scale_parameters
from hf_lgelu.models.config_keys import forget_checkpoint
from hf_lgelu.networks.batches import nothing_given, read_batches
from hf_lgelu.networks.channels import site_input_shapes
from hf_lgelu.networks.dataflow import DataFlow, trace_sites
from hf_lgelu.networks.outputs import allowed_rounding
from hf_lgelu.networks.run import forward_pre_hooks, run_example
from hf_lgelu.networks.sites import find_relu_sites, uncompiled

_LAYERS = (nn.Linear, Conv1D, nn.modules.conv._ConvNd)
_EXPONENTS = tuple(itertools.product((0.25, 0.5, 0.75, 1.0), (0.0, 0.25, 0.5)))  # a and b
_LEAST_SHARE = 2.0**-16  # of the largest value or weight: below, a unit gets no larger scale
_SAMPLE_VALUES = 2**21  # of a layer's inputs, on which scales are compared
_UNSIGNED, _SIGNED = 255, 127


@dataclass(frozen=True)
class EqualizedLayer:
    """A layer behind ReLU units, with its ranges and its error in int8 before and after.

    `name` is the layer's, `gate` that of the activation before the layer. `loudness` is the largest value of the
    loudest unit over that of the median unit, before and after. `error` is the relative error of the layer's output
    with inputs and weights in int8, before and after, on the rows given: a share of squares, as
    `NetChange.relative_error`.
    """

    name: str
    gate: str
    loudness: tuple[float, float]
    error: tuple[float, float]

    def __str__(self) -> str:
        return (
            f"{self.name}: loudest unit {self.loudness[0]:.3g} → {self.loudness[1]:.3g} times the median, error in "
            f"int8 {self.error[0]:.3g} → {self.error[1]:.3g}"
        )


@dataclass(frozen=True)
class EqualizationReport:
    """The layers that `equalize_ranges` looked at; `left` are the gates whose units it left, {name: why}."""

    layers: tuple[EqualizedLayer, ...]
    left: Mapping[str, str]

    def __str__(self) -> str:
        left = [f"  {name} left as it is: {reason}" for name, reason in self.left.items()]
        head = f"the units before {len(self.layers)} layers equalized; in float the network computes what it did"
        return "\n".join([head, *(f"  {layer}" for layer in self.layers), *left])


@torch.no_grad()
def equalize_ranges(model: nn.Module, data: Any) -> EqualizationReport:
    """Rescale the units behind every ReLU so that the layer behind them loses less in int8; the outputs stay.

    Changes `model` in place: weights before and behind ReLU gates, by powers of two. For a network that is about to be
    exported and quantized (`export_onnx`, `quantize_onnx`). Gates between which and a layer something else stands (a
    residual sum, a concatenation) are left as they are. What the first batch does not run is not seen: a branch that
    other inputs take, or a disabled adapter, must not share units or layers with what runs.

    Args:
        model: a ReLU network, e.g. of `convert_to_relu`; any module tree, in float32, float64 or bfloat16.
        data: training rows, as `convert_to_relu` takes them: a tensor, a mapping of tensors, an iterable of batches or
            a dataset. They give the units' ranges, as they will give them to `quantize_onnx`; some hundred rows do.

    Raises ValueError, and leaves the model as it was: no ReLU in the model, none whose units can be rescaled, no rows,
    NaN or infinity, or a model that torch.export cannot trace.

    Example:
        >>> import torch
        >>> from hf_lgelu.export.int8.equalize import equalize_ranges
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> _ = net[0].weight.data[0].mul_(100.0)  # one loud unit
        >>> rows = torch.randn(64, 4)
        >>> before = net(rows)
        >>> report = equalize_ranges(net, rows)
        >>> torch.equal(net(rows), before), report.layers[0].error[1] < report.layers[0].error[0]
        (True, True)
    """
    model = uncompiled(model)
    sites = find_relu_sites(model)
    if not sites:
        raise ValueError(
            f"{type(model).__name__} has no ReLU module, and units of a smooth gate cannot be rescaled: that would "
            "change what they compute. convert_to_relu(model, data) makes a ReLU network of it"
        )
    batches = (batch.inputs for batch in read_batches(data, model=model))
    first = next(batches, None)
    if first is None:
        raise nothing_given("data")
    flow = trace_sites(model, sites, first)
    found: list[_Units] = []
    left: dict[str, str] = {}
    shapes = site_input_shapes(model, [site for index, site in enumerate(sites) if index in flow.calls], first)
    for index, site in enumerate(sites):
        shape, axis = shapes.get(site.name, ((), None))
        if axis is None:
            which = f"which axis of its input, of shape {shape}, counts units cannot be told"
            left[site.name] = which if site.name in shapes else "no output depends on it"
            continue
        ones = torch.ones([shape[axis], *[1] * (len(shape) - 1 - axis)], dtype=torch.float64)
        # Of scales that differ: a weight with several calls may want one scale in one and its inverse in the other.
        plan = plan_scaling(model, flow, {index: 1 + ones.cumsum(0)})
        name = plan.after[index][0].rpartition(".")[0] if plan.after[index] else ""
        if index in plan.reasons:
            left[site.name] = plan.reasons[index]
        elif not isinstance(model.get_submodule(name), _LAYERS):
            left[site.name] = f"{name} is no linear layer or convolution"
        else:
            found.append(_Units(index, site.name, name, model, flow, ones))
    if not found:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in left.items())
        raise ValueError(f"no units of {type(model).__name__} can be rescaled:{reasons}")
    with ExitStack() as hooks:
        for units in found:
            hooks.enter_context(forward_pre_hooks([units.module], units.see))
        for batch in itertools.chain([first], batches):
            run_example(model, batch)
    left |= {units.gate: f"{units.layer} does not run as a module of its own" for units in found if not units.sample}
    seen = [units for units in found if units.sample]
    chosen = {units.index: units.best_scale() for units in seen}
    layers = tuple(units.described(chosen[units.index]) for units in seen)
    planned = plan_scaling(model, flow, chosen).factors
    factors = {name: factor for name, factor in planned.items() if bool((factor != 1).any())}
    scale_parameters(model, factors, first, allowed=allowed_rounding, changed="with its units rescaled")
    if factors:
        forget_checkpoint(model)
    return EqualizationReport(layers, left)


@dataclass
class _Units:
    """The units behind one gate, with ranges and samples of the inputs of the layer behind them."""

    index: int
    gate: str
    layer: str
    model: nn.Module
    flow: DataFlow
    ones: Tensor
    least: Tensor = field(init=False)
    most: Tensor = field(init=False)
    sample: list[Tensor] = field(default_factory=list)
    values: int = 0

    @property
    def module(self) -> Any:
        """The layer behind the units."""
        return self.model.get_submodule(self.layer)

    @property
    def ranges(self) -> Tensor:
        """The largest absolute value of each unit, float64."""
        return torch.maximum(-self.least, self.most).double().cpu()

    def see(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Record the range, and a sample, of the layer's inputs."""
        if not arguments:
            return
        inputs: Tensor = arguments[0].detach()
        axis = _channel_axis(layer, inputs)
        rows = inputs.movedim(axis, -1).reshape(-1, inputs.shape[axis])
        least, most = rows.amin(0), rows.amax(0)
        self.least = torch.minimum(self.least, least) if self.sample else least
        self.most = torch.maximum(self.most, most) if self.sample else most
        if self.values < _SAMPLE_VALUES:
            kept = inputs[: max(1, (_SAMPLE_VALUES - self.values) * len(inputs) // inputs.numel())].clone()
            self.sample.append(kept)
            self.values += kept.numel()

    def best_scale(self) -> Tensor:
        """Of all candidates the one with the least error in int8; the first, no scale, where none is better."""
        layer = self.module
        weight = layer.weight.detach().abs().double().cpu()
        if not (self.ranges.isfinite().all() and weight.isfinite().all()):
            raise ValueError(
                f"{self.gate} gives NaN or infinity on these data, or {self.layer}.weight holds some; look at the data "
                "and at the model's weights"
            )
        # The largest absolute weight that each unit goes into.
        if not isinstance(layer, nn.modules.conv._ConvNd):
            heaviest = weight.amax(1 if isinstance(layer, Conv1D) else 0)
        elif layer.transposed:
            heaviest = weight.flatten(2).amax((1, 2))
        else:
            heaviest = weight.flatten(2).amax(2).reshape(layer.groups, -1, weight.shape[1]).amax(1).flatten()
        # A unit that was never seen gets no endless scale.
        tiny = torch.finfo(torch.float32).tiny
        loud, heavy = (
            sizes.clamp(min=max(float(sizes.max()), tiny) * _LEAST_SHARE).log2() for sizes in (self.ranges, heaviest)
        )
        candidates = [self.ones]
        for of_values, of_weights in _EXPONENTS:
            scale = of_weights * heavy - of_values * loud
            candidates.append(torch.exp2((scale - scale.median()).round()).reshape(self.ones.shape))
        errors = [self.error(scale) for scale in candidates]
        return candidates[errors.index(min(errors))]

    def error(self, scale: Tensor) -> float:
        """The relative error of the layer's output with inputs in u8 and weights in s8, under a scale of its units."""
        layer = self.module
        factor = plan_scaling(self.model, self.flow, {self.index: scale}).factors[f"{self.layer}.weight"]
        weight = layer.weight.detach() * factor.to(layer.weight)
        # As onnxruntime's quantizer rounds: weights with a scale for each output, inputs with one scale for all.
        output_axis = 1 if isinstance(layer, Conv1D) or getattr(layer, "transposed", False) else 0
        others = [axis for axis in range(weight.dim()) if axis != output_axis]
        tiny = torch.finfo(weight.dtype).tiny
        weight_step = (weight.abs().amax(others, keepdim=True) / _SIGNED).clamp(min=tiny)
        rounded = (weight / weight_step).round() * weight_step
        flat = scale.flatten().to(weight)
        least, most = float((self.least * flat).min().clamp(max=0)), float((self.most * flat).max().clamp(min=0))
        step = max((most - least) / _UNSIGNED, tiny)
        zero = round(-least / step)
        compared = OutputComparison()
        for inputs in self.sample:
            axis = _channel_axis(layer, inputs)
            scaled = inputs * flat.view(-1, *[1] * (inputs.dim() - 1 - axis))
            coarse = (scaled / step).round().clamp(-zero, _UNSIGNED - zero) * step
            outputs = [functional_call(layer, {"weight": weight}, (scaled,))]
            outputs.append(functional_call(layer, {"weight": rounded}, (coarse,)))
            compared.add(*(output.movedim(axis, -1) for output in outputs))
        return compared.relative_error

    def described(self, scale: Tensor) -> EqualizedLayer:
        """The report's entry for this layer under a scale."""

        def loudness(sizes: Tensor) -> float:
            return float(sizes.max() / sizes[sizes > 0].median()) if sizes.any() else 1.0

        louder = loudness(self.ranges), loudness(self.ranges * scale.flatten())
        return EqualizedLayer(self.layer, self.gate, louder, (self.error(self.ones), self.error(scale)))


def _channel_axis(layer: Any, inputs: Tensor) -> int:
    """Which axis of a layer's input counts its channels; a convolution may be given rows, or a single row."""
    is_convolution = isinstance(layer, nn.modules.conv._ConvNd)
    return inputs.dim() - layer.weight.dim() + 1 if is_convolution else inputs.dim() - 1
