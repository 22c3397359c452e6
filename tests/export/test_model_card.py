"""Model cards: a whole one against expected_card.md, and what each says of its network."""

import dataclasses
import struct
import tomllib
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import ModelCard
from lgelu_lab.benchmarks.cifar_resnet import new_cifar_resnet
from lgelu_lab.studies.records import EpochRecord, RunRecord
from safetensors.torch import load_file
from transformers import TimmWrapperForImageClassification

from hf_lgelu import anneal_hardness
from hf_lgelu.export.hub.checkpoint_facts import CheckpointFacts, facts_of_folder, facts_of_record
from hf_lgelu.export.hub.model_card import TEMPLATE, render_card, write_card, write_record_card
from hf_lgelu.export.relu import export_relu
from hf_lgelu.models.comparison import OutputChange
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

ROOT = Path(__file__).parents[2]
SECRET = "/home/alice/private/hf_models/gpt2-ours"

RECORD = RunRecord(
    name="study/mlp-adult/lambda_gelu-increasing-hardened-seed3",
    created="2026-03-04T05:06:07+00:00",
    seconds=1234.5,
    config={
        "benchmark": "mlp-adult", "activation": "lambda_gelu", "init_mode": "increasing", "init_hardness": 1.0067,
        "high_hardness": 2.0, "temperature": 0.1, "hardness_lr_multiplier": 9.0, "harden": True,
        "target_hardness": 159.57691216057307, "tolerance": None, "switch_fraction": 0.25,
        "hardening_schedule": "linear", "hardening_strategy": "epoch", "seed": 3, "optim": "sgd",
        "optim_args": None, "learning_rate": 0.05, "weight_decay": 1e-4, "lr_scheduler_type": "constant",
        "warmup_steps": 0, "max_grad_norm": 0.0, "num_train_epochs": 2, "max_steps": -1,
        "gradient_accumulation_steps": 1, "bf16": False, "train_batch_size": 512, "validation_fraction": 0.1,
        "max_train_samples": 20000, "max_eval_samples": None, "pretrained": None,
    },
    data={
        "train_samples": 20000, "eval_samples": 3256, "eval_split": "validation (held out of train)",
        "source": "scikit-learn/adult-census-income", "classes": 2,
    },
    model={"class": "MLPForClassification", "parameters": 225796, "activation_sites": 2},
    metric="accuracy",
    greater_is_better=True,
    initial_hardness={"layers.0.activation": 1.0067, "layers.1.activation": 2.0},
    epochs=(
        EpochRecord(1.0, 0.9, 0.2, 0.8, 0.3, 5.0, 0.5, {"layers.0.activation": 1.5, "layers.1.activation": 2.5}),
        EpochRecord(
            2.0, 0.85678, 0.31234, 0.85647, 0.31239, 0.00246, 0.99996,
            {"layers.0.activation": 159.57691, "layers.1.activation": 80.0},
        ),
    ),
    versions={"python": "3.11.7", "torch": "2.15.0"},
    hardware={
        "cpu": "AMD EPYC", "cpu_cores": 2, "accelerators": ["NVIDIA X"], "processes": 2, "threads_per_process": 1,
        "platform": "Linux-6.1.0-alices-laptop-x86_64-with-glibc2.36",
    },
)  # fmt: skip


def with_config(**changes):
    return dataclasses.replace(RECORD, config={**RECORD.config, **changes})


def test_whole_card():
    card = render_card(
        RECORD, figure="hardness.png", repo_id="someone/adult-relu", license="apache-2.0",
        change=OutputChange(max_change=0.00123, largest_output=4.5, unchanged_predictions=1.0, rows=64),
    )  # fmt: skip
    expected = (Path(__file__).parent / "expected_card.md").read_text(encoding="utf-8")
    assert f"{card}\n" == expected


@pytest.mark.parametrize("export", ["relu", "gelu", "lambda_gelu"])
def test_header_survives_huggingface_hub(export):
    card = render_card(RECORD, export=export, repo_id="someone/adult", license="mit", base_model="a/b")
    data = ModelCard(str(card)).data
    assert data.license == "mit"
    assert data.base_model == "a/b"
    assert data.datasets == ["scikit-learn/adult-census-income"]
    assert data.pipeline_tag == "tabular-classification"
    (result,) = data.eval_results
    assert result.metric_value == {"relu": 0.8565, "gelu": 0.8568, "lambda_gelu": 0.8568}[export]
    assert (result.metric_type, result.dataset_split, data.model_name) == ("accuracy", "validation", "adult")
    assert ("relu" in data.tags) == (export == "relu")


