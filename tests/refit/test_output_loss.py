"""The loss of `distill` against sums by hand: columns, boxes, embeddings, networks that draw at random."""

import copy
import types

import pytest
import torch
from refit_nets import Encoder
from torch import nn
from torch.nn import functional as F

from hf_lgelu.networks.batches import Batch, read_batches
from hf_lgelu.networks.outputs import OutputReader
from hf_lgelu.refit.output_loss import column_variances, output_loss


class TwoOutputs(nn.Module):
    """Numbers that are no class scores, of sizes far apart, and one that never varies."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(5)
        self.hidden, self.last = nn.Linear(4, 12), nn.Linear(12, 5)
        self.scale = scale

    def forward(self, x):
        found = self.last(F.gelu(self.hidden(x))) * self.scale
        return {
            "boxes": torch.cat([1000 * found[:, :1], found[:, 1:3], 0 * found[:, :1] + 2], 1),
            "scores": found[:, 3:],
        }


def test_every_column_of_outputs_that_are_no_class_scores_counts_alike():
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(6))
    original, other = TwoOutputs(1.0), TwoOutputs(1.1)
    loss = output_loss(OutputReader(original)(x), OutputReader(other), Batch(x, None))
    # Of a column y the error is Σ(0.1·y)² over Σ(y - ȳ)²; the one that does not vary has none.
    total = 0.0
    for columns in (original(x)["boxes"][:, :3], original(x)["scores"]):
        shares = [float((0.1 * y).square().sum() / (y - y.mean()).square().sum()) for y in columns.detach().double().T]
        total += sum(shares) / len(shares)
    assert loss.item() == pytest.approx(total, rel=1e-4)


def test_a_column_is_measured_by_its_variance_over_all_batches():
    """Of a single row no spread is known; a column of numbers near zero beside the others counts nothing."""
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(6))
    original, other = TwoOutputs(1.0), TwoOutputs(1.1)
    parts = [(OutputReader(original)(part), Batch(part, None), 1.0) for part in x.split(20)]
    variances = column_variances(parts)
    one, total = x[:1], 0.0
    for name, varying in (("boxes", 3), ("scores", None)):
        spread = original(x)[name].detach().double().var(0, correction=0)[:varying]
        torch.testing.assert_close(variances[name][:varying], spread, rtol=1e-5, atol=0)
        assert not variances[name][spread.numel() :].any()
        total += float(((0.1 * original(one)[name].detach().double()[:, :varying]).square() / spread).mean())
    loss = output_loss(OutputReader(original)(one), OutputReader(other), Batch(one, None), variances=variances)
    assert loss.item() == pytest.approx(total, rel=1e-4)
    faint = parts[0][0]._replace(tensors={"boxes": torch.cat([x, 1e-30 * x], 1)}, kinds={"boxes": "values"})
    assert (column_variances([(faint, Batch(x, None), 1.0)])["boxes"] > 0).tolist() == [True] * 4 + [False] * 4


class Boxes(nn.Module):
    """As a detector's interface: class scores and a box of each of five places."""

    def __init__(self, columns, scale):
        super().__init__()
        torch.manual_seed(5)
        self.config, self.last = types.SimpleNamespace(num_labels=3), nn.Linear(4, columns + 4)
        self.columns, self.scale = columns, scale

    def forward(self, pixel_values):
        found = self.last(pixel_values) * self.scale
        return {"logits": found[..., : self.columns], "pred_boxes": found[..., self.columns :]}


@pytest.mark.parametrize("has_nothing", [False, True])
def test_a_box_counts_as_much_as_a_detector_is_sure_that_something_is_in_it(has_nothing):
    """Of three classes, read by a sigmoid each, or by a softmax with a fourth score for nothing."""
    x = torch.randn(30, 5, 4, generator=torch.Generator().manual_seed(6))
    original, other = Boxes(3 + has_nothing, 1.0), Boxes(3 + has_nothing, 1.1)
    batch = Batch({"pixel_values": x}, None)
    loss = output_loss(OutputReader(original)(batch.inputs), OutputReader(other), batch)
    (z, boxes), (found, moved) = ([part.detach().double().flatten(0, 1) for part in net(x).values()]
                                  for net in (original, other))  # fmt: skip
    if has_nothing:
        p, q = z.softmax(-1), found.softmax(-1)
        sure, far = 1 - p[:, -1], (p * (p / q).log()).sum()
    else:
        p, q = z.sigmoid(), found.sigmoid()
        sure, far = p.max(-1).values, (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum()
    off = ((moved - boxes) ** 2 / boxes.var(0, correction=0)).mean(-1)
    assert loss.item() == pytest.approx(float((far + 4 * (sure * off).sum()) / sure.sum()), rel=1e-4)


def test_of_embeddings_the_mean_over_the_tokens_counts_too():
    torch.manual_seed(7)
    original, other = Encoder(), Encoder()
    ids, lengths = torch.randint(20, (5, 9)), [9, 7, 4, 9, 2]
    mask = torch.tensor([[1] * length + [0] * (9 - length) for length in lengths])
    batch = next(iter(read_batches({"input_ids": ids, "attention_mask": mask})))
    loss = output_loss(OutputReader(original)(batch.inputs), OutputReader(other), batch)
    y, found = (net(ids, mask)["last_hidden_state"].detach().double() for net in (original, other))
    means = [[states[row, :length].mean(0) for row, length in enumerate(lengths)] for states in (y, found)]
    turned = sum(1 - float(one @ two / one.norm() / two.norm()) for one, two in zip(*means, strict=True)) / 5
    y, found = y[mask.bool()], found[mask.bool()]
    shares = (found - y).square().sum(0) / (y - y.mean(0)).square().sum(0)
    assert loss.item() == pytest.approx(turned + float(shares.mean()), rel=1e-4)


class Drawing(nn.Module):
    """Masks some of its inputs at random in eval mode too, as ViTMAE does."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(x * (torch.rand(x.shape) > 0.3))


def test_a_network_that_draws_at_random_is_no_way_from_a_copy_of_itself():
    torch.manual_seed(6)
    original, x = Drawing().eval(), torch.randn(30, 4)
    state = torch.get_rng_state()
    loss = output_loss(OutputReader(original)(x), OutputReader(copy.deepcopy(original)), Batch(x, None))
    assert loss.item() == 0.0
    assert loss.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
