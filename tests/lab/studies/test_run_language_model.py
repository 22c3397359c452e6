"""Runs of GPT-2: losses are means over predicted tokens, and the lowest perplexity is the best."""

import math

import pytest
import torch
from lgelu_lab.benchmarks.data import DataOptions, ModelOptions
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.studies.arguments import parse_mapping
from lgelu_lab.studies.run import run_benchmark
from tiny_language_model import CONTEXT, write_checkpoint, write_corpus
from transformers import AutoTokenizer, GPT2LMHeadModel

ROWS = 13


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Arguments of a run on a tiny corpus, from a tiny checkpoint."""
    folder = tmp_path_factory.mktemp("tiny")
    return {
        "benchmark": "gpt2-wikitext2",
        "data_dir": str(write_corpus(folder, 40, 12)),
        "pretrained": str(write_checkpoint(folder / "checkpoint")),
        "context_length": CONTEXT,
        "max_train_samples": ROWS,
        "max_eval_samples": ROWS,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 5,
        "num_train_epochs": 2,
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
    }


def run(tiny, folder, **arguments):
    return run_benchmark(*parse_mapping({**tiny, "output_dir": str(folder), **arguments}))


def token_mean(model, rows):
    """Mean loss over every predicted token of the rows, token by token."""
    with torch.no_grad():
        chances = model.eval()(rows.tokens).logits.double().log_softmax(dim=-1)
    tokens = rows.tokens.tolist()
    losses = [-chances[r, t, tokens[r][t + 1]].item() for r in range(len(tokens)) for t in range(CONTEXT - 1)]
    return sum(losses) / len(losses)


def rows_of(tiny):
    options = ModelOptions(pretrained=tiny["pretrained"], context_length=CONTEXT)
    limits = DataOptions(tiny["data_dir"], max_train_samples=ROWS, max_eval_samples=ROWS)
    return BENCHMARKS["gpt2-wikitext2"].load(limits, options)


def test_loss_and_perplexity_are_those_of_the_predicted_tokens_and_the_lowest_comes_back(tiny, tmp_path):
    """13 rows in batches of 5, the last one uneven; as it is and with ReLU substituted."""
    options = {"activation": "lambda_gelu", "harden": True, "num_train_epochs": 4, "learning_rate": 0.01}
    record = run(tiny, tmp_path, **options, save_strategy="epoch", load_best_model_at_end=True)
    best = min(record.epochs[2:], key=lambda epoch: epoch.score)  # whose gates are hard
    assert record.saved == best
    for epoch in record.epochs:
        assert math.log(epoch.score) == pytest.approx(epoch.loss, rel=1e-6)
        assert math.log(epoch.relu_score) == pytest.approx(epoch.relu_loss, rel=1e-6)
    rows = rows_of(tiny)
    assert len(rows.eval) == ROWS
    hardened, relu = (GPT2LMHeadModel.from_pretrained(path) for path in (tmp_path, tmp_path / "relu"))
    assert math.log(best.score) == pytest.approx(token_mean(hardened, rows.eval), rel=1e-6)
    assert math.log(best.relu_score) == pytest.approx(token_mean(relu, rows.eval), rel=1e-6)
    assert relu.config.activation_function == "relu"
    assert len(AutoTokenizer.from_pretrained(tmp_path / "relu")) == relu.config.vocab_size
    assert len({epoch.score for epoch in record.epochs}) == 4
