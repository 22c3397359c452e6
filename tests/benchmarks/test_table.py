"""The table of benchmarks, row by row."""

import ast
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import EvalPrediction

import hf_lgelu.benchmarks
from hf_lgelu.benchmarks.metrics import accuracy
from hf_lgelu.benchmarks.table import BENCHMARKS, BenchmarkData, DataOptions, build_mlp
from hf_lgelu.models.registry import register_activation
from hf_lgelu.training.arguments import LambdaGELUTrainingArguments
from hf_lgelu.training.trainer import LambdaGELUTrainer

register_activation()


@pytest.fixture
def tiny_copies(write_splits, adult_rows):
    """A data directory with a few rows of each data set."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    images = [Image.fromarray(np.random.RandomState(i).randint(0, 256, (28, 28)).astype(np.uint8)) for i in range(12)]
    pictures = datasets.Dataset.from_dict({"image": images, "label": [i % 2 for i in range(12)]}, features=features)
    write_splits("fashion_mnist", {"train": pictures, "test": pictures})
    adult = datasets.Dataset.from_dict(adult_rows(12))
    return write_splits("adult", {"train": adult, "test": adult})


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_row_trains_from_load_to_score(name, tiny_copies, tmp_path):
    benchmark = BENCHMARKS[name]
    assert benchmark.name == name
    data = benchmark.load(DataOptions(tiny_copies, max_train_samples=12, max_eval_samples=12))
    assert isinstance(data, BenchmarkData)
    torch.manual_seed(0)
    model = benchmark.build_model("lambda_gelu", data)
    assert len([module for module in model.modules() if type(module).__name__ == "LambdaGELU"]) == 4
    assert (model.config.num_features, model.config.num_labels) == (data.train.num_features, data.num_labels)
    assert model.config.id2label == dict(enumerate(data.label_names))
    assert model.config.label2id == {label: index for index, label in enumerate(data.label_names)}
    arguments = LambdaGELUTrainingArguments(
        str(tmp_path / "run"),
        **{**benchmark.defaults, "num_train_epochs": 2},
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = LambdaGELUTrainer(
        model=model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=benchmark.collate,
        compute_metrics=benchmark.compute_metrics,
    )
    before = model.classifier.weight.detach().clone()
    trainer.train()
    assert not torch.equal(model.classifier.weight, before)
    with torch.no_grad():
        predicted = model(data.eval.features).logits.argmax(dim=1)
    right = sum(int(a == b) for a, b in zip(predicted.tolist(), data.eval.labels.tolist(), strict=True))
    assert trainer.evaluate()[f"eval_{benchmark.metric}"] == pytest.approx(right / len(data.eval))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_defaults_are_training_arguments_and_the_papers_are_marked(name, tmp_path):
    benchmark = BENCHMARKS[name]
    arguments = LambdaGELUTrainingArguments(str(tmp_path), use_cpu=True, **benchmark.defaults)
    for option, value in benchmark.defaults.items():
        assert getattr(arguments, option) == value
    paper = {"optim": "sgd", "learning_rate": 5e-2, "weight_decay": 1e-4}
    assert {option: benchmark.defaults[option] for option in paper} == paper
    assert benchmark.paper == set(paper) | (set() if name == "mlp-digits" else {"num_train_epochs"})
    sizes = {"mlp-digits": (64, 60), "mlp-adult": (512, 50), "mlp-fmnist": (1024, 50)}
    assert (benchmark.train_batch_size, benchmark.defaults["num_train_epochs"]) == sizes[name]
    assert benchmark.init_hardness == 1.0067


@pytest.mark.parametrize(("hidden_act", "hardnesses"), [("gelu", 0), ("lambda_gelu", 4)])
def test_the_digits_network_has_the_papers_size(hidden_act, hardnesses):
    data = BENCHMARKS["mlp-digits"].load(DataOptions(max_train_samples=20))
    weights = 64 * 256 + 3 * 256 * 256 + 256 * 10
    biases = 4 * 256 + 10
    assert build_mlp(hidden_act, data).num_parameters() == weights + biases + hardnesses


def test_accuracy_is_the_share_of_right_rows():
    logits = np.array([[0.1, 0.9], [2.0, -1.0], [0.0, 3.0], [1.0, 1.0], [5.0, 6.0]])
    labels = np.array([1, 1, 1, 0, 0])
    assert accuracy(EvalPrediction(predictions=logits, label_ids=labels)) == {"accuracy": 3 / 5}


def test_nothing_that_only_benchmarks_need_is_imported_with_the_package():
    folder = Path(hf_lgelu.benchmarks.__file__).parent
    files = sorted(folder.glob("*.py"))
    assert len(files) > 8
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"datasets", "sklearn", "PIL", "pandas", "scipy"}


@pytest.mark.slow
def test_the_digits_recipe_learns(tmp_path):
    """60 epochs; a GELU network on raw scikit-learn digits with this recipe reaches 0.97 (measured 0.969 to 0.981)."""
    benchmark = BENCHMARKS["mlp-digits"]
    data = benchmark.load(DataOptions())
    torch.manual_seed(0)
    trainer = LambdaGELUTrainer(
        model=benchmark.build_model("lambda_gelu", data),
        args=LambdaGELUTrainingArguments(
            str(tmp_path), **benchmark.defaults, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True
        ),
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=benchmark.collate,
        compute_metrics=benchmark.compute_metrics,
    )
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.955
