"""What is no module, and tensors without numbers in rows, are refused in words by every function that takes them."""

import math

import pytest
import torch

from hf_lgelu import (
    MLPConfig,
    MLPForClassification,
    anneal_hardness,
    export_gelu,
    export_onnx,
    export_relu,
    fold_hardness,
)

ROWS = torch.randn(8, 3)
TAKING = {
    "export_relu": lambda model, inputs, folder: export_relu(model, folder, inputs=inputs),
    "export_gelu": lambda model, inputs, folder: export_gelu(model, folder, inputs=inputs),
    "fold_hardness": lambda model, inputs, folder: fold_hardness(model, inputs),
    "export_onnx": lambda model, inputs, folder: export_onnx(model, folder, inputs),
}
NEEDS_LAMBDA = ("export_relu", "export_gelu", "fold_hardness")


def model_for(name):
    act = "lambda_gelu" if name in NEEDS_LAMBDA else "relu"
    model = MLPForClassification(MLPConfig(num_features=3, hidden_size=4, num_hidden_layers=1, hidden_act=act))
    if act == "lambda_gelu":
        anneal_hardness(model, 1.0)
    return model.eval()


@pytest.mark.parametrize("model", [None, "model", 3, [torch.nn.Linear(2, 2)]], ids=["None", "text", "number", "list"])
@pytest.mark.parametrize("name", TAKING)
def test_what_is_no_module(name, model, tmp_path):
    with pytest.raises(TypeError, match=f"got {type(model).__name__}"):
        TAKING[name](model, ROWS, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["meta", "sparse", "quantized"])
@pytest.mark.parametrize("name", TAKING)
@pytest.mark.filterwarnings("ignore")  # torch's, of its quantized tensors
def test_tensors_without_numbers_in_rows(name, kind, tmp_path):
    inputs = {
        "meta": lambda: ROWS.to("meta"),
        "sparse": lambda: ROWS.to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(ROWS, 0.1, 0, torch.qint8),
    }[kind]()
    with pytest.raises(TypeError, match="dense tensors of numbers"):
        TAKING[name](model_for(name), inputs, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["export_relu", "export_gelu", "export_onnx"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [(ROWS[:0], "at least one row|at least 1|N ≥ 1"), (ROWS * math.nan, "NaN|by nan")],
    ids=["empty", "nan"],
)
def test_no_rows_and_nan_measure_nothing(name, rows, message, tmp_path):
    with pytest.raises((ValueError, RuntimeError), match=message):
        TAKING[name](model_for(name), rows, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
