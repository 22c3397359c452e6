"""scripts/convert.py end to end: a benchmark's and a data set's inputs, what lies in the folder, what is refused."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from huggingface_hub import ModelCard
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.benchmarks.image_rows import Augmentation, ImageRows
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.benchmarks.tokenizer import train_tokenizer
from lgelu_lab.studies.arguments import parse_mapping
from lgelu_lab.studies.run import run_benchmark
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from hf_lgelu.cli import convert as module
from hf_lgelu.cli.convert import convert
from hf_lgelu.cli.convert_arguments import ConvertArguments
from hf_lgelu.cli.inputs.benchmark_inputs import training_rows
from hf_lgelu.cli.inputs.chosen import input_sets
from hf_lgelu.export.hub.push import files_to_push
from hf_lgelu.models.checkpoint import load_checkpoint
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.refit.convert import ConversionRefusedError

SCRIPT = Path(__file__).parents[2] / "scripts" / "convert.py"
FILES = {"config.json", "model.safetensors", "README.md", "report.json", "report.md", "refit.png"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A GELU run on the digits whose record says that a fifth of the training rows was held out."""
    folder = tmp_path_factory.mktemp("run")
    arguments = {
        "benchmark": "mlp-digits", "activation": "gelu", "num_train_epochs": 12, "learning_rate": 0.2, "seed": 5,
        "validation_fraction": 0.2, "output_dir": str(folder), "disable_tqdm": True,
    }  # fmt: skip
    run_benchmark(*parse_mapping(arguments))
    return folder


@pytest.fixture(scope="module")
def converted(run, tmp_path_factory):
    """(folder, report, what was said) of one conversion on the benchmark's own rows."""
    folder, lines = tmp_path_factory.mktemp("out") / "relu", []
    report = convert(arguments_for(run, folder, max_calibration_samples=400), lines.append)
    return folder, report, "\n".join(lines)


def arguments_for(model, folder, calibration="mlp-digits", **options):
    return ConvertArguments(str(model), calibration, str(folder), disable_tqdm=True, **options)


def accuracy(model, rows):
    return (model(rows.features).logits.argmax(-1) == rows.labels).double().mean().item()


def test_the_folder_has_a_relu_model_with_report_figure_and_card(converted, run):
    folder, report, said = converted
    assert {path.name for path in folder.iterdir()} == FILES
    assert set(files_to_push(folder)) == FILES
    model = load_checkpoint(folder)
    assert model.config.hidden_act == "relu"
    assert [type(layer.activation) for layer in model.layers] == [nn.ReLU] * 4
    original = load_checkpoint(run).state_dict()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, original[name])}
    assert changed.isdisjoint({"layers.0.linear.weight", "layers.0.linear.bias"})  # nothing is in front of it
    assert {layer.layers[0] for layer in report.layers} == {*(f"layers.{i}.linear" for i in (1, 2, 3)), "classifier"}
    assert f"Saved in {folder}" in said


def test_scores_of_the_report_are_those_of_the_loaded_models(converted, run):
    """On the run's own validation rows, standardized by the rows that it was trained on."""
    folder, report, said = converted
    options = ConvertArguments(str(run), "mlp-digits", "x")
    _, second = input_sets(options, load_checkpoint(run))
    rows = second.rows
    assert len(rows) == report.evaluation.units == pytest.approx(0.2 * 1438, abs=6)
    assert "validation (20 % of train)" in (folder / "README.md").read_text()
    before, after = accuracy(load_checkpoint(run), rows), accuracy(load_checkpoint(folder), rows)
    assert report.evaluation.original_metrics == {"accuracy": pytest.approx(before)}
    assert report.evaluation.refitted.metrics == {"accuracy": pytest.approx(after)}
    record = json.loads((run / "record.json").read_text())
    assert before == pytest.approx(record["epochs"][-1]["score"])  # the same rows, prepared in the same way
    assert f"{after:.4f}, {before:.4f} as it was" in said
    assert report.evaluation.refitted.kl < report.evaluation.direct.kl


