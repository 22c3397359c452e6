"""What two models give: the loss left out, NaN seen, rounding told from another function."""

import contextlib
import math

import numpy as np
import pytest
import torch
from small_networks import Calls
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_lgelu.comparing.comparison import OutputComparison, compare_models, kl_terms
from hf_lgelu.models.checkpoint import require_same_model
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.networks.outputs import OutputReader, outputs_of

LABELS = torch.tensor([0, 2, 1, 0, 1])


class Shifted(nn.Module):
    """Adds to every logit what leaves the cross entropy as it is."""

    def __init__(self, model, shift):
        super().__init__()
        self.model, self.shift = model, shift

    def forward(self, features, labels=None, return_dict=True):
        output = self.model(features, labels=labels)
        output.logits = output.logits + self.shift
        return output if return_dict else (output.loss, output.logits)


def test_classes_that_cannot_be_add_nothing_to_the_kl():
    inf = math.inf
    reference = torch.tensor([[0.5, -inf, 2.0], [0.5, -inf, 2.0], [1.0, 0.0, -1.0], [0.0, math.nan, 0.0]]).double()
    other = torch.tensor([[1.5, -inf, 0.0], [1.5, 3.0, 0.0], [1.0, -inf, -1.0], [0.0, 0.0, 0.0]]).double()
    found = kl_terms(reference, other).sum(-1).tolist()
    for row, (wanted, given) in enumerate(zip(reference[:2].tolist(), other[:2].tolist(), strict=True)):
        p, q = ([math.exp(score) / sum(map(math.exp, scores)) for score in scores] for scores in (wanted, given))
        assert found[row] == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a), rel=1e-12)
    assert found[2] == inf  # what can be is impossible in the other
    assert math.isnan(found[3])


def test_a_kl_far_below_rounding_is_half_the_variance_of_the_change():
    draws = torch.Generator().manual_seed(0)
    reference, change = torch.randn(2, 5, 7, generator=draws, dtype=torch.float64)
    p = reference.softmax(-1)
    variance = (p * change.square()).sum(-1) - (p * change).sum(-1).square()
    found = kl_terms(reference, reference + 1e-9 * change).sum(-1)
    torch.testing.assert_close(found, 0.5e-18 * variance, rtol=1e-4, atol=0)


def test_the_relative_error_is_a_share_of_squares_around_the_mean_of_each_column():
    draws = torch.Generator().manual_seed(0)
    original = torch.randn(9, 4, 3, generator=draws, dtype=torch.float64) + torch.tensor([0.0, 50.0, -7.0])
    other = original + 0.1 * torch.randn(9, 4, 3, generator=draws, dtype=torch.float64)
    scale = 1 / (original - original.mean((0, 1))).square().sum()
    expected = scale * (other - original).square().sum()
    whole, parts = OutputComparison().add(original, other), OutputComparison().add(original[:2], other[:2])
    parts.merge(OutputComparison().add(original[2:], other[2:]))
    for found in (whole, parts):
        assert found.relative_error == pytest.approx(expected.item(), rel=1e-9)
        assert found.gaps == pytest.approx((scale * (other - original).square().sum((1, 2))).tolist(), rel=1e-9)


@pytest.mark.parametrize(
    ("original", "other", "expected"),
    [([2.0, 1.0], [2.0, 2.0], 0.2), ([0.0, 0.0], [0.0, 3.0], 1.0), ([0.0, 0.0], [0.0, 0.0], 0.0)],
)
@pytest.mark.parametrize("rows", [1, 5])
def test_the_error_of_an_output_that_does_not_vary_is_relative_to_its_size(original, other, expected, rows):
    found = OutputComparison().add(*(torch.tensor([row] * rows) for row in (original, other)))
    assert found.relative_error == pytest.approx(expected)


def nearest_by_hand(vectors):
    """The row that is nearest to each row by cosine, but the row itself."""
    units = [vector / np.sqrt((vector**2).sum()) for vector in vectors]
    return [max((j for j in range(len(units)) if j != i), key=lambda j: units[i] @ units[j]) for i in range(len(units))]


