"""hf-lgelu export end to end on a small trained MLP: every target, the card, what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from torch import nn
from transformers import (
    AutoTokenizer,
    BertModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
)

import hf_lgelu
from hf_lgelu import substitute_relu
from hf_lgelu.export.onnx_run import OnnxModel
from hf_lgelu.models.checkpoint import load_checkpoint
from hf_lgelu.models.hardening import anneal_hardness, hardness_profile
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification


def test_relu_checkpoint_with_its_scores_and_card(place, test_rows, tmp_path, call):
    words = ("export", place / "hard", "--output_dir", tmp_path / "relu", "--evaluation", place / "test.csv")
    status, said, errors = call(*words, "--disable_tqdm")
    assert (status, errors) == (0, "")
    assert {path.name for path in (tmp_path / "relu").iterdir()} == {
        "config.json", "model.safetensors", "README.md",
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["relu"]
    features, labels = test_rows
    model = load_checkpoint(tmp_path / "relu")
    assert [type(layer.activation) for layer in model.layers] == [nn.ReLU] * 2
    before, after = (
        (network(features).logits.argmax(-1) == labels).double().mean().item()
        for network in (load_checkpoint(place / "hard"), model)
    )
    table = [line.split() for line in said[said.index("test.csv:\n") :].splitlines()[1:4]]
    assert [row[:3] for row in table[1:]] == [
        ["original", "float32", f"{before:.4f}"],
        ["converted", "float32", f"{after:.4f}"],
    ]
    assert "2 λ-gates → relu\n" in said
    card = ModelCard.load(tmp_path / "relu" / "README.md")
    assert card.data.license is None  # nobody stated one
    assert "159.6" in card.text
    top = card.text.split("\n\n")[:2]
    assert top[0] == "\n# hard-relu"
    assert top[1].startswith("| network | KL to the original (nats) | same prediction | accuracy |\n")
    assert f"\n| original | 0 | 100 % | {before:.4f} |\n| this model | " in top[1]
    assert top[1].endswith(f" | {after:.4f} |")


def test_gelu_checkpoint_computes_the_same(place, test_rows, tmp_path, call):
    status, said, _ = call("export", place / "soft", "--output_dir", tmp_path / "gelu", "--to", "gelu")
    assert status == 0
    assert "These inputs are random; give real ones by --evaluation DATA." in said
    exported = load_checkpoint(tmp_path / "gelu")
    assert exported.config.hidden_act == "gelu"
    before, after = (model(test_rows[0]).logits for model in (load_checkpoint(place / "soft"), exported))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "gelu" / "README.md").exists()


@pytest.mark.parametrize("activation", ["soft", "gelu", "relu"])
def test_a_network_goes_to_onnx_as_it_is(activation, place, test_rows, tmp_path, call):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = load_checkpoint(place / ("soft" if activation == "soft" else "gelu"))
    if activation == "relu":
        substitute_relu(model, kinds=("gelu",))
        model.bfloat16()  # the file is of a copy in float32
    model.save_pretrained(tmp_path / "model")
    status, _, errors = call("export", tmp_path / "model", "--output_dir", tmp_path / "onnx", "--to", "onnx")
    assert status == 0, errors
    assert {path.name for path in (tmp_path / "onnx").iterdir()} == {"config.json", "model.onnx"}
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {"features": test_rows[0].numpy()})[0])
    torch.testing.assert_close(found, model.eval().float()(test_rows[0]).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("outliers", [False, True])
def test_int8_is_judged_and_what_is_worse_is_not_there(outliers, place, test_rows, tmp_path, call):
    """The outliers change nothing in float32: half of the units are 3,000 times as large, and read by as much less."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model = load_checkpoint(place / "gelu")
    substitute_relu(model, kinds=("gelu",))
    with torch.no_grad():
        for layer, behind in ((model.layers[0].linear, model.layers[1].linear),) if outliers else ():
            layer.weight[::2] *= 3000
            layer.bias[::2] *= 3000
            behind.weight[:, ::2] /= 3000
    model.save_pretrained(tmp_path / "model")
    words = ("export", tmp_path / "model", "--to", "int8", "--data", place / "test.csv", "--output_dir")
    status, said, errors = call(*words, tmp_path / "int8", "--original", place / "gelu", "--disable_tqdm")
    assert status == outliers
    last = said.splitlines()[-1]
    assert last.startswith(f"int8: {'worse' if outliers else 'good'}; share of predictions that differ ")
    if outliers:
        assert errors.splitlines()[-1].startswith("hf-lgelu export: Nothing is kept. Give data with more inputs")
        assert "`operations` layers" in errors
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        status, said, _ = call(*words, tmp_path / "int8", "--allow_worse", "--disable_tqdm")
        assert (status, said.splitlines()[-1][:11]) == (0, "int8: worse")
    assert {path.name for path in (tmp_path / "int8").iterdir()} == {
        "config.json", "model.onnx", "model-int8.onnx", "int8.json",
    }  # fmt: skip
    assert f"Saved in {tmp_path / 'int8'}: config.json, int8.json, model-int8.onnx, model.onnx\n" in said
    features, labels = test_rows
    assert f'onnxruntime.InferenceSession("{tmp_path / "int8" / "model-int8.onnx"}"). It takes features.' in said
    judged = json.loads((tmp_path / "int8" / "int8.json").read_text())
    order = torch.from_numpy(np.random.RandomState(0).permutation(100))
    rows = order[[number for number in range(100) if number % 4]]
    of_network = [row for row in judged["rows"] if row["network"] != "original"]
    for name, row in zip(("model.onnx", "model-int8.onnx"), of_network, strict=True):
        path = str(tmp_path / "int8" / name)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        scores = session.run(None, {"features": features[rows].numpy()})[0]
        assert row["metrics"]["accuracy"] == (scores.argmax(1) == labels[rows].numpy()).mean()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("soft", "2 of 2 gates are too soft for ReLU"),
        ("gelu", "its gates are gelu; convert_to_relu(model, data) (hf-lgelu convert) converts these"),
        ("relu", "no λ-GELU that an export could replace; it has no smooth gate"),
    ],
)
def test_what_is_not_to_be_hardened_is_told_what_to_do(model, reason, place, tmp_path, call):
    config = MLPConfig(num_features=5, hidden_act="relu", num_hidden_layers=2)
    MLPForClassification(config).save_pretrained(tmp_path / "relu")
    folder = tmp_path / model if model == "relu" else place / model
    call()  # what was written to stderr until now
    status, _, errors = call("export", folder, "--output_dir", tmp_path / "out", "--disable_tqdm")
    assert status == 1
    assert reason in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_card_names_the_gates_that_stay_smooth(tmp_path, call):
    """A key of the config for the layers, which learn λ, and one for the head, which does not."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = ModernBertConfig(vocab_size=20, **sizes, **ids, hidden_activation="lambda_gelu")
    model = ModernBertForSequenceClassification(config)
    anneal_hardness(model, 1.0)
    model.save_pretrained(tmp_path / "model")
    status, _, errors = call("export", tmp_path / "model", "--output_dir", tmp_path / "relu", "--disable_tqdm")
    assert status == 0, errors
    text = (tmp_path / "relu" / "README.md").read_text()
    assert "- Still smooth:\n  - head.act (GELUActivation): gelu × 1, activation module\n" in text


def test_the_folder_comes_with_its_card_or_not_at_all(place, tmp_path, monkeypatch, call):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_lgelu.cli.export.write_export_card", full)
    status, _, errors = call("export", place / "hard", "--output_dir", tmp_path / "relu", "--disable_tqdm")
    assert status == 1
    assert "No space left on device" in errors
    assert list(tmp_path.iterdir()) == []


def test_push_sends_the_folder_with_its_card(place, tmp_path, pushed, call):
    words = ("export", place / "hard", "--output_dir", tmp_path / "relu", "--push_to_hub", "me/rows", "--private")
    _, said, _ = call(*words)
    assert pushed == [(["README.md", "config.json", "model.safetensors"], "me/rows", True)]
    assert said.endswith("Pushed: http://hub/commit/1\n")
    assert 'from_pretrained(MLPForClassification, "me/rows")' in (tmp_path / "relu" / "README.md").read_text()


def test_a_sentence_transformers_folder_is_hardened_whole(sentence_folder, tmp_path, call):
    import sentence_transformers

    model, texts = sentence_folder
    shutil.copytree(model, tmp_path / "lambda")
    encoder = BertModel.from_pretrained(model, hidden_act="lambda_gelu")
    anneal_hardness(encoder, 1.0)
    encoder.save_pretrained(tmp_path / "lambda")
    assert list(hardness_profile(encoder).values()) == pytest.approx([159.577] * 2, abs=1e-3)
    words = ("export", tmp_path / "lambda", "--output_dir", tmp_path / "relu", "--evaluation", texts)
    status, said, errors = call(*words, "--disable_tqdm")
    assert status == 0, errors
    assert "converted  float32" in said
    hardened = sentence_transformers.SentenceTransformer(str(tmp_path / "relu"), device="cpu")
    assert hardened[1].get_config_dict()["pooling_mode"] == "cls"
    assert "from sentence_transformers import" in (tmp_path / "relu" / "README.md").read_text()
    (tmp_path / "relu" / "sentence_bert_config.json").write_text('{"max_seq_length": 5}')
    hardened = sentence_transformers.SentenceTransformer(str(tmp_path / "relu"), device="cpu")
    words = ("export", tmp_path / "relu", "--output_dir", tmp_path / "onnx", "--to", "onnx", "--opset", "12")
    status, said, errors = call(*words, "--evaluation", texts, "--disable_tqdm")
    assert status == 0, errors
    assert "→ sentence_embedding" in said
    lines = texts.read_text().splitlines()[:5]
    tokens = {name: value for name, value in hardened.preprocess(lines).items() if isinstance(value, torch.Tensor)}
    exported = OnnxModel(tmp_path / "onnx" / "model.onnx")
    (found,) = exported(tokens)
    torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(hardened.encode(lines)), rtol=0, atol=1e-5)
    assert (tmp_path / "onnx" / "tokenizer.json").exists()
    assert set(exported.input_names) == set(tokens)


@pytest.mark.slow
def test_a_sentence_transformers_folder_goes_to_int8_whole(sentence_folder, tmp_path, call):
    model, texts = Path(shutil.copytree(sentence_folder[0], tmp_path / "folder")), sentence_folder[1]
    (model / "sentence_bert_config.json").write_text('{"max_seq_length": 5}')
    # Random inputs that are traced have the names of the texts'.
    status, _, errors = call("export", model, "--output_dir", tmp_path / "random", "--to", "onnx")
    assert status == 0, errors
    names = OnnxModel(tmp_path / "random" / "model.onnx").input_names
    words = ("export", model, "--to", "int8", "--data", texts, "--output_dir", tmp_path / "int8")
    status, said, errors = call(*words, "--original", model, "--disable_tqdm")
    assert status == 0, errors
    assert said.splitlines()[-1].startswith("int8: good; share of nearest neighbours that differ ")
    assert "original   int8" in said
    assert AutoTokenizer.from_pretrained(tmp_path / "int8").model_max_length == 5
    assert set(OnnxModel(tmp_path / "int8" / "model.onnx").input_names) == set(names)


def test_an_encoder_in_a_folder_of_its_own_is_found(sentence_folder, tmp_path, call):
    """As sentence-transformers wrote it before version 3, with modules.json next to 0_Transformer."""
    import sentence_transformers

    old, place = tmp_path / "old", tmp_path / "old" / "0_Transformer"
    shutil.copytree(sentence_folder[0], place)
    for name in ("1_Pooling", "2_Normalize", "modules.json"):
        (place / name).rename(old / name)
    modules = json.loads((old / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (old / "modules.json").write_text(json.dumps(modules))
    encoder = BertModel.from_pretrained(place, hidden_act="lambda_gelu")
    anneal_hardness(encoder, 1.0)
    encoder.save_pretrained(place)
    status, _, errors = call("export", old, "--output_dir", tmp_path / "relu", "--disable_tqdm")
    assert status == 0, errors
    assert json.loads((tmp_path / "relu" / "config.json").read_text())["hidden_act"] == "relu"
    found = sentence_transformers.SentenceTransformer(str(tmp_path / "relu"), device="cpu").encode("the cat")
    soft = hf_lgelu.from_pretrained(sentence_transformers.SentenceTransformer, str(old), device="cpu")
    assert found == pytest.approx(soft.encode("the cat"), abs=1e-2)


def test_a_network_of_timm_in_its_wrapper_is_judged_on_a_folder_of_images(tmp_path, call):
    """Saved as docs/convert.md says; the size of the images is that of the config, and not timm's default of 224."""
    timm, generator = pytest.importorskip("timm"), np.random.default_rng(0)
    sizes = {"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 8)}
    torch.manual_seed(0)
    network = timm.create_model("resnet18", num_classes=3, **sizes)
    images = network.pretrained_cfg | {"input_size": (3, 32, 32)}
    config = TimmWrapperConfig(architecture="resnet18", num_labels=3, pretrained_cfg=images, model_args=sizes)
    wrapper = TimmWrapperForImageClassification(config)
    wrapper.timm_model.load_state_dict(network.state_dict())
    wrapper.save_pretrained(tmp_path / "timm")
    (tmp_path / "images").mkdir()
    for number in range(24):
        pixels = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((40, 40)).save(tmp_path / "images" / f"{number}.png")
    for to, data in (("onnx", ()), ("int8", ("--data", tmp_path / "images", "--allow_worse"))):
        words = ("export", tmp_path / "timm", "--to", to, *data, "--output_dir", tmp_path / to, "--disable_tqdm")
        status, said, errors = call(*words)
        assert status == 0, errors
        (given,) = onnx.load(tmp_path / to / "model.onnx").graph.input
        assert [size.dim_value for size in given.type.tensor_type.shape.dim[1:]] == [3, 32, 32]
    assert said.splitlines()[-1].startswith("int8: worse; relative error ")  # of random weights
