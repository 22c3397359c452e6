"""Training steps: what they move, and what is recorded of them."""

from functools import partial

import pytest
import torch
from bench_rows import bench_into
from lgelu_lab.kernel_bench import training_steps


@pytest.fixture(scope="module")
def small_model():
    model = training_steps.STEP_MODELS["mlp-4x256"]
    labels = torch.arange(8) % 10
    return training_steps.StepModel(
        "small", ("cpu",), model.build, lambda device: {"features": torch.ones(8, 784), "labels": labels},
        partial(torch.optim.SGD, momentum=0.9), 0.1,
    )  # fmt: skip


def test_steps_train_every_provider_and_are_measured_once(small_model, tmp_path):
    path = tmp_path / "bench.csv"
    rows = list(training_steps.measure_steps(small_model, "float32", bench_into(path)))
    assert [row["provider"] for row in rows] == list(training_steps.ACTIVATIONS)
    assert [row["hardness"] for row in rows] == ["", "1.05", "159.577", "", ""]
    parameters = 785 * 256 + 3 * 257 * 256 + 257 * 10
    assert [int(row["elements"]) - parameters for row in rows] == [0, 4, 4, 0, 0]  # a λ at each of four sites
    # Weights and their gradients are held at once, whatever the activation.
    assert all(int(row["peak_bytes"]) > 2 * 4 * parameters for row in rows)
    assert float(rows[0]["peak_ratio"]) == 1
    assert list(training_steps.measure_steps(small_model, "float32", bench_into(path))) == []
