"""Networks whose forward pass is ReLU and whose gradients are a λ-gate's: by string, by surgery, saved and left."""

import json
from collections import Counter

import onnx
import pytest
import torch
from families import BY_NAME
from family import logits_of
from torch import nn

import hf_lgelu
from hf_lgelu.models.profile import swap_errors
from hf_lgelu.models.sites import lambda_gelu_modules

every_way = pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("bert", "gpt2", "t5", "timm-wrapper-resnet18")),
        *(("bert", {"granularity": granularity}) for granularity in ("channel", "network")),
    ],
)


def relu_forward(family, **options):
    """(the network with ReLU forward, the logits of the same weights with nn.ReLU)."""
    model = family.build()
    relu = family.build()
    relu.load_state_dict(model.state_dict())
    hf_lgelu.substitute_relu(relu, kinds=("gelu", "silu"), rewrite_config=False)
    hf_lgelu.replace_activations(model, forward="relu", inputs=family.inputs(), **options)
    return model, logits_of(relu, family.inputs())


@every_way
def test_it_is_the_relu_network_saved_and_loaded_and_substituted(tmp_path, name, options):
    family = BY_NAME[name]
    model, wanted = relu_forward(family, **options)
    assert torch.equal(logits_of(model, family.inputs()), wanted)
    with torch.no_grad():
        for index, (_, module) in enumerate(lambda_gelu_modules(model)):
            module.raw_hardness.add_(0.1 * (index + 1))  # λ is in the gradients alone
    hf_lgelu.anneal_hardness(model, 0.5)
    assert torch.equal(logits_of(model, family.inputs()), wanted)
    assert swap_errors(model) == dict.fromkeys(swap_errors(model), 0.0)
    model.save_pretrained(tmp_path / "soft")
    loaded = hf_lgelu.from_pretrained(family.model_class, tmp_path / "soft")
    assert {module.forward_mode for _, module in lambda_gelu_modules(loaded)} == {"relu"}
    assert hf_lgelu.hardness_profile(loaded) == hf_lgelu.hardness_profile(model)
    assert torch.equal(logits_of(loaded, family.inputs()), wanted)
    hf_lgelu.substitute_relu(loaded)
    loaded.save_pretrained(tmp_path / "relu")
    text = (tmp_path / "relu" / "config.json").read_text()
    assert "lambda_" not in text
    assert torch.equal(logits_of(family.model_class.from_pretrained(tmp_path / "relu"), family.inputs()), wanted)


def test_the_string_alone_builds_it_and_says_which():
    config = hf_lgelu.MLPConfig(num_features=4, hidden_size=8, hidden_act="lambda_silu_relu")
    model = hf_lgelu.MLPForClassification(config)
    assert {type(module).__name__ for _, module in lambda_gelu_modules(model)} == {"LambdaSiLU"}
    assert {module.forward_mode for _, module in lambda_gelu_modules(model)} == {"relu"}
    report = hf_lgelu.substitute_relu(model)
    assert [str(change) for change in report.config_changes] == ["hidden_act: 'lambda_silu_relu' → 'relu'"]


def test_the_key_of_a_checkpoint_tells_it_from_the_soft_gate(tmp_path):
    model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, hidden_act="gelu"))
    hf_lgelu.replace_activations(model, forward="relu")
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_act"] == "lambda_gelu_relu"


def test_relu_and_soft_gates_side_by_side_keep_their_places(tmp_path):
    model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, hidden_act="gelu"))
    hf_lgelu.replace_activations(model, include=lambda name: ".1." in name)
    hf_lgelu.replace_activations(model, forward="relu")
    modes = [module.forward_mode for _, module in lambda_gelu_modules(model)]
    assert modes == ["relu", "gate", "relu", "relu"]
    x = torch.randn(3, 4)
    model.save_pretrained(tmp_path)
    loaded = hf_lgelu.from_pretrained(hf_lgelu.MLPForClassification, tmp_path)
    assert [module.forward_mode for _, module in lambda_gelu_modules(loaded)] == modes
    assert torch.equal(loaded(x).logits, model(x).logits)


def test_it_counts_as_hard_and_leaves_without_a_change(tmp_path):
    torch.manual_seed(0)
    model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8))
    soft = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8))
    hf_lgelu.replace_activations(model, kinds=("lambda_gelu",), forward="relu")
    assert hf_lgelu.is_hardened(model, fraction=1.0)
    assert not hf_lgelu.is_hardened(soft)
    x = torch.randn(16, 4)
    certificate = hf_lgelu.certify_substitution(model, x)
    assert certificate.bound == certificate.measured == 0.0
    assert [(site.bound, site.measured) for site in certificate.sites] == [(0.0, 0.0)] * 4
    report = hf_lgelu.export_relu(model, tmp_path / "relu", inputs=x)
    assert report.change.max_change == 0.0
    hf_lgelu.export_onnx(model, tmp_path / "model.onnx", inputs=x)
    graph = onnx.load(tmp_path / "model.onnx").graph
    operations = Counter(node.op_type for node in graph.node)
    assert operations["Relu"] == 4
    assert not operations.keys() & {"Erf", "Sigmoid", "Tanh", "Softplus"}
    with pytest.raises(ValueError, match="forward must be one of gate, relu"):
        hf_lgelu.replace_activations(nn.Sequential(nn.GELU()), forward="hard")
