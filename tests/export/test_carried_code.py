"""An MLP's folder with its own source, read where hf_lgelu cannot be imported; and the plain way without any code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config

from hf_lgelu.export.hub.loading import CheckpointFacts, attach_model_code, with_carried_code, without_hf_lgelu
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

# None in sys.modules makes the import fail as if the package were not there.
_ELSEWHERE = """
import sys
sys.modules["hf_lgelu"] = None
import torch
features = torch.load({features!r}, weights_only=True)
plain = {{}}
exec({plain!r}, plain)
carried = {{}}
exec({carried!r}, carried)
with torch.no_grad():
    torch.save([plain["model"](features), carried["model"](features=features).logits], {logits!r})
assert sys.modules["hf_lgelu"] is None
"""


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = MLPConfig(num_features=5, hidden_size=16, num_hidden_layers=3, num_labels=4, hidden_act="relu")
    MLPForClassification(config).save_pretrained(tmp_path / "relu")
    return tmp_path / "relu"


def by_hand(folder, features):
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    hidden = features.double()
    for layer in range(3):
        hidden = (hidden @ weights[f"layers.{layer}.linear.weight"].T + weights[f"layers.{layer}.linear.bias"]).clamp(0)
    return hidden @ weights["classifier.weight"].T + weights["classifier.bias"]


def test_both_ways_give_the_logits_without_hf_lgelu(folder, tmp_path):
    code = attach_model_code(folder)
    assert code == folder / "mlp.py"
    features = torch.randn(20, 5)
    torch.save(features, tmp_path / "features.pt")
    plain = without_hf_lgelu(CheckpointFacts("MLPForClassification", layers=3), str(folder), activation="relu")
    source = _ELSEWHERE.format(
        features=str(tmp_path / "features.pt"), plain=plain, carried=with_carried_code(str(folder)),
        logits=str(tmp_path / "logits.pt"),
    )  # fmt: skip
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", source], cwd=folder, env=environment, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    expected = by_hand(folder, features)
    for logits in torch.load(tmp_path / "logits.pt", weights_only=True):
        torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-6)


def test_config_names_the_code_and_keeps_the_rest(folder):
    before = json.loads((folder / "config.json").read_text())
    attach_model_code(folder)
    after = json.loads((folder / "config.json").read_text())
    assert after.pop("auto_map") == {"AutoConfig": "mlp.MLPConfig", "AutoModel": "mlp.MLPForClassification"}
    assert after == before
    # what this process saves later carries nothing
    other = folder.with_name("other")
    MLPForClassification(MLPConfig(num_features=2, hidden_act="relu")).save_pretrained(other)
    assert not (other / "mlp.py").exists()


def test_other_models_and_lambda_gelu_are_refused(tmp_path):
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="type 'gpt2'; only 'lgelu_mlp' has code to carry"):
        attach_model_code(tmp_path / "gpt2")
    MLPConfig(num_features=2).save_pretrained(tmp_path / "soft")
    with pytest.raises(ValueError, match="export the model with export_relu or export_gelu first"):
        attach_model_code(tmp_path / "soft")
    assert [path.name for path in Path(tmp_path / "soft").iterdir()] == ["config.json"]
