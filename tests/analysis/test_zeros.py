"""Counts of zeros, against loops over numbers and nets whose zeros are known."""

import math

import pytest
import torch
from torch import nn
from transformers import Wav2Vec2Config, Wav2Vec2Model
from transformers.activations import ACT2FN

from hf_lgelu.activation.module import LambdaGELU
from hf_lgelu.analysis.pruning.zeros import measure_zeros


def loop_counts(outputs, threshold):
    """Per unit (zeros, ≤ 0, near zero, Σ|a|) of a list of rows of numbers."""
    counts = []
    for values in zip(*outputs, strict=True):
        counts.append(
            (
                sum(1 for v in values if v == 0),
                sum(1 for v in values if v <= 0),
                sum(1 for v in values if abs(v) <= threshold),
                math.fsum(abs(v) for v in values),
            )
        )
    return counts


@pytest.mark.parametrize("gate", [nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), LambdaGELU()])
def test_counts_of_a_linear_layer_equal_a_loop(gate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), gate, nn.Linear(6, 2)).double()
    batches = [torch.randn(rows, 4, dtype=torch.float64) for rows in (5, 1, 7)]
    zeros = measure_zeros(model, batches, threshold=0.1)["1"]
    with torch.no_grad():
        outputs = [row for batch in batches for row in gate(model[0](batch)).tolist()]
    expected = loop_counts(outputs, 0.1)
    assert zeros.values == 13
    assert list(zip(zeros.zeros.tolist(), zeros.off.tolist(), zeros.near_zero.tolist(), strict=True)) == [
        counts[:3] for counts in expected
    ]
    assert zeros.absolute_sum.tolist() == pytest.approx([counts[3] for counts in expected], rel=1e-6)
    assert zeros.zeros.dtype == torch.int64
    assert 0 < zeros.off.sum() < 6 * 13
    assert zeros.apoz.tolist() == [counts[0] / 13 for counts in expected]
    assert zeros.off_fraction.tolist() == [counts[1] / 13 for counts in expected]


def test_channels_of_an_image_lie_on_axis_one_and_calls_are_counted_apart():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)
            self.second, self.relu = nn.Linear(3, 5), nn.ReLU()

        def forward(self, x):
            return self.relu(self.second(self.relu(self.norm(self.first(x)))))

    model = Twice()
    model.first.weight.data = torch.tensor([1.0, -1.0]).reshape(2, 1, 1, 1)
    model.first.bias.data.zero_()
    model.second.weight.data, model.second.bias.data = torch.zeros(5, 3), torch.tensor([-1.0, 0.0, 1.0, 2.0, -2.0])
    x = torch.tensor([[1.0, 5.0, 2.0], [3.0, -4.0, 0.0]]).reshape(1, 1, 2, 3)  # the second channel has five zeros
    model.train()
    zeros = measure_zeros(model, [x, x])
    assert list(zeros) == ["relu", "relu#2"]
    assert zeros["relu"].zeros.tolist() == [2 * 2, 2 * 5]
    assert zeros["relu"].values == 12
    assert zeros["relu#2"].zeros.tolist() == [8, 8, 0, 0, 8]
    assert zeros["relu#2"].values == 8
    assert zeros["relu#2"].dead_units == [0, 1, 4]
    assert model.training
    assert model.norm.num_batches_tracked == 0


class Residual1d(nn.Module):
    """A block of a 1-D ResNet: the gate stands behind a sum, where its input is no layer's output."""

    def __init__(self, between=lambda x: x):
        super().__init__()
        self.body, self.norm, self.down = nn.Conv1d(3, 6, 3, padding=1), nn.BatchNorm1d(6), nn.Conv1d(3, 6, 1)
        self.between, self.relu = between, nn.ReLU()

    def forward(self, x):
        return self.relu(self.between(self.norm(self.body(x)) + self.down(x)))


def test_units_of_a_block_along_a_length_are_its_channels():
    torch.manual_seed(0)
    model, rows = Residual1d().eval(), torch.randn(4, 3, 10)
    model.down.bias.data[2] = -100.0
    with torch.no_grad():
        outputs = model(rows)
    zeros = measure_zeros(model, rows)["relu"]
    assert zeros.values == 40
    assert zeros.zeros.tolist() == [sum(v == 0 for row in outputs for v in row[unit].tolist()) for unit in range(6)]
    assert zeros.dead_units == [2]


