"""Forwards that somebody put on an instance: accelerate's autocast goes for a while, closures are refused."""

import copy

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32

from hf_lgelu import (
    MLPConfig,
    MLPForClassification,
    absorb_hardness,
    anneal_hardness,
    convert_to_relu,
    export_gelu,
    export_onnx,
    export_relu,
    substitute_relu,
)
from hf_lgelu.models.copies import independent_copy
from hf_lgelu.networks.run import own_forward


def network(hardness=160.0):
    torch.manual_seed(0)
    model = MLPForClassification(MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2)).eval()
    anneal_hardness(model, 1.0, target_hardness=hardness)
    return model


def prepared(model):
    """As accelerate leaves a model that was trained with bf16 (Accelerator.prepare_model)."""
    model._original_forward = model.forward
    autocast = torch.autocast("cpu", torch.bfloat16)
    model.forward = convert_outputs_to_fp32(autocast(type(model).forward)).__get__(model)
    return model


INPUTS = {"features": torch.randn(64, 4, generator=torch.Generator().manual_seed(0))}


def test_the_autocast_of_accelerate_goes_and_comes_back():
    model = network()
    exact = model(**INPUTS).logits
    rounded = prepared(model)(**INPUTS).logits
    assert (rounded - exact).abs().max() > 1e-5
    with own_forward(model):
        assert torch.equal(model(**INPUTS).logits, exact)
        assert "forward" not in vars(model)
    assert torch.equal(model(**INPUTS).logits, rounded)
    assert torch.equal(independent_copy(model)(**INPUTS).logits, exact)
    with pytest.raises(KeyError), own_forward(model):
        raise KeyError
    assert torch.equal(model(**INPUTS).logits, rounded)


def test_a_model_trained_with_bfloat16_leaves_as_one_that_was_not(tmp_path):
    model = network()
    report = export_relu(prepared(network()), tmp_path / "relu", inputs=INPUTS)
    expected = export_relu(model, tmp_path / "exact", inputs=INPUTS)
    assert report.change == expected.change
    soft = network(1.7)
    assert export_gelu(prepared(network(1.7)), tmp_path / "gelu", inputs=INPUTS).relative_change < 1e-5
    absorb_hardness(plain := prepared(network(1.7)), INPUTS)
    with own_forward(plain):
        torch.testing.assert_close(plain(**INPUTS).logits, soft(**INPUTS).logits, rtol=1e-5, atol=1e-6)
    substitute_relu(relu := network())
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    assert export_onnx(prepared(relu), tmp_path / "model.onnx", INPUTS).max_abs_difference < 1e-5


def test_it_converts_as_a_model_that_was_not():
    config = MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2, hidden_act="gelu")
    torch.manual_seed(0)
    model = MLPForClassification(config).eval()
    wrapped = prepared(copy.deepcopy(model))
    expected = convert_to_relu(model, INPUTS).model(**INPUTS).logits
    converted = convert_to_relu(wrapped, INPUTS).model
    assert torch.equal(converted(**INPUTS).logits, expected)
    assert "_original_forward" not in vars(converted)
    assert "_original_forward" in vars(wrapped)