def test_report_files_say_the_same(converted):
    folder, report, _ = converted
    document = json.loads((folder / "report.json").read_text())
    assert document["report"]["evaluation"]["refitted"]["kl"] == report.evaluation.refitted.kl
    assert [layer["choice"] for layer in document["report"]["layers"]] == [layer.choice for layer in report.layers]
    provenance = document["provenance"]
    assert provenance["samples"] == 400
    assert provenance["calibration"] == "mlp-digits, training rows"
    assert {"torch", "hf-lgelu", "transformers"} <= provenance["versions"].keys()
    page, card = (folder / "report.md").read_text(), ModelCard.load(folder / "README.md")
    assert f"{report.evaluation.refitted.kl:.3g}" in page
    assert "400 of mlp-digits, training rows, chosen with seed 0" in card.text
    assert card.data.eval_results[0].metric_value == pytest.approx(
        report.evaluation.refitted.metrics["accuracy"], abs=5e-5
    )


def test_no_local_path_is_in_what_is_pushed(converted, run):
    folder, _, _ = converted
    for path in folder.iterdir():
        if path.suffix in (".md", ".json"):
            assert str(run.parent) not in path.read_text(), path.name


def test_fewer_rows_and_no_second_set(run, tmp_path):
    lines = []
    report = convert(arguments_for(run, tmp_path / "relu", max_calibration_samples=40, evaluation="none"), lines.append)
    assert (report.units, report.folds, report.held_out, report.evaluation) == (40, 1, None, None)
    card = ModelCard.load(tmp_path / "relu" / "README.md")
    assert card.data.eval_results is None
    assert "not measured on a second set" in card.text


def test_the_seed_chooses_the_rows(run):
    model = load_checkpoint(run)
    chosen = [
        input_sets(arguments_for(run, "x", max_calibration_samples=20, seed=seed), model)[0].first(20)["features"]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])


def test_a_refusal_leaves_nothing_and_says_what_was_measured(run, tmp_path, monkeypatch, converted):
    def refuse(*_, **__):
        raise ConversionRefusedError("no nearer than the direct swap", converted[1])

    monkeypatch.setattr(module, "convert_to_relu", refuse)
    lines = []
    with pytest.raises(ConversionRefusedError, match="no nearer"):
        convert(arguments_for(run, tmp_path / "relu"), lines.append)
    assert "direct swap → refitted: KL" in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_loads_as_another_model_is_not_left(run, tmp_path, monkeypatch):
    save = module.save_checkpoint

    def save_another(model, folder, **options):
        with torch.no_grad():
            model.classifier.bias[0].add_(1)
        files = save(model, folder, **options)
        with torch.no_grad():
            model.classifier.bias[0].sub_(1)
        return files

    monkeypatch.setattr(module, "save_checkpoint", save_another)
    with pytest.raises(RuntimeError, match="loaded again, has another classifier"):
        convert(arguments_for(run, tmp_path / "relu", max_calibration_samples=64, evaluation="none"), lambda _: None)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def script(monkeypatch, capsys):
    """script(words) → (exit status, stdout, stderr) of scripts/convert.py, in this process."""

    def run_script(*words):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return left.value.code, *capsys.readouterr()

    yield run_script
    logging.enable_progress_bar()


