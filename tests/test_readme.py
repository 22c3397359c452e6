"""The README's Python runs, in its order, word for word but for the names of what a reader has."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import hf_lgelu

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def block_with(text, language="python"):
    (found,) = [block for block in blocks(language) if text in block]
    return found


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


@pytest.fixture
def batch():
    return {"input_ids": torch.randint(0, 50, (2, 8)), "labels": torch.tensor([0, 1])}


@pytest.fixture
def bert():
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    return BertForSequenceClassification(config)


def test_the_diff_trains_hardens_and_leaves_a_relu_checkpoint():
    added = "".join(line[1:] for line in block_with("+import", "diff").splitlines(keepends=True) if line[0] != "-")
    small = added.replace("n_layer=4, n_embd=128, n_head=4", "n_layer=2, n_embd=16, n_head=2, vocab_size=50")
    small = small.replace('"out", ', '"out", use_cpu=True, disable_tqdm=True, ')
    assert small.count("use_cpu") == 1
    assert "vocab_size=50" in small
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (16, 8)).tolist()]
    names = {"train_data": rows, "test_data": rows[:5]}
    exec(small, names)
    evaluations = [entry for entry in names["trainer"].state.log_history if "eval_relu_loss" in entry]
    assert len(evaluations) == 8
    assert evaluations[-1]["eval_relu_max_logit_change"] < 1e-2
    exec(block_with("AutoModelForCausalLM"), names)
    assert names["model"].config.activation_function == "relu"


def test_a_gelu_checkpoint_then_surgery_then_the_check(bert, batch, capsys):
    bert.save_pretrained("your/bert")
    names = {"hf_lgelu": hf_lgelu, "batch": batch}
    exec(block_with("hidden_act="), names)
    assert list(hf_lgelu.hardness_profile(names["model"]).values()) == pytest.approx([1.0067, 2.0], rel=1e-6)
    names["model"] = bert
    exec(block_with('granularity="channel"'), names)
    assert "2 activations replaced" in capsys.readouterr().out
    assert [tuple(p.shape) for n, p in names["model"].named_parameters() if "raw" in n] == [(32,), (32,)]
    exec(block_with("find_smooth_calls"), names)
    assert (
        "bert.pooler.activation (Tanh): tanh × 1, activation module that surgery leaves alone"
        in capsys.readouterr().out
    )


def test_a_model_is_converted_without_training(bert, capsys):
    with torch.no_grad():
        for parameter in bert.parameters():
            parameter.mul_(3)  # or its gates hardly matter
    rows = torch.randint(0, 50, (128, 8))
    names = {"hf_lgelu": hf_lgelu, "model": bert, "loader": DataLoader([{"input_ids": row} for row in rows])}
    exec(block_with("convert_to_relu"), names)
    assert "2 gates (GELUActivation) became ReLU" in capsys.readouterr().out
    assert BertForSequenceClassification.from_pretrained("out/relu").config.hidden_act == "relu"
    assert bert.config.hidden_act == "gelu"
    assert names["report"].held_out.refitted.kl < names["report"].held_out.direct.kl


def test_the_accelerate_loop_ends_at_the_target_with_relu(bert):
    hf_lgelu.replace_activations(bert)
    rows = [{"input_ids": torch.randint(0, 50, (8,)), "labels": torch.tensor(i % 2)} for i in range(8)]
    names = {"hf_lgelu": hf_lgelu, "model": bert, "loader": DataLoader(rows, batch_size=4), "epochs": 4}
    loop = block_with("Accelerator()").replace("Accelerator()", "Accelerator(cpu=True)")
    loop, substitution = loop.rsplit("hf_lgelu.substitute_relu", 1)
    exec(loop, names)
    assert list(hf_lgelu.hardness_profile(bert).values()) == pytest.approx([hf_lgelu.hardness_for_tolerance()] * 2)
    exec("hf_lgelu.substitute_relu" + substitution, names)
    assert bert.config.hidden_act == "relu"


def test_after_hardening_every_tool_runs(capsys):
    mlp = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    mlp.layers[0].linear.bias.data[3] = -100.0  # never fires on the inputs below
    hf_lgelu.anneal_hardness(mlp, 1.0)
    inputs = torch.randn(20, 4)
    names = {"model": mlp, "inputs": inputs}
    exec(block_with("certify_substitution"), names)
    assert "predictions equal" in capsys.readouterr().out
    relu = hf_lgelu.MLPForClassification.from_pretrained("out/relu").eval()
    labels = relu(inputs).logits.argmax(-1)
    names |= {"relu": relu, "labels": labels, "calibration_batches": [{"features": inputs}], "batches": [inputs]}
    answers = [eval(line.partition("  # ")[0], names) for line in block_with("quantize_onnx").splitlines()]
    onnx, int8, robustness, pruned, pieces = answers
    assert onnx.max_abs_difference < 1e-5
    assert (int8.activations, int8.float_activations) == (2, 0)
    assert {result.status for result in robustness.results} <= {"proved", "refuted"}
    assert 3 in pruned.removed["layers.0.linear"]
    torch.testing.assert_close(pieces.apply(inputs), relu.double()(inputs.double()).logits, rtol=0, atol=1e-12)


def test_every_python_block_was_run():
    assert len(blocks("python")) == 8, "a new block needs a test here"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)\)", README))))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists()