def test_each_form_says_what_it_is():
    relu, gelu, soft = (render_card(RECORD, export=export).text for export in ("relu", "gelu", "lambda_gelu"))
    assert "has ReLU in the place of each gate" in relu
    assert "torch.nn.ReLU()" in relu
    assert "plain GELU computes the same function" in gelu
    assert "torch.nn.GELU()" in gelu
    assert "Without hf_lgelu" not in soft
    assert "| λ-GELU, as trained (this model) | 0.8568 |" in soft
    assert "mlp.py" not in relu
    facts = dataclasses.replace(facts_of_record(RECORD), own_code=True)
    assert "trust_remote_code=True" in render_card(RECORD, checkpoint=facts).text


@pytest.mark.parametrize("path", [SECRET, "./alice/gpt2-ours", "~/alice/gpt2-ours", "C:\\alice\\gpt2-ours"])
def test_of_a_path_only_its_last_part_is_shown(path):
    text = str(render_card(with_config(pretrained=path, output_dir=SECRET, hub_token="hf_abcdefghijkl")))
    assert "| started from | gpt2-ours |" in text
    assert "alice" not in text
    assert "hf_abcdefghijkl" not in text
    assert "base_model" not in text


def test_an_address_is_shown_without_what_is_secret():
    text = str(render_card(with_config(pretrained="https://alice:hf_abcdefghijklm@hub.local/a/gpt2?token=x")))
    assert "| started from | gpt2 |" in text
    assert "alice" not in text
    assert "hub.local" not in text


def test_a_local_folder_that_looks_like_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alice" / "gpt2").mkdir(parents=True)
    assert "alice" not in str(render_card(with_config(pretrained="alice/gpt2")))
    (tmp_path / "ours").mkdir()
    assert render_card(with_config(pretrained="ours")).data.base_model is None
    card = render_card(with_config(pretrained="bob/gpt2"))
    assert "| started from | bob/gpt2 |" in card.text
    assert card.data.base_model == "bob/gpt2"


def test_a_token_that_would_be_shown_stops_the_card():
    with pytest.raises(ValueError, match="access token") as refusal:
        render_card(with_config(pretrained="hf_abcdefghijklm"))
    assert "abcdef" not in str(refusal.value)


def test_a_relu_model_that_was_not_evaluated_has_no_result():
    last = dataclasses.replace(
        RECORD.last, relu_score=None, relu_loss=None, relu_max_logit_change=None, relu_unchanged_predictions=None
    )
    card = render_card(dataclasses.replace(RECORD, epochs=(last,)), repo_id="someone/adult-relu")
    assert ModelCard(str(card)).data.eval_results is None
    assert "| λ-GELU, as trained | 0.8568 |" in card.text
    assert "(this model)" not in card.text


def test_perplexity_and_limits():
    record = dataclasses.replace(
        with_config(
            benchmark="gpt2-wikitext2", max_train_samples=None, max_eval_samples=300, validation_fraction=0.0,
            num_layers=4, context_length=128,
        ),
        metric="perplexity", greater_is_better=False, model={**RECORD.model, "class": "GPT2LMHeadModel"},
        data={**RECORD.data, "source": "Salesforce/wikitext"},
        epochs=(dataclasses.replace(RECORD.last, score=105.64053, relu_score=105.64123),),
    )  # fmt: skip
    text = render_card(record).text
    assert "perplexity (lower is better)" in text
    assert "| ReLU, the same weights (this model) | 105.64 |" in text
    assert "evaluation was limited to 300 samples." in text
    assert "training was limited" not in text
    assert "| context (tokens) | 128 |" in text
    assert "GPT2LMHeadModel.from_pretrained" in text
    assert "no limit was set" in render_card(with_config(max_train_samples=None, validation_fraction=0.0)).text


def test_data_set_that_is_not_on_the_hub():
    record = dataclasses.replace(
        with_config(benchmark="mlp-digits"), data={**RECORD.data, "source": "scikit-learn", "classes": 10}
    )
    data = render_card(record).data
    assert data.datasets is None
    assert (data.eval_results[0].dataset_name, data.eval_results[0].dataset_type) == ("digits", "scikit-learn")


def test_folder_gets_card_and_picture(tmp_path):
    torch.manual_seed(0)
    model = MLPForClassification(MLPConfig(num_features=5, hidden_size=8, num_hidden_layers=2))
    anneal_hardness(model, 1.0)
    report = export_relu(model, tmp_path / "relu")
    path = write_card(tmp_path / "relu", None, hardness=report.hardness, change=report.change, license="mit")
    text = path.read_text(encoding="utf-8")
    assert "## Training" not in text
    assert "There is no record of its training" in text
    assert "| `layers.1.activation` | – | 159.6 | 0.0011 |" in text
    assert f"largest change {report.change.max_change:.3g}" in text
    assert "![Hardness λ of each gate](hardness.png)" in text
    assert str(tmp_path) not in text
    picture = (tmp_path / "relu" / "hardness.png").read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert (picture[:8], width, height) == (b"\x89PNG\r\n\x1a\n", 720, 312)
    assert facts_of_folder(tmp_path / "relu") == CheckpointFacts("MLPForClassification", None, 2, None)
    ModelCard.load(path)


