"""A benchmark's record as the facts of a card, and the cards of this repository from their records."""

import dataclasses
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import ModelCard
from lgelu_lab.benchmarks.cifar_resnet import new_cifar_resnet
from lgelu_lab.studies.cards import shown, write_record_card
from lgelu_lab.studies.records import EpochRecord, RunRecord
from safetensors.torch import load_file
from transformers import TimmWrapperForImageClassification

from hf_lgelu import anneal_hardness, export_relu

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
        "gradient_accumulation_steps": 1, "bf16": False, "train_batch_size": 512,
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


def card_of(record, tmp_path, **options):
    return write_record_card(record, tmp_path / "card.md", **options).read_text(encoding="utf-8")


def test_whole_card(tmp_path):
    card = card_of(RECORD, tmp_path, repo_id="someone/adult-relu", license="apache-2.0")
    expected = (Path(__file__).parent / "expected_card.md").read_text(encoding="utf-8")
    assert card == expected
    picture = tmp_path / "figures" / "card.png"
    first = picture.read_bytes()
    assert len(first) > 2000
    card_of(RECORD, tmp_path)
    assert picture.read_bytes() == first


def header_of(record, tmp_path):
    return ModelCard(card_of(record, tmp_path)).data


READ = {"copy_of": None, "folder": None, "files": {}, "readme": None}


def test_a_card_names_the_hubs_data_set_only_where_all_of_that_was_read(tmp_path):
    whole = with_config(max_train_samples=None)
    hub = dataclasses.replace(whole, data={**RECORD.data, **READ})
    assert header_of(hub, tmp_path).datasets == [RECORD.data["source"]]
    (result,) = header_of(hub, tmp_path).eval_results
    assert (result.dataset_split, result.metric_value) == (RECORD.data["eval_split"], 0.8565)
    some = dataclasses.replace(hub, config={**whole.config, "max_eval_samples": 300})
    assert header_of(some, tmp_path).eval_results is None
    copy = {"source": "local folder adult_few", "copy_of": "scikit-learn/adult-census-income", "folder": "adult_few"}
    local = dataclasses.replace(hub, data={**hub.data, **copy, "readme": "# few\n\nThe test split, as train."})
    assert header_of(local, tmp_path).datasets is None
    text = card_of(local, tmp_path)
    assert "model-index" not in text
    assert "few The test split, as train." in text


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("/home/alice/private/hf_models/gpt2-ours", "gpt2-ours"),
        ("./alice/gpt2-ours", "gpt2-ours"),
        ("C:\\alice\\gpt2-ours", "gpt2-ours"),
        ("https://alice:secret@hub.local/a/gpt2?token=x", "gpt2"),
        ("bob/gpt2", "bob/gpt2"),
        ("there/gpt2", "gpt2"),
        (False, "no"),
        (0.05, "0.05"),
    ],
)
def test_of_a_path_or_address_only_its_last_part_is_shown(value, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "gpt2").mkdir(parents=True)  # a local folder that looks like a Hub id
    assert shown(value) == told


OF_CIFAR = dataclasses.replace(with_config(benchmark="resnet18-cifar10"), data={**RECORD.data, "classes": 7})


def test_card_of_the_small_resnet_says_how_timm_loads_it(tmp_path, monkeypatch):
    model = new_cifar_resnet("lambda_gelu", [str(i) for i in range(7)], [0.5] * 3, [0.2] * 3).eval()
    anneal_hardness(model, 1.0)
    export_relu(model, tmp_path / "relu", inputs={"pixel_values": torch.randn(2, 3, 32, 32)})
    text = card_of(OF_CIFAR, tmp_path)
    assert "With hf_lgelu:" not in text  # which alone does not know the architecture
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
