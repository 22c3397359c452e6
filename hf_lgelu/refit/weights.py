"""A refit written into the network: weights in the layout of each layer, biases, and the BatchNorm after a map."""

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

# A norm or a LayerScale after the map may scale a channel down. Below this share of the largest gain the channel is
# left alone: correcting it would take weights a thousand times larger, which float16 and int8 cannot hold.
_DEAD = 1e-3


@torch.no_grad()
def write_refit(student: nn.Module, recording: Recording, layer: Layer, fit: RidgeFit) -> None:
    """Write a fit into the layer's weights in `student`; a fit of the choice "unchanged" changes nothing.

    The fit is in the units of the aim. A BatchNorm right after a map gets the mean and variance of the map's new
    outputs; its function in eval mode stays the same.
    """
    if fit.choice == "unchanged":
        return
    means = fit.moments.feature_sum / fit.moments.count
    start, constant = 0, fit.bias_change.flatten().cpu()
    places: list[tuple[LinearMap, slice]] = []
    for consumer in layer.maps:
        features = slice(start, start + consumer.width)
        start = features.stop
        places.append((consumer, features))
        change = fit.weight_change[..., features].cpu()
        flat = change.reshape(len(consumer.gain), -1) * _inverse(consumer.gain)[:, None]
        weight = consumer.operation.weight_in(student).double()
        consumer.operation.write_weight(student, weight + flat.reshape(weight.shape).to(weight.device))
        if layer.has_intercept:  # the fit assumes the whole change, but unreachable channels are not written
            offset = torch.einsum("gmd,gd->gm", change, means[:, features].cpu()).flatten()
            constant = torch.where(_reachable(consumer.gain), constant, constant + offset)
    for consumer in layer.maps:
        if consumer.bias is not None:  # each channel's constant goes to the first map that reaches it
            _add(student, consumer.bias, slice(None), constant * _inverse(consumer.bias_gain))
            constant = torch.where(_reachable(consumer.bias_gain), 0.0, constant)
    for consumer, features in places:
        _recentre(student, recording, consumer, fit.moments, features)


def _reachable(gain: Tensor) -> Tensor:
    return gain.abs() > _DEAD * gain.abs().max()


def _inverse(gain: Tensor) -> Tensor:
    return torch.where(_reachable(gain), 1 / gain, 0.0)


def _add(model: nn.Module, stored: StoredValue, outputs: slice, change: Tensor) -> None:
    """Add a constant to some outputs of a bias, in float64."""
    values = stored.read(model).double().flatten()  # a copy
    values[outputs] += change.to(values.device)
    stored.write(model, values)


def _recentre(student: nn.Module, recording: Recording, consumer: LinearMap, moments: Moments, features: slice) -> None:
    """Give the BatchNorm after a map the mean and variance of the map's new outputs; its function stays the same."""
    norm = consumer.norm
    if norm is None or norm is not consumer.to_aim[0] or any(operand is None for operand in norm.args[1:5]):
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
