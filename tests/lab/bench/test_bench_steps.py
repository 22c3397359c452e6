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


@pytest.mark.parametrize("provider", training_steps.ACTIVATIONS)
def test_a_step_moves_weights_and_only_a_learning_hardness(small_model, provider):
    batch = small_model.new_batch("cpu")
    model, optimizer, step = training_steps.new_training(small_model, provider, batch, "float32", "cpu")
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    step()
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    learned = {name for name in before if name.endswith("raw_hardness")}
    assert before.keys() - learned == moved - learned
    assert len(learned) == (4 if provider.startswith("lambda_gelu") else 0)
    assert moved & learned == (learned if provider == "lambda_gelu" else set())
    # A frozen s reaches the optimizer without a gradient, so that no momentum is kept for it.
    held = {id(parameter) for parameter in optimizer.state}
    assert {name for name, value in model.named_parameters() if id(value) in held} == moved
