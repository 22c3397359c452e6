"""Which weights can be written, and constants that are added to maps."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_lgelu import ConversionRefusedError, convert_to_relu
from hf_lgelu.graph.maps import AffineOperation
from hf_lgelu.graph.recording import StoredValue
from hf_lgelu.refit.weights import add_constant


class Subclass(torch.Tensor):
    """A tensor that says float32 and is not, as torchao's are."""


def swapped_weight(tensor, kind=nn.Parameter):
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    if kind is nn.Parameter:
        model[2].weight = nn.Parameter(tensor(model[2].weight.data), requires_grad=False)
    else:
        del model[2].weight
        model[2].register_buffer("qweight", tensor(torch.randn(3, 8)))
    return model


@torch.inference_mode()
def inference_weights():
    return swapped_weight(lambda w: w)


def on_two_devices(model):
    """As accelerate leaves what it has spread over two GPUs, which are not here."""
    model.hf_device_map = {"0": 0, "2": 1}
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda: swapped_weight(lambda w: w.as_subclass(Subclass)),
            r"2 \(Linear\) holds its weight as Subclass, .* is quantized",
        ),
        (lambda: swapped_weight(lambda w: w.to(torch.int8)), r"its weight as torch\.int8"),
        (lambda: swapped_weight(lambda w: w.to(torch.float8_e4m3fn)), r"its weight as torch\.float8"),
        (lambda: swapped_weight(lambda w: w.to(torch.int32), kind=None), r"its qweight as torch\.int32"),
        (lambda: torch.ao.quantization.quantize_dynamic(swapped_weight(lambda w: w)), "packed weights"),
        (inference_weights, r"0 \(Linear\) holds tensors that were made under torch\.inference_mode"),
        (lambda: swapped_weight(lambda w: w.to("meta")), "is on the meta device. Load them first"),
        (lambda: on_two_devices(swapped_weight(lambda w: w)), "it is spread over 0, 1, .*Load it on one that holds it"),
    ],
    ids=["subclass", "int8", "float8", "buffer", "packed", "inference", "meta", "two devices"],
)
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
def test_weights_that_are_no_plain_numbers_are_refused(model, words):
    with pytest.raises(ConversionRefusedError, match=f"Sequential.*{words}"):
        convert_to_relu(model(), torch.randn(80, 6))


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_a_constant_is_added_to_what_a_map_gives(kind):
    layer = nn.Linear(6, 4, bias=False) if kind == "linear" else Conv1D(4, 6)
    network, axes = nn.ModuleDict({"map": layer}), ((0, 1) if kind == "linear" else (1, 0))
    operation = AffineOperation(None, None, StoredValue("map.weight"), None, -1, *axes)
    values, direction, x = torch.tensor([2.0, -3.0]), torch.rand(6).double(), torch.randn(5, 6)
    before = layer(x).detach()
    add_constant(network, operation, slice(1, 3), values.double(), direction)
    wanted = before.clone()
    wanted[:, 1:3] += (x.double() @ direction)[:, None].float() * values
    assert torch.allclose(layer(x), wanted, atol=1e-5)


def test_a_bias_takes_the_constant_where_there_is_one():
    layer = nn.Linear(6, 4)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    operation = AffineOperation(None, None, StoredValue("map.weight"), StoredValue("map.bias"), -1, 0, 1)
    add_constant(nn.ModuleDict({"map": layer}), operation, slice(1, 3), torch.tensor([2.0, -3.0]), torch.rand(6))
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer.bias, bias + torch.tensor([0.0, 2.0, -3.0, 0.0]))
