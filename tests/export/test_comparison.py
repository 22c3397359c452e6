"""The table of two networks, against numpy on their own outputs and on the ONNX files made by hand."""

import math

import numpy as np
import pytest
import small_networks as networks
import torch
from scipy.special import log_softmax, softmax
from torch import nn

from hf_lgelu import compare_networks, export_onnx, quantize_onnx
from hf_lgelu.export.comparison import lost
from hf_lgelu.export.onnx_run import OnnxModel


class Trained(nn.Module):
    """A small classifier; `gate` is all that two of the networks differ in."""

    def __init__(self, gate, *, width=12):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, width), gate, nn.Linear(width, 3))
        with torch.no_grad():
            self.layers[2].weight *= 8

    def forward(self, rows):
        return self.layers(rows)


GELU, RELU = Trained(nn.GELU()), Trained(nn.ReLU())
ROWS = torch.randn(80, 5, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(3, (80,), generator=torch.Generator().manual_seed(2))


def judged_and_ranges(count):
    """The numbers of the rows that int8 is judged on, and of every fourth, from which the ranges are."""
    return [n for n in range(count) if n % 4], list(range(0, count, 4))


@pytest.fixture(scope="module")
def compared():
    return compare_networks(GELU, RELU, [(ROWS[:50], LABELS[:50]), (ROWS[50:], LABELS[50:])], int8=True)


def test_both_networks_in_both_precisions_and_nothing_else(compared):
    assert [(row.network, row.precision) for row in compared.rows] == [
        ("original", "float32"), ("converted", "float32"), ("original", "int8"), ("converted", "int8"),
    ]  # fmt: skip
    assert (compared.samples, compared.calibration_samples, compared.timed_samples) == (60, 20, 8)
    assert compared.rows[0].distance is None
    assert [row.operations for row in compared.rows] == [None, None, "all", "all"]
    for row in compared.rows:
        first, median, third = row.milliseconds
        assert 0 < first <= median <= third


def test_scores_and_distances_are_those_of_numpy(compared, tmp_path):
    judged, ranges = judged_and_ranges(80)
    rows, labels = ROWS[judged], LABELS[judged].numpy()
    outputs = []
    for name, network in (("gelu", GELU), ("relu", RELU)):
        export_onnx(network, tmp_path / f"{name}.onnx", ROWS[:4])
        quantize_onnx(tmp_path / f"{name}.onnx", tmp_path / f"{name}-8.onnx", ROWS[ranges])
    for name in ("gelu", "relu", "gelu-8", "relu-8"):
        outputs.append(OnnxModel(tmp_path / f"{name}.onnx")({"rows": rows})[0].astype(np.float64))
    exact = outputs[0]
    for row, found in zip(compared.rows, outputs, strict=True):
        assert row.metrics["accuracy"] == (found.argmax(1) == labels).mean()
        if row.distance is not None:
            kl = (softmax(exact, 1) * (log_softmax(exact, 1) - log_softmax(found, 1))).sum(1).mean()
            assert row.distance.kl == pytest.approx(kl, rel=1e-3)
            assert row.distance.agreement == (found.argmax(1) == exact.argmax(1)).mean()
            varying = np.square(exact - exact.mean(0)).sum()
            assert row.distance.relative_error == pytest.approx(np.square(found - exact).sum() / varying, rel=1e-3)
    kept = [(outputs[n].argmax(1) == outputs[n + 2].argmax(1)).mean() for n in (0, 1)]
    assert [row.from_float32 and lost(row.from_float32)[1] for row in compared.rows] == [
        None, None, *(pytest.approx(1 - share) for share in kept),
    ]  # fmt: skip
    sizes = [(tmp_path / f"{name}.onnx").stat().st_size for name in ("gelu", "relu", "gelu-8", "relu-8")]
    assert [1e6 * row.megabytes for row in compared.rows] == pytest.approx(sizes, rel=0.02)  # names of files differ


def test_the_table_has_a_cell_for_each_title(compared):
    titles, *lines = str(compared).splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [[row.network, row.precision] for row in compared.rows]
    assert "accuracy" in titles
    assert "lost in int8" in titles
    assert len({len(line) for line in lines[:4]}) == 1  # the columns stand below each other
    assert f"{compared.rows[3].metrics['accuracy']:.4f}" in lines[3]
    assert lines[0].split()[3] == "–"  # how far the original is from itself
    assert "60 inputs" in lines[4]
    assert "20 other inputs gave the ranges" in lines[5]


def test_without_int8_torch_runs_both_and_weights_are_counted_once():
    network = nn.Sequential(nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 5)).double()
    network[2].weight = network[0].weight
    before = [parameter.clone() for parameter in network.parameters()]
    found = compare_networks(network, RELU_OF_FIVE, ROWS[:1])
    assert [(row.precision, row.operations) for row in found.rows] == [("float32", None)] * 2
    assert found.rows[0].megabytes == 4 * (25 + 5 + 5) / 1e6  # in float32, whatever it was given in
    assert (found.samples, found.calibration_samples, found.timed_samples) == (1, 0, 1)
    assert found.rows[0].metrics == {}
    assert all(torch.equal(one, other) for one, other in zip(before, network.parameters(), strict=True))
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float64}


RELU_OF_FIVE = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))


@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_language_model_has_its_perplexity_and_attention_asks_for_layers(int8):
    smooth, relu = (networks.gpt2(n_layer=1, activation_function=name).eval() for name in ("gelu_new", "relu"))
    relu.load_state_dict(smooth.state_dict())
    tokens = torch.randint(30, (16, 12), generator=torch.Generator().manual_seed(3))
    found = compare_networks(smooth, relu, {"input_ids": tokens, "labels": tokens}, int8=int8)
    judged = judged_and_ranges(16)[0] if int8 else list(range(16))
    for row, network in zip(found.rows, (smooth, relu), strict=False):
        with torch.no_grad():
            logits = network(tokens[judged]).logits[:, :-1].double().numpy()
        chances = np.take_along_axis(log_softmax(logits, -1), tokens[judged, 1:, None].numpy(), -1)
        assert row.metrics["perplexity"] == pytest.approx(math.exp(-chances.mean()), rel=1e-4)
    assert [row.operations for row in found.rows] == [None, None, "layers", "layers"][: len(found.rows)]
    assert ("layers (only matrix products and convolutions in int8)" in str(found)) == (len(found.rows) == 4)


def test_calls_that_cannot_be_compared_are_refused():
    cases = [
        (lambda: compare_networks(GELU, nn.Linear(5, 4), ROWS), r"original gives .*\(\d+, 3\).*\(\d+, 4\)"),
        (lambda: compare_networks(GELU, nn.Linear(6, 3), ROWS), "does not take the inputs of data, given to the conv"),
        (lambda: compare_networks(GELU, RELU, ROWS[:0]), "data holds no inputs"),
        (lambda: compare_networks(GELU, RELU, ROWS[:1], int8=True), "give two or more"),
    ]
    for call, said in cases:
        with pytest.raises(ValueError, match=said):
            call()
