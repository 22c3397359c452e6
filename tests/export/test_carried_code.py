"""An MLP's folder with its own source, read where hf_lgelu cannot be imported; and the plain way without any code."""

import json
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

from hf_lgelu.activation.gates import GATES
from hf_lgelu.export.hub.loading import attach_model_code
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.models.sites import SMOOTH_KINDS
from hf_lgelu.models.surgery import replace_activations
from hf_lgelu.refit.config import read_target
from hf_lgelu.refit.plan import substitute_gates


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = MLPConfig(num_features=5, hidden_size=16, num_hidden_layers=3, num_labels=4, hidden_act="relu")
    MLPForClassification(config).save_pretrained(tmp_path / "relu")
    return tmp_path / "relu"


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
    for gate in GATES:
        MLPConfig(num_features=2, hidden_act=gate).save_pretrained(tmp_path / "soft")
        with pytest.raises(ValueError, match="export the model with export_relu or export_gelu first"):
            attach_model_code(tmp_path / "soft")
    assert [path.name for path in Path(tmp_path / "soft").iterdir()] == ["config.json"]


def test_gates_that_the_config_alone_does_not_build_are_refused(tmp_path):
    """The file would fail on them, or with a slope build other gates."""
    for name in ("several", "kept", "slope"):
        model = MLPForClassification(MLPConfig(num_features=2, hidden_size=3, num_hidden_layers=2, hidden_act="gelu"))
        if name == "several":
            replace_activations(model, granularity="channel", inputs=torch.zeros(1, 2))
        elif name == "kept":
            substitute_gates(model, read_target("relu"), kinds=SMOOTH_KINDS, keep=["layers.0.activation"])
        else:
            substitute_gates(model, read_target("leaky_relu:0.1"), kinds=SMOOTH_KINDS)
        model.save_pretrained(tmp_path / name)
        before = (tmp_path / name / "config.json").read_bytes()
        with pytest.raises(ValueError, match=f"{name} has gates that its config alone does not build"):
            attach_model_code(tmp_path / name)
        assert (tmp_path / name / "config.json").read_bytes() == before
        assert not (tmp_path / name / "mlp.py").exists()
