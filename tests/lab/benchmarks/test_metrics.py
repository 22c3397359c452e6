"""The scores against sums done by hand, and the modules of evaluate behind them."""

import math
import os
import subprocess
import sys
from pathlib import Path

import evaluate
import lgelu_lab.benchmarks
import numpy as np
import pytest
import torch
from lgelu_lab.benchmarks.metric_modules.perplexity.perplexity import Perplexity
from lgelu_lab.benchmarks.metrics import accuracy, perplexity, token_losses
from transformers import EvalPrediction

MODULES = Path(lgelu_lab.benchmarks.__file__).parent / "metric_modules"
LABELS = np.array([[-100, 4, 0, 2], [-100, 1, -100, 3], [-100, 2, 2, -100]])
LOSSES = np.array([[0.5, 1.25, 3.0], [2.0, 7.0, 0.25], [0.125, 4.0, 9.0]], dtype=np.float32)
PERPLEXITY = math.exp((0.5 + 1.25 + 3.0 + 2.0 + 0.25 + 0.125 + 4.0) / 7)


def test_accuracy_is_the_share_of_right_rows():
    logits = np.array([[0.1, 0.9], [2.0, -1.0], [0.0, 3.0], [1.0, 1.0], [5.0, 6.0]])
    labels = np.array([1, 1, 1, 0, 0])
    assert accuracy(EvalPrediction(predictions=logits, label_ids=labels)) == {"accuracy": 3 / 5}


def test_perplexity_counts_every_predicted_token_alike_and_no_other():
    score = perplexity(EvalPrediction(predictions=LOSSES, label_ids=LABELS))
    assert score == {"perplexity": pytest.approx(PERPLEXITY, rel=1e-15)}


def test_perplexity_is_summed_in_float64():
    """In float32, the sum of a million losses of 10 differs from the sum of them and a thousandth in the last one."""
    losses = np.full((1000, 1000), 10.0, dtype=np.float32)
    losses[0, 0] = 10.0 + 2**-7
    labels = np.zeros((1000, 1001), dtype=np.int64)
    score = perplexity(EvalPrediction(predictions=losses, label_ids=labels))["perplexity"]
    assert math.log(score) - 10 == pytest.approx(2**-7 / 1e6, rel=1e-5)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 800.0])
def test_a_perplexity_that_no_record_can_hold_is_an_error_in_words(loss):
    losses = np.full((2, 3), loss, dtype=np.float32)
    with pytest.raises(RuntimeError, match=r"the perplexity is (nan|inf): the mean loss of a token is .*learning_rate"):
        perplexity(EvalPrediction(predictions=losses, label_ids=np.zeros((2, 4), dtype=np.int64)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_losses_are_those_of_a_loop_over_tokens(dtype):
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.from_numpy(LABELS)
    expected = np.zeros((3, 3))
    for row in range(3):
        for position in range(3):
            token = LABELS[row, position + 1]
            if token != -100:
                scores = [math.exp(value) for value in logits[row, position].double().tolist()]
                expected[row, position] = math.log(sum(scores)) - math.log(scores[token])
    for given in (logits, (logits, "more outputs")):
        losses = token_losses(given, labels)
        assert losses.dtype == torch.float32
        np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-5)
    assert (expected != 0).sum() == 7


def test_the_modules_load_from_their_folders_too(monkeypatch, tmp_path):
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", str(tmp_path))
    sums, counts = [4.75, 2.25, 4.125], [3, 2, 2]
    module = evaluate.load(str(MODULES / "perplexity"))
    assert module.compute(predictions=sums, references=counts)["perplexity"] == pytest.approx(PERPLEXITY)
    module = evaluate.load(str(MODULES / "accuracy"))
    assert module.compute(predictions=[0, 2, 1], references=[0, 1, 1])["accuracy"] == pytest.approx(2 / 3)


def test_a_perplexity_in_batches_is_that_of_all_texts():
    module = Perplexity(keep_in_memory=True)
    module.add_batch(predictions=[4.75, 2.25], references=[3, 2])
    module.add_batch(predictions=[4.125], references=[2])
    assert module.compute()["perplexity"] == pytest.approx(PERPLEXITY, rel=1e-15)


def test_processes_that_score_at_once_share_no_file(tmp_path):
    """Two at the same time with one cache, offline: the scores are right and no prediction is on the disk."""
    script = (
        "import sys\n"
        "import numpy as np\n"
        "from transformers import EvalPrediction\n"
        "from lgelu_lab.benchmarks.table import perplexity\n"
        "print('evaluate' in sys.modules)\n"
        "losses, labels = np.full((4, 2), 2.0, dtype=np.float32), np.zeros((4, 3), dtype=np.int64)\n"
        "print({perplexity(EvalPrediction(predictions=losses, label_ids=labels))['perplexity'] for _ in range(20)})\n"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in started:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        early, scores = output.splitlines()
        assert early == "False"  # it takes seconds to import, and is so only for a score
        assert scores == str({math.exp(2.0)})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
