"""The scores against sums done by hand."""

import math

import numpy as np
import pytest
import torch
from lgelu_lab.benchmarks.metrics import language_scores, token_losses
from transformers import EvalPrediction

LABELS = np.array([[-100, 4, 0, 2], [-100, 1, -100, 3], [-100, 2, 2, -100]])
LOSSES = np.array([[0.5, 1.25, 3.0], [2.0, 7.0, 0.25], [0.125, 4.0, 9.0]], dtype=np.float32)
PERPLEXITY = math.exp((0.5 + 1.25 + 3.0 + 2.0 + 0.25 + 0.125 + 4.0) / 7)


def test_perplexity_counts_every_predicted_token_alike_and_no_other():
    score = language_scores(EvalPrediction(predictions=LOSSES, label_ids=LABELS))
    assert score == {"perplexity": pytest.approx(PERPLEXITY, rel=1e-15)}


@pytest.mark.parametrize(("loss", "score"), [(float("nan"), "nan"), (float("inf"), "inf"), (800.0, "inf")])
def test_a_perplexity_that_is_no_finite_number_comes_back_as_it_is(loss, score):
    losses = np.full((2, 3), loss, dtype=np.float32)
    found = language_scores(EvalPrediction(predictions=losses, label_ids=np.zeros((2, 4), dtype=np.int64)))
    assert str(found["perplexity"]) == score


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