def test_too_few_rows_are_refused_on_the_command_line_without_a_traceback(run, tmp_path, script):
    words = ("--model", run, "--calibration", "mlp-digits", "--max_calibration_samples", 15)
    status, _, errors = script(*words, "--output_dir", tmp_path / "relu")
    assert status == 1
    assert "Traceback" not in errors
    assert "ValueError: a refit needs at least 16 distinct rows" in errors.strip().splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_taken_is_known_before_any_work(run, converted, monkeypatch):
    monkeypatch.setattr(module, "load_checkpoint", lambda *_: pytest.fail("work before the check"))
    with pytest.raises(FileExistsError, match="--overwrite"):
        convert(arguments_for(run, converted[0]))
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(ValueError, match="is the checkpoint itself"):
        convert(arguments_for(run, f"{run}/.", overwrite=True))
    with pytest.raises(ValueError, match="has the checkpoint inside"):
        convert(arguments_for(run, run.parent, overwrite=True))
    assert sorted(path.name for path in run.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_calibration_samples": 0}, "--max_calibration_samples must be at least 1, got 0"),
        ({"batch_size": -1}, "--batch_size must be at least 1, got -1"),
        ({"seed": -1}, "--seed must be from 0"),
        ({"calibration_split": "test"}, "--calibration_split: mlp-digits is a benchmark, which has its own splits"),
        ({"evaluation_split": "test"}, "--evaluation_split: mlp-digits is a benchmark"),
        ({"evaluation": "mlp-digits", "evaluation_config": "x"}, "--evaluation_config: mlp-digits is a benchmark"),
    ],
)
def test_options_that_mean_nothing_are_refused(run, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        convert(arguments_for(run, tmp_path / "relu", **options))


def test_rows_that_the_model_does_not_take_are_refused_by_their_shape(tmp_path):
    MLPForClassification(MLPConfig(num_features=7, hidden_size=4, hidden_act="gelu")).save_pretrained(tmp_path / "mlp")
    with pytest.raises(ValueError, match=r"rows of mlp-digits, training rows \(features \(2, 64\)\).*like those"):
        convert(arguments_for(tmp_path / "mlp", tmp_path / "relu"))
    assert not (tmp_path / "relu").exists()


def test_push_sends_the_folder_and_the_licence_is_the_originals(run, tmp_path, monkeypatch):
    pushed = []

    def push(folder, repo_id, *, private):
        pushed.append((set(files_to_push(folder)), repo_id, private))
        return type("Commit", (), {"commit_url": "http://hub/commit/1"})

    monkeypatch.setattr(module, "push_to_hub", push)
    original = tmp_path / "original"
    load_checkpoint(run).save_pretrained(original)
    (original / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n")
    few = {"max_calibration_samples": 64, "evaluation": "none"}
    lines = []
    convert(arguments_for(original, tmp_path / "a", push_to_hub="me/digits", private=True, **few), lines.append)
    convert(arguments_for(run, tmp_path / "digits-relu", push_to_hub="", **few), lines.append)
    assert pushed == [(FILES, "me/digits", True), (FILES, "digits-relu", None)]
    assert lines[-1] == "Pushed: http://hub/commit/1"
    licensed, unlicensed = (ModelCard.load(tmp_path / name / "README.md") for name in ("a", "digits-relu"))
    assert licensed.data.license == "cc-by-4.0"
    assert unlicensed.data.license is None
    assert 'from_pretrained(MLPForClassification, "me/digits")' in licensed.text


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """(folder of a small GPT-2 with its tokenizer, folder of a data set of texts)."""
    folder = tmp_path_factory.mktemp("text")
    words = ["the", "a", "cat", "dog", "saw", "ate", "big", "small", "red", "green", "and", "then", "slept", "ran"]
    generator = torch.Generator().manual_seed(0)
    lines = [
        " ".join(words[i] for i in torch.randint(len(words), (12,), generator=generator).tolist()) + "\n"
        for _ in range(600)
    ]
    tokenizer = train_tokenizer(lines, 300, 16)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=300, n_positions=16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # far enough from 0 that GELU and ReLU differ
    for part in (model, tokenizer):
        part.save_pretrained(folder / "gpt2")
    splits = {"train": lines[:500], "validation": lines[500:]}
    for name, texts in splits.items():
        (folder / "texts").mkdir(exist_ok=True)
        datasets.Dataset.from_dict({"text": texts}).to_json(folder / "texts" / f"{name}.jsonl")
    return folder / "gpt2", folder / "texts"


def test_a_language_model_on_the_texts_of_a_folder(language_model, tmp_path, script):
    model, texts = language_model
    words = ("--model", model, "--calibration", texts, "--max_calibration_samples", 64)
    status, said, errors = script(*words, "--output_dir", tmp_path / "relu")
    assert status == 0, errors
    assert "second set" in said
    assert "refit" in errors  # the progress bar
    report = json.loads((tmp_path / "relu" / "report.json").read_text())
    assert report["provenance"]["calibration"] == "texts, split train"
    assert report["provenance"]["evaluation"] == "texts, split validation"
    assert report["report"]["units"] == 64
    assert (tmp_path / "relu" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "relu")
    assert reloaded.config.activation_function == "relu"
    _perplexity_is_as_reported(reloaded, tmp_path / "relu", texts, report["report"]["evaluation"]["refitted"])


def _perplexity_is_as_reported(model, folder, texts, reported):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = [json.loads(line)["text"] for line in (texts / "validation.jsonl").read_text().splitlines()]
    tokens = torch.tensor([token for line in lines for token in tokenizer(line)["input_ids"]])
    blocks = tokens[: len(tokens) // 16 * 16].view(-1, 16)
    with torch.no_grad():
        log_probabilities = model(blocks).logits.double().log_softmax(-1)[:, :-1]
    losses = -log_probabilities.gather(2, blocks[:, 1:, None])
    assert reported["metrics"]["perplexity"] == pytest.approx(losses.mean().exp().item(), rel=1e-4)


def test_the_second_set_is_another_split(language_model):
    model, texts = language_model
    loaded = load_checkpoint(model)

    def second(**options):
        return input_sets(arguments_for(model, "x", str(texts), **options), loaded)[1]

    assert second().description == "texts, split validation"
    assert second(evaluation="none") is None
    assert second(calibration_split="validation") is None
    assert second(calibration_split="validation", evaluation_split="train").description == "texts, split train"
    assert len(second(max_evaluation_samples=3)) == 3
    with pytest.raises(ValueError, match="must be other rows than the calibration set, split 'train'"):
        second(evaluation_split="train")
    with pytest.raises(ValueError, match="has no split 'tset'; give --evaluation_split, of train, validation"):
        second(evaluation_split="tset")
    with pytest.raises(ValueError, match="has no split 'x'; give --calibration_split"):
        second(calibration_split="x")


def test_training_images_are_neither_cropped_nor_flipped():
    images = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8)
    plain = ImageRows(images, torch.zeros(40, dtype=torch.int64), [0.5] * 3, [0.2] * 3, 8)
    moved = ImageRows(images, plain.labels, [0.5] * 3, [0.2] * 3, 8, augmentation=Augmentation(4), seed=3)
    data = BenchmarkData(moved, plain, plain, "test", "test", ("a",), {})
    chosen = training_rows(BENCHMARKS["resnet18-cifar10"], data, None, seed=0)
    ours = chosen.first(40)["pixel_values"]
    expected = plain.__getitems__(range(40))["pixel_values"]
    assert sorted(map(float, ours.sum((1, 2, 3)))) == pytest.approx(sorted(map(float, expected.sum((1, 2, 3)))))
    assert not torch.equal(moved.__getitems__(range(40))["pixel_values"], expected)


def in_two_processes(run, folder, **environment):
    command = [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            SCRIPT,
            "--model",
            run,
        ),
        *("--calibration", "mlp-digits", "--max_calibration_samples", "400", "--output_dir", folder, "--disable_tqdm"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def test_two_processes_write_one_folder_with_the_same_network(run, converted, tmp_path):
    finished = in_two_processes(run, tmp_path / "relu", ACCELERATE_USE_CPU="true")
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.count("Saved in") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["relu"]
    document = json.loads((tmp_path / "relu" / "report.json").read_text())
    assert document["provenance"]["hardware"]["processes"] == 2
    ours, alone = document["report"], converted[1]
    assert (ours["distinct_units"], ours["rows"]) == (alone.distinct_units, alone.rows)
    assert (ours["evaluation"]["units"], ours["evaluation"]["rows"]) == (alone.evaluation.units, alone.evaluation.rows)
    assert [(layer["choice"], layer["strength"]) for layer in ours["layers"]] == [
        (layer.choice, layer.strength) for layer in alone.layers
    ]
    here, there = (load_file(folder / "model.safetensors") for folder in (converted[0], tmp_path / "relu"))
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, rtol=0, atol=1e-4)


def test_processes_that_do_not_know_of_each_other_are_refused(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="2 processes were started, and accelerate knows of 1"):
        convert(arguments_for(run, tmp_path / "relu"))
    assert list(tmp_path.iterdir()) == []