@pytest.mark.parametrize("is_masked", [False, True])
def test_embeddings_are_compared_by_cosine_and_nearest_neighbour(is_masked):
    """A sample's vector is the mean over its tokens; padding holds NaN, and the last sample nothing else."""
    draws = np.random.RandomState(0)
    states = draws.randn(41, 6, 3) if is_masked else draws.randn(41, 3)
    others = states + 0.8 * draws.randn(*states.shape)
    kept = np.arange(6) < draws.randint(1, 7, (41, 1)) if is_masked else None
    vectors = [states, others]
    if is_masked:
        kept[-1] = False
        states[~kept], others[~kept] = np.nan, np.nan
        vectors = [[sample[rows].mean(0) for sample, rows in zip(v[:-1], kept, strict=False)] for v in vectors]
    cosines = [(a @ b) / np.sqrt((a @ a) * (b @ b)) for a, b in zip(*vectors, strict=True)]
    same = np.mean([a == b for a, b in zip(*map(nearest_by_hand, vectors), strict=True)])
    assert 0.1 < same < 0.9
    whole, first = OutputComparison(), OutputComparison()
    counted = None if kept is None else torch.from_numpy(kept)
    pair = [torch.from_numpy(values) for values in (states, others)]
    whole.add(*pair, counted, kind="embeddings")
    for comparison, part in ((first, slice(None, 17)), (OutputComparison(), slice(17, None))):
        masks = None if counted is None else counted[part]
        comparison.add(*(values[part] for values in pair), masks, kind="embeddings")
    first.merge(comparison)
    for found in (whole, first):
        assert found.embedding == pytest.approx(
            {"cosine": np.mean(cosines), "least_cosine": min(cosines), "same_neighbour": same}, rel=1e-6
        )
    assert (whole.agreement, whole.kl) == (None, None)
    assert "predictions" not in str(whole.record())
    assert f"same nearest neighbour among these {100 * same:.2f} %" in str(whole.record())


@pytest.mark.parametrize(
    ("network", "are_vectors"),
    [
        (Calls(lambda x: {"last_hidden_state": x, "pooler_output": x[:, 0]}), True),
        (Calls(lambda x: {"token_embeddings": x, "sentence_embedding": x[:, 0]}), True),
        (Calls(lambda x: {"logits": x[:, 0], "last_hidden_state": x}), False),
        (Calls(lambda x: {"values": x[:, 0]}), False),
        (Calls(lambda x: x[:, 0]), False),
    ],
)
def test_outputs_say_whether_a_network_gives_embeddings(network, are_vectors):
    found = OutputReader(network)(torch.randn(4, 5, 3))
    assert (found.kinds[next(iter(found.tensors))] == "embeddings") == are_vectors
    assert bool(compare_models(network, network, torch.randn(4, 5, 3)).embedding) == are_vectors


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    return MLPForClassification(MLPConfig(num_features=3, hidden_size=6, num_labels=3, hidden_act="gelu"))


def test_labels_put_a_loss_first_and_the_logits_are_compared(mlp):
    first, second = Shifted(mlp, 0.0), Shifted(mlp, torch.tensor([0.0, 0.0, 2.5]))
    features = torch.randn(5, 3)
    with torch.no_grad():
        logits = mlp.eval()(features).logits
    mlp.train()
    batch = {"features": features, "labels": LABELS}
    for given in (batch, batch | {"return_dict": False}):
        assert [tuple(output.shape) for output in outputs_of(first, given)] == [(5, 3)]
    change = compare_models(first, second, batch)
    assert change.largest_change == pytest.approx(2.5)
    assert change.largest_output == logits.abs().max().item()
    assert change.rows == 5
    kept = [row.argmax() == (row + torch.tensor([0.0, 0.0, 2.5])).argmax() for row in logits]
    assert change.agreement == pytest.approx(sum(kept).item() / 5)
    assert mlp.training


def test_what_follows_the_logits_is_kept_and_a_scalar_alone_is_an_output():
    config = GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=7, n_positions=4, bos_token_id=0, eos_token_id=0)
    tokens = torch.tensor([[1, 2, 3]])
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False, "output_hidden_states": True}
    shapes = [tuple(output.shape) for output in outputs_of(GPT2LMHeadModel(config), batch)]
    assert shapes == [(1, 3, 7), (1, 3, 4), (1, 3, 4)]

    loss_of_each_row = Calls(lambda x: {"loss": x.square().sum(1), "logits": x})
    (output,) = outputs_of(loss_of_each_row, torch.ones(4, 2))
    assert output.shape == (4, 2)
    assert [output.item() for output in outputs_of(Calls(torch.mean), torch.tensor([1.0, 3.0]))] == [2.0]


