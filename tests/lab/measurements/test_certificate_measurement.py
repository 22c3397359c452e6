"""Rows of the certificate measurement against the two networks run side by side, on a tiny MLP."""

from types import SimpleNamespace

import pytest
import torch
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.measurements.certificate import CERTIFICATE, CERTIFICATE_COLUMNS

from hf_lgelu.models.mlp import MLPConfig, MLPForClassification


def network_of(activation):
    torch.manual_seed(0)
    config = MLPConfig(num_features=3, hidden_size=4, num_hidden_layers=2, hidden_act=activation, num_labels=2)
    return MLPForClassification(config).eval()


def measured(features, *activations):
    data = SimpleNamespace(test=SimpleNamespace(features=features))
    models = {name: SimpleNamespace(load=lambda name=name: network_of(name)) for name in activations}
    return CERTIFICATE.measure(models, BENCHMARKS["mlp-digits"], data, CERTIFICATE.settings(batch_size=5))


def test_certificate_rows():
    features = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    (row,) = measured(features, "lambda_gelu")
    smooth, relu = network_of("lambda_gelu").double(), network_of("relu").double()
    relu.load_state_dict(smooth.state_dict(), strict=False)
    with torch.no_grad():
        before, after = smooth(features.double()).logits, relu(features.double()).logits
    hardness = [float(layer.activation.hardness.detach()) for layer in smooth.layers]
    weights = [layer.linear.weight.detach().abs() for layer in smooth.layers] + [
        smooth.classifier.weight.detach().abs()
    ]
    kappa = 0.1699712075
    carried = weights[2] @ (
        weights[1] @ torch.full((4,), kappa / hardness[0], dtype=torch.float64) + kappa / hardness[1]
    )

    assert row.keys() == CERTIFICATE_COLUMNS.keys()
    assert row["model"] == "lambda_gelu"
    assert row["rows"] == 12
    assert row["measured"] == pytest.approx(float((before - after).abs().max()), rel=1e-6)
    assert row["bound"] == pytest.approx(float(carried.max()), rel=1e-6)
    assert row["gate_bound"] == pytest.approx(kappa / min(hardness), rel=1e-6)
    assert 0 < row["measured_gate_error"] <= row["gate_bound"]
    assert row["bound"] >= row["input_bound"] >= row["measured"] > 0
    assert row["ratio"] == pytest.approx(row["bound"] / row["measured"])
    assert row["input_ratio"] == pytest.approx(row["input_bound"] / row["measured"])
    same = float((before.argmax(1) == after.argmax(1)).double().mean())
    assert row["unchanged_predictions"] == pytest.approx(same)
    assert 0 <= row["certified_fraction"] <= row["unchanged_predictions"]