def test_card_of_the_small_resnet_says_how_timm_loads_it(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = new_cifar_resnet("lambda_gelu", [str(i) for i in range(7)], [0.5] * 3, [0.2] * 3).eval()
    anneal_hardness(model, 1.0)
    report = export_relu(model, tmp_path / "relu", inputs={"pixel_values": torch.randn(2, 3, 32, 32)})
    text = write_card(tmp_path / "relu", None, hardness=report.hardness).read_text(encoding="utf-8")
    code = text.partition("Without hf_lgelu:\n\n```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path / "relu")
    names = {}
    exec(code, names)
    assert isinstance(names["model"], timm.models.ResNet)
    expected = TimmWrapperForImageClassification.from_pretrained(tmp_path / "relu")
    pixels = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(names["model"](pixels), expected(pixel_values=pixels).logits, rtol=0, atol=1e-6)
    assert len(load_file(tmp_path / "relu" / "model.safetensors")) == len(names["model"].state_dict())


@pytest.mark.parametrize(("benchmark", "classes"), [("resnet18-cifar10", 10), ("resnet18-cifar100", 100)])
def test_early_records_know_their_classes(benchmark, classes):
    record = dataclasses.replace(
        with_config(benchmark=benchmark),
        data={name: value for name, value in RECORD.data.items() if name != "classes"},
        model={**RECORD.model, "class": "TimmWrapperForImageClassification"},
    )
    assert f'timm.create_model("resnet18", num_classes={classes})' in render_card(record).text


def test_record_card_has_its_picture_beside_it(tmp_path):
    path = write_record_card(RECORD, tmp_path / "adult.md", license="mit")
    assert "![Hardness λ of each gate](figures/adult.png)" in path.read_text(encoding="utf-8")
    assert (tmp_path / "figures" / "adult.png").stat().st_size > 2000
    first = (tmp_path / "figures" / "adult.png").read_bytes()
    write_record_card(RECORD, tmp_path / "adult.md", license="mit")
    assert (tmp_path / "figures" / "adult.png").read_bytes() == first


def test_bad_input():
    with pytest.raises(ValueError, match="unknown export 'onnx'; accepted: relu, gelu, lambda_gelu"):
        render_card(RECORD, export="onnx")
    with pytest.raises(ValueError, match="without a run's record, give checkpoint"):
        render_card(None)
    gelu = dataclasses.replace(RECORD, epochs=(dataclasses.replace(RECORD.last, hardness={}),))
    with pytest.raises(ValueError, match="there is no λ"):
        render_card(gelu)
    assert "None was stated" in render_card(RECORD).text


def test_matplotlib_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"hf-lgelu\[benchmarks\]"):
        write_record_card(RECORD, tmp_path / "adult.md")
    assert not (tmp_path / "adult.md").exists()


def test_the_template_is_one_and_travels_with_the_package():
    assert (ROOT / "model_cards" / "template.md").read_text(encoding="utf-8") == TEMPLATE.read_text(encoding="utf-8")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "deploy/hub/model_card_template.md" in settings["tool"]["setuptools"]["package-data"]["hf_lgelu"]
    citation = TEMPLATE.read_text(encoding="utf-8").partition("```bibtex\n")[2].partition("```")[0]
    assert citation in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_hardened_run_shows_what_its_gates_had_learned():
    gate, other = "layers.0.activation", "layers.1.activation"
    path = [
        {gate: 1.25, other: 2.5},
        {gate: 3.25, other: 7.125},
        {gate: 80.0, other: 90.0},
        {gate: 160.0, other: 160.0},
    ]
    epochs = tuple(
        dataclasses.replace(RECORD.last, epoch=i + 1.0, hardness=hardness) for i, hardness in enumerate(path)
    )
    config = {**RECORD.config, "num_train_epochs": 4, "switch_fraction": 0.5}
    record = dataclasses.replace(RECORD, epochs=epochs, config=config)
    text = render_card(record).text
    assert "| gate | λ before training | λ as learned, before hardening | λ | κ/λ |" in text
    assert f"| `{other}` | 2.0000 | 7.1250 | 160 | 0.0011 |" in text
    assert "as learned" not in render_card(dataclasses.replace(record, config={**config, "harden": False})).text
