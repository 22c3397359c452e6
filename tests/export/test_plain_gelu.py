"""export_gelu: the folder, what loads it elsewhere, what is measured, and what is refused."""

import pytest
import torch
import transformers
from gelu_models import GPT2, IMAGES, TOKENS, logits_of, timm, trained
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from scipy.special import ndtr
from torch import nn

from hf_lgelu import LambdaGELU, MLPConfig, MLPForClassification, replace_activations
from hf_lgelu.export.absorption import absorb as absorption
from hf_lgelu.export.onnx.onnx_export import save_onnx
from hf_lgelu.export.plain import export_gelu
from hf_lgelu.models.config_keys import ConfigChange, UnsupportedConfigError


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    config = MLPConfig(num_features=6, hidden_size=8, num_hidden_layers=3, num_labels=4)
    return trained(MLPForClassification(config))


FEATURES = {"features": torch.randn(50, 6, generator=torch.Generator().manual_seed(3))}


def test_the_mlp_by_hand(mlp, tmp_path):
    export = export_gelu(mlp, tmp_path / "gelu", inputs=FEATURES)
    weights = {n: t.double().numpy() for n, t in load_file(tmp_path / "gelu" / "model.safetensors").items()}
    hidden = FEATURES["features"].double().numpy()
    for layer in range(3):
        hidden = hidden @ weights[f"layers.{layer}.linear.weight"].T + weights[f"layers.{layer}.linear.bias"]
        hidden = hidden * ndtr(hidden)
    by_hand = torch.from_numpy(hidden @ weights["classifier.weight"].T + weights["classifier.bias"])
    expected = logits_of(mlp.double(), {"features": FEATURES["features"].double()})
    assert (by_hand - expected).abs().max() < 2e-6 * expected.abs().max()
    assert [(s.name, s.multiplied, s.divided) for s in export.sites] == [
        ("layers.0.activation", ("layers.0.linear.weight",), ("layers.1.linear.weight",)),
        ("layers.1.activation", ("layers.1.linear.weight",), ("layers.2.linear.weight",)),
        ("layers.2.activation", ("layers.2.linear.weight",), ("classifier.weight",)),
    ]
    assert export.config_changes == (ConfigChange(("hidden_act",), "lambda_gelu", "gelu"),)
    assert "layers.2.activation: λ = 20, layers.2.linear.weight × λ, classifier.weight / λ" in str(export)
    assert "config hidden_act: 'lambda_gelu' → 'gelu'" in str(export)


def test_weights_keep_their_dtype_and_the_change_is_measured_in_float32(mlp, tmp_path):
    half = mlp.to(torch.bfloat16)
    export = export_gelu(half, tmp_path / "gelu", inputs=FEATURES)
    assert {t.dtype for t in load_file(tmp_path / "gelu" / "model.safetensors").values()} == {torch.bfloat16}
    # λ = 1.5 and 3 round the weights anew; the arithmetic of bfloat16 itself would add more.
    assert 1e-4 < export.relative_change < 2e-2
    report = save_onnx(half, tmp_path, inputs=FEATURES)  # of a copy in float32
    assert report.max_abs_difference < 1e-4 * max(1.0, report.largest_output)
    loaded = MLPForClassification.from_pretrained(tmp_path / "gelu", dtype=torch.float32)
    expected = logits_of(half.float(), FEATURES)
    assert export.change.max_change == pytest.approx(
        (logits_of(loaded, FEATURES) - expected).abs().max().item(), rel=1e-3
    )


def resnet():
    config = transformers.TimmWrapperConfig(**timm("resnet18", {"layers": [1] * 4, "channels": [8, 8, 16, 16]}))
    return transformers.TimmWrapperForImageClassification(config)


def gpt():
    model = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**GPT2))  # its "gelu" is the tanh form
    replace_activations(model, gate="lambda_gelu")
    return model


def adapted():
    return get_peft_model(
        MLPForClassification(MLPConfig(num_features=6)), LoraConfig(target_modules=["layers.0.linear"])
    )


REFUSED = [
    (resnet, IMAGES, ValueError, "export_relu"),
    (gpt, TOKENS, UnsupportedConfigError, r"OpenAIGPTConfig.*rewrite_config=False"),
    (adapted, FEATURES, RuntimeError, r"is PeftModel of PEFT.*merge_and_unload"),
    (
        lambda: nn.Sequential(nn.Linear(3, 4), LambdaGELU()),
        torch.ones(1, 3),
        TypeError,
        "got Sequential; absorb_hardness",
    ),
    (
        lambda: MLPForClassification(MLPConfig(num_features=6, hidden_act="gelu")),
        FEATURES,
        ValueError,
        "has no λ-GELU for export_gelu",
    ),
]


@pytest.mark.parametrize(("make", "inputs", "error", "told"), REFUSED)
def test_what_is_refused_leaves_nothing(make, inputs, error, told, tmp_path):
    with pytest.raises(error, match=told) as caught:
        export_gelu(make(), tmp_path / "gelu", inputs=inputs)
    if make is resnet:
        named = [line.strip().partition(":")[0] for line in str(caught.value).split("\n")[1:-1]]
        # A ResNet of four blocks: the stem's, used by the shortcut as well, and the one behind each sum
        blocks = [f"timm_model.layer{layer}.0.act2" for layer in (1, 2, 3, 4)]
        assert named == ["timm_model.act1", *blocks]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            lambda model: setattr(model.config, "hidden_act", "gelu_new"),
            "reloaded GELU model computes something else",
        ),
        (lambda model: model.classifier.bias.data.mul_(1.5), "computes something else than the λ-GELU model"),
    ],
)
def test_a_folder_that_computes_something_else_is_not_kept(fault, told, mlp, tmp_path, monkeypatch):
    absorb = absorption.absorb_hardness
    monkeypatch.setattr(absorption, "absorb_hardness", lambda model, inputs: (absorb(model, inputs), fault(model))[0])
    with pytest.raises(RuntimeError, match=f"{told}.*: largest change"):
        export_gelu(mlp, tmp_path / "gelu", inputs=FEATURES)
    assert list(tmp_path.iterdir()) == []


def test_a_half_precision_network_that_casts_nothing_is_exported(tmp_path):
    """ConvNeXt's convolutions take their own dtype alone."""
    sizes = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "image_size": 32, "hidden_act": "lambda_gelu"}
    torch.manual_seed(0)
    model = transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**sizes)).bfloat16()
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    export = export_gelu(model, tmp_path / "given", inputs=images)
    assert export.relative_change < 0.02
    assert export.change.rows == 3