@pytest.mark.parametrize("norm", ["group", "layer"])
@pytest.mark.parametrize("stable", [False, True])
def test_units_of_wav2vec2_are_channels_at_every_gate(norm, stable):
    sizes = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (4, 4), "num_feat_extract_layers": 2}
    config = Wav2Vec2Config(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, hidden_act="relu", feat_extract_activation="relu", feat_extract_norm=norm,
        do_stable_layer_norm=stable, **sizes,
    )  # fmt: skip
    zeros = measure_zeros(Wav2Vec2Model(config), torch.randn(2, 640))
    assert [len(counts.zeros) for counts in zeros.values()] == [8, 8, 12, 16]


def test_units_that_cannot_be_told_from_frames_are_refused():
    mixed = Residual1d(lambda x: x.reshape(4, 12, 5))
    with pytest.raises(ValueError, match=r"relu: which axis of its input, of shape \(4, 12, 5\), counts units"):
        measure_zeros(mixed, torch.randn(4, 3, 10))
    mixed.between = torch.Tensor.tanh
    assert len(measure_zeros(mixed, torch.randn(4, 3, 10))["relu"].zeros) == 6


def test_what_smooth_gates_would_be_as_relu_is_their_off_fraction():
    torch.manual_seed(1)
    smooth = nn.Sequential(nn.Linear(3, 8), nn.GELU())
    hard = nn.Sequential(smooth[0], nn.ReLU())
    batches = [torch.randn(50, 3)]
    first, second = measure_zeros(smooth, batches)["1"], measure_zeros(hard, batches)["1"]
    assert torch.equal(first.off, second.zeros)
    assert first.zeros.sum() < second.zeros.sum()
    assert (first.kind, second.kind) == ("gelu", "relu")


def test_near_zero_takes_the_threshold_in_and_dead_means_exact_zeros():
    values = [[-0.5, 0.25, -2.0], [0.5, 0.75, -1.0]]

    class Gate(LambdaGELU):  # a smooth gate whose outputs are its inputs
        def forward(self, x):
            return x + 0

    zeros = measure_zeros(nn.Sequential(Gate()), [torch.tensor(values)], threshold=0.5)["0"]
    assert zeros.near_zero.tolist() == [2, 1, 0]
    assert zeros.near_zero_fraction.tolist() == [1.0, 0.5, 0.0]
    assert zeros.off.tolist() == [1, 0, 2]
    assert zeros.mean_absolute.tolist() == [0.5, 0.5, 1.5]
    assert zeros.dead_units == []  # the third is never on, but not at 0


def test_wrong_input_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ValueError, match="data is empty"):
        measure_zeros(model, [])
    with pytest.raises(ValueError, match="threshold must be at least 0, got -1"):
        measure_zeros(model, [torch.zeros(1, 2)], threshold=-1)
    with pytest.raises(ValueError, match="at least 0, got nan"):
        measure_zeros(model, [torch.zeros(1, 2)], threshold=math.nan)
    with pytest.raises(ValueError, match="0 has 5 units in one batch and 4 in another"):
        measure_zeros(nn.Sequential(nn.ReLU()), [torch.zeros(1, 4), torch.zeros(1, 5)])
    with pytest.raises(ValueError, match=r"no activation module runs in Linear.*make them modules"):
        measure_zeros(nn.Linear(2, 2), [torch.zeros(1, 2)])
    squared = nn.Sequential(nn.Linear(2, 2), ACT2FN["relu2"], nn.Linear(2, 2), ACT2FN["leaky_relu"])
    with pytest.raises(ValueError, match=r"no nn\.ReLU and no smooth gate .*1 ReLUSquaredActivation, 1 LeakyReLU"):
        measure_zeros(squared, torch.zeros(1, 2))
    for rows, message in ((torch.zeros(0, 2), "has no rows"), (torch.full((1, 2), math.nan), "holds NaN or infinity")):
        with pytest.raises(ValueError, match=message):
            measure_zeros(model, rows)
    broken = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    nn.init.constant_(broken[0].bias, math.nan)
    with pytest.raises(ValueError, match="1 gives NaN on these data"):
        measure_zeros(broken, torch.zeros(1, 2))
    with pytest.raises(TypeError, match=r"data must be batches.*got str"):
        measure_zeros(model, "rows.csv")
