"""The table of benchmarks, row by row."""

import math

import datasets
import numpy as np
import pytest
import torch
from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions, ModelOptions
from lgelu_lab.benchmarks.table import BENCHMARKS
from PIL import Image

from hf_lgelu.registry import register_activation
from hf_lgelu.training.arguments import LambdaGELUTrainingArguments
from hf_lgelu.training.trainer import LambdaGELUTrainer

register_activation()


def pictures(shape, image_column, label_column):
    features = datasets.Features({image_column: datasets.Image(), label_column: datasets.ClassLabel(names=["a", "b"])})
    images = [Image.fromarray(np.random.RandomState(i).randint(0, 256, shape).astype(np.uint8)) for i in range(12)]
    return datasets.Dataset.from_dict(
        {image_column: images, label_column: [i % 2 for i in range(12)]}, features=features
    )


@pytest.fixture
def tiny_copies(write_splits, adult_rows):
    """A data directory with a few rows of each data set."""
    write_splits("fashion_mnist", dict.fromkeys(("train", "test"), pictures((28, 28), "image", "label")))
    write_splits("cifar10", dict.fromkeys(("train", "test"), pictures((32, 32, 3), "img", "label")))
    write_splits("cifar100", dict.fromkeys(("train", "test"), pictures((32, 32, 3), "img", "fine_label")))
    write_splits("tiny_imagenet", dict.fromkeys(("train", "valid"), pictures((64, 64, 3), "image", "label")))
    lines = {
        "text": ["", " = A cat = \n", " The cat sat on the mat , and the mat lay on the floor of the house . \n"] * 4
    }
    text = datasets.Dataset.from_dict(lines)
    write_splits("wikitext2", {"train": text, "validation": text})
    adult = datasets.Dataset.from_dict(adult_rows(12))
    return write_splits("adult", {"train": adult, "test": adult})


# What keeps a row small here, and how many λ-GELU it then has.
SMALL = {
    "deit-tiny-imagenet": {"image_size": 32},
    "gpt2-wikitext2": {"num_layers": 2, "width": 16, "num_heads": 2, "context_length": 8, "vocabulary_size": 270},
}
SITES = {
    **dict.fromkeys(("mlp-digits", "mlp-adult", "mlp-fmnist"), 4),
    **dict.fromkeys(("resnet18-cifar10", "resnet18-cifar100"), 17),
    "deit-tiny-imagenet": 12,
    "gpt2-wikitext2": 2,
}


def right_share(logits, labels):
    return sum(int(a == b) for a, b in zip(logits.argmax(dim=1).tolist(), labels.tolist(), strict=True)) / len(labels)


def perplexity_by_token(logits, labels):
    chances = [
        logits[row, position].double().softmax(dim=0)[labels[row, position + 1]].item()
        for row in range(logits.shape[0])
        for position in range(logits.shape[1] - 1)
    ]
    return math.exp(-sum(math.log(chance) for chance in chances) / len(chances))


SCORES = {"accuracy": right_share, "perplexity": perplexity_by_token}


@pytest.mark.parametrize(
    "name",
    # The ResNet of full size takes longest, and test_cifar_resnet.py has a small one.
    [pytest.param(name, marks=pytest.mark.slow if name.startswith("resnet18") else ()) for name in SITES],
)
def test_a_row_trains_from_load_to_score(name, tiny_copies, tmp_path):
    benchmark = BENCHMARKS[name]
    assert benchmark.name == name
    options = benchmark.model_options(SMALL.get(name, {}))
    data = benchmark.load(DataOptions(tiny_copies, max_train_samples=12, max_eval_samples=12), options)
    assert isinstance(data, BenchmarkData)
    torch.manual_seed(0)
    model = benchmark.build_model("lambda_gelu", data, options)
    assert len([module for module in model.modules() if type(module).__name__ == "LambdaGELU"]) == SITES[name]
    arguments = LambdaGELUTrainingArguments(
        str(tmp_path / "run"),
        **{**benchmark.defaults, "num_train_epochs": 2},
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = LambdaGELUTrainer(
        model=model, args=arguments, train_dataset=data.train, eval_dataset=data.eval, **benchmark.trainer_options(data)
    )
    before = [weight.detach().clone() for weight in model.parameters()]
    trainer.train()
    assert not any(torch.equal(*weights) for weights in zip(model.parameters(), before, strict=True))
    metrics = trainer.evaluate()
    batch = data.eval.__getitems__(range(len(data.eval)))
    with torch.no_grad():
        logits = model.eval()(**batch).logits
    assert metrics[f"eval_{benchmark.metric}"] == pytest.approx(SCORES[benchmark.metric](logits, batch["labels"]))
    assert f"eval_relu_{benchmark.metric}" in metrics


def test_a_checkpoint_is_fine_tuned_with_the_papers_rate_and_brings_its_own_architecture():
    benchmark = BENCHMARKS["gpt2-wikitext2"]
    assert benchmark.pretrained_defaults["learning_rate"] == 5e-5
    options = benchmark.model_options({"pretrained": "somewhere", "context_length": 64})
    assert options == ModelOptions(pretrained="somewhere", context_length=64)
    with pytest.raises(ValueError, match=r"num_layers, width.*pretrained, cont"):
        benchmark.model_options({"pretrained": "somewhere", "width": 8, "num_layers": 2})
    with pytest.raises(ValueError, match=r"gpt2-wikitext2 .*image_size"):
        benchmark.model_options({"image_size": 8})
