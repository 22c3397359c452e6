"""A refit written into the network: weights in the layout of each layer, biases, and the BatchNorm after a map."""

from collections.abc import Iterator
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor, nn

from hf_lgelu.graph.aims import LinearMap
from hf_lgelu.graph.layers import Layer
from hf_lgelu.graph.maps import AffineOperation
from hf_lgelu.graph.recording import Recording, StoredValue
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.ridge import RidgeFit

# A norm or a LayerScale after the map may scale a channel down. Below this share of the largest scale the channel is
# left alone: correcting it would take weights a thousand times larger, which float16 and int8 cannot hold.
_DEAD = 1e-3


def why_not_writable(model: nn.Module) -> str | None:
    """The reason why a model cannot be refitted at all, with what to do; None for a model that can be refitted.

    Its weights must be plain floating-point tensors on one device that has float64.
    """
    devices = {str(parameter.device) for parameter in model.parameters() if not parameter.is_meta}
    mapped = {str(place) for module in model.modules() for place in getattr(module, "hf_device_map", {}).values()}
    devices |= mapped if len(mapped) > 1 else set()
    if len(devices) > 1:
        return (
            f"it is spread over {', '.join(sorted(devices))}, and what is summed over one layer has to meet on one "
            'device. Load it on one that holds it, such as device_map="cpu"'
        )
    if any(device.startswith("mps") for device in devices):
        return "it is on mps, which has no float64, and the fit is summed in it. Convert model.cpu()"
    for name, module in model.named_modules():
        if any(value.is_meta for value in (*module.parameters(False), *module.buffers(False))):
            return f"{name or 'it'} ({type(module).__name__}) has no weights, it is on the meta device. Load them first"
        if any(value.is_inference() for value in module.parameters(False)):
            return (
                f"{name or 'it'} ({type(module).__name__}) holds tensors that were made under torch.inference_mode, "
                "which cannot be changed outside of it. Load the model outside"
            )
        kind = _quantized(module)
        if kind is not None:
            return (
                f"{name or 'it'} ({type(module).__name__}) holds {kind}, which are no plain floating-point numbers: it "
                "is quantized, or sharded. Convert the model first, then quantize the ReLU model"
            )
    return None


def _quantized(module: nn.Module) -> str | None:
    """A tensor of a module that is not plain floating point, in words; None if there is none."""
    if hasattr(module, "_packed_params"):
        return "packed weights"
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter.data) is not Tensor:
            return f"its {name} as {type(parameter.data).__name__}"
        # A matrix of whole numbers is quantized, but a count or an index may be a parameter, too.
        is_number = parameter.is_floating_point() or parameter.is_complex() or parameter.ndim < 2
        if not is_number or (parameter.dtype.itemsize < 2 and parameter.is_floating_point()):
            return f"its {name} as {parameter.dtype}"
    for name, buffer in module.named_buffers(recurse=False):
        if "weight" in name and not buffer.is_floating_point():
            return f"its {name} as {buffer.dtype}"
    return None


def forget_quantizer(model: nn.Module) -> Iterator[str]:
    """The changes of a model's configs, so that weights from a quantized file (GGUF) are saved as floats.

    Changes `model` in place.
    """
    for name, module in model.named_modules():
        if getattr(module, "hf_quantizer", None) is not None or getattr(module, "is_quantized", False):
            module.hf_quantizer, module.is_quantized = None, False
            config = getattr(module, "config", None)
            if config is not None and getattr(config, "quantization_config", None) is not None:
                del config.quantization_config
                yield f"{name}.quantization_config removed".removeprefix(".") + ": the weights are floating point"