def test_outputs_that_cannot_be_compared_are_named(mlp):
    wider = MLPForClassification(MLPConfig(num_features=3, hidden_size=6, num_labels=4, hidden_act="gelu"))
    with pytest.raises(ValueError, match=r"\(5, 3\).*\(5, 4\).*same task"):
        compare_models(mlp, wider, torch.randn(5, 3))


def test_nan_is_a_change_and_no_measure():
    broken, rows = Calls(lambda x: torch.stack([x[:, 0] * torch.nan, x[:, 1]], 1)), torch.tensor([[2.0, 1.0]])
    change = compare_models(nn.Identity(), broken, rows)
    assert change.largest_change != change.largest_change
    assert change.agreement == 0
    with pytest.raises(ValueError, match="NaN"):
        compare_models(broken, nn.Identity(), rows)


def test_an_infinity_that_both_give_is_no_change():
    def masked(shift, mask=-torch.inf):
        return Calls(lambda x: torch.cat([x + shift, torch.full_like(x[:, :1], mask)], 1))

    rows = torch.tensor([[2.0, 1.0]])
    change = compare_models(masked(0.0), masked(0.25), rows)
    assert (change.largest_change, change.largest_output, change.agreement) == (0.25, 2.0, 1.0)
    for mask in (torch.inf, 0.0):
        assert compare_models(masked(0.0), masked(0.0, mask), rows).largest_change == torch.inf


@pytest.mark.parametrize(("error", "accepted"), [(2e-6, True), (5e-5, False), (torch.nan, False)])
def test_rounding_is_relative_to_the_largest_output(error, accepted):
    other = Calls(lambda x: x + error * x.abs().max() * torch.eye(2)[0])
    inputs = torch.tensor([[1.0, 1000.0], [-5.0, 2.0]])
    with contextlib.nullcontext() if accepted else pytest.raises(RuntimeError, match="gives other outputs"):
        require_same_model(nn.Identity(), other, inputs)


def test_another_tensor_dtype_or_name_is_another_model():
    model, inputs = nn.Linear(2, 2), torch.ones(1, 2)
    for other in (nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.Linear(2, 2).double()):
        other.weight.data.copy_(model.weight.data)
        if other.weight.dtype == torch.float64:  # the same numbers
            other.bias.data.copy_(model.bias.data)
        with pytest.raises(
            RuntimeError, match=r"loaded again, has (another bias$|2 tensors of another dtype \(bias: )"
        ):
            require_same_model(model, other, inputs)


@pytest.mark.parametrize(("shape", "rows"), [((7, 1), 7), ((7,), 7), ((2, 3, 1), 6)])
def test_of_a_single_score_a_row_no_prediction_is_said_to_stay(shape, rows):
    change = compare_models(nn.Identity(), Calls(lambda x: x + 0.5), torch.randn(shape))
    assert (change.agreement, change.rows) == (None, rows)
    assert change.largest_change == pytest.approx(0.5, rel=1e-6)
    assert str(change).endswith(f", on {rows} rows")


def test_the_classes_of_maps_are_on_axis_1():
    """Not along their width, where every column of an image would count as a class."""

    def fixed(scores):
        return Calls(lambda x: {"logits": scores[: len(x)]})

    torch.manual_seed(0)
    scores = torch.randn(2, 3, 4, 5)
    other = scores + 0.5 * torch.randn(2, 3, 4, 5)
    change = compare_models(fixed(scores), fixed(other), torch.zeros(2, 1))
    best = [
        [max(range(3), key=lambda c: maps[n, c, y, x].item()) for n in range(2) for y in range(4) for x in range(5)]
        for maps in (scores, other)
    ]
    same = sum(a == b for a, b in zip(*best, strict=True))
    assert (change.rows, change.agreement) == (40, pytest.approx(same / 40))
    assert 20 < same < 40
    one = compare_models(fixed(scores[:, :1]), fixed(other[:, :1]), torch.zeros(2, 1))
    assert (one.rows, one.agreement) == (40, None)