@torch.no_grad()
def write_refit(student: nn.Module, recording: Recording, layer: Layer, fit: RidgeFit) -> None:
    """Write a fit into the layer's weights in `student`; a fit of the choice "kept" changes nothing.

    The fit is on the scale of the aim. A BatchNorm right after a map gets the mean and variance of the map's new
    outputs; its function in eval mode stays the same.
    """
    if fit.choice == "kept":
        return
    means = fit.moments.feature_sum / fit.moments.count
    start, constant = 0, fit.bias_change.flatten().cpu()
    places: list[tuple[LinearMap, slice]] = []
    for consumer in layer.maps:
        features = slice(start, start + consumer.width)
        start = features.stop
        places.append((consumer, features))
        change = fit.weight_change[..., features].cpu()
        flat = change.reshape(len(consumer.aim.scale), -1) * _inverse(consumer.aim.scale)[:, None]
        weight = consumer.operation.weight_in(student).double()
        consumer.operation.write_weight(student, weight + flat.reshape(weight.shape).to(weight.device))
        if layer.has_intercept:  # the fit assumes the whole change, but unreachable channels are not written
            offset = torch.einsum("gmd,gd->gm", change, means[:, features].cpu()).flatten()
            constant = torch.where(_reachable(consumer.aim.scale), constant, constant + offset)
    for consumer in layer.maps:
        if consumer.bias is not None:  # each channel's constant goes to the first map that reaches it
            scale = consumer.bias.scale
            _add(student, consumer.bias.stored, slice(None), constant * _inverse(scale))
            constant = torch.where(_reachable(scale), 0.0, constant)
    for consumer, features in places:
        _recentre(student, recording, consumer, fit.moments, features)


def _reachable(scale: Tensor) -> Tensor:
    return scale.abs() > _DEAD * scale.abs().max()


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(_reachable(scale), 1 / scale, 0.0)


def _add(model: nn.Module, stored: StoredValue, outputs: slice, change: Tensor) -> None:
    """Add a constant to some outputs of a bias, in float64."""
    values = stored.read(model).double().flatten()  # a copy
    values[outputs] += change.to(values.device)
    stored.write(model, values)


def _recentre(student: nn.Module, recording: Recording, consumer: LinearMap, moments: Moments, features: slice) -> None:
    """Give the BatchNorm after a map the mean and variance of the map's new outputs; its function stays the same."""
    norm = consumer.aim.norm
    if norm is None or norm is not consumer.aim.path[0] or any(operand is None for operand in norm.args[1:5]):
        return
    weight, bias, mean, variance = (attrgetter(recording.name_of(each))(student) for each in norm.args[1:5])

    # Over the rows of `moments`, with the present weights; the variance is unbiased.
    rows = consumer.operation.weight_in(student).cpu().double().reshape(consumer.geometry.groups, -1, consumer.width)
    inputs = (moments.feature_sum[:, features] / moments.count).cpu()
    covariance = moments.gram[:, features, features].cpu() / moments.count - inputs[:, :, None] * inputs[:, None, :]
    new_mean = torch.einsum("gmd,gd->gm", rows, inputs).flatten()
    new_variance = torch.einsum("gmd,gde,gme->gm", rows, covariance, rows).flatten().clamp(min=0)
    new_variance = new_variance * moments.count / max(moments.count - 1, 1)
    if consumer.operation.bias is not None:
        new_mean = new_mean + consumer.operation.bias.read(student).cpu().double().flatten()

    epsilon = norm.args[7]
    factor = weight.double().cpu() * (variance.double().cpu() + epsilon).rsqrt()
    bias.copy_(bias.double().cpu() + factor * (new_mean - mean.double().cpu()))
    weight.copy_(factor * (new_variance + epsilon).sqrt())
    mean.copy_(new_mean)
    variance.copy_(new_variance)


def owner_of(model: nn.Module, operation: AffineOperation) -> nn.Module:
    """The module that holds the weight of a map."""
    return model.get_submodule(operation.weight_name.rpartition(".")[0])


@torch.no_grad()
def add_constant(
    network: nn.Module, operation: AffineOperation, outputs: slice, values: Tensor, direction: Tensor | None
) -> None:
    """Add `values` to some outputs of a map: to its bias, or without a bias to its weight, as values · directionᵀ."""
    if operation.bias is not None:
        _add(network, operation.bias, outputs, values)
        return
    weight = operation.weight_in(network).double()
    weight[outputs] += torch.outer(values, cast(Tensor, direction).to(values.device)).to(weight.device)
    operation.write_weight(network, weight)
