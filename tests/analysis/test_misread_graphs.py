"""Networks that Marabou's parser takes for others: refused, by their graph and by what it computes at points."""

import pytest
import torch
from torch import nn

from hf_lgelu import UnreadableNetworkError, verify_robustness
from hf_lgelu.analysis.verification import marabou
from hf_lgelu.analysis.verification.marabou import MarabouNetwork

pytest.importorskip("maraboupy.Marabou")


class TwoThresholds(nn.Module):
    """One map, read with a bias and without."""

    def __init__(self, moved=lambda h: h):
        super().__init__()
        self.up, self.down, self.moved = nn.Linear(4, 6, bias=False), nn.Linear(6, 3), moved
        self.threshold = nn.Parameter(torch.randn(6))

    def forward(self, x):
        h = self.up(x)
        return self.down(torch.relu(h + self.threshold) + torch.relu(self.moved(h)))


class Added(nn.Module):
    """A constant on what no equation defines: the input, or what comes out of ReLU."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x):
        h = torch.relu(self.up(x + self.shift) + x)
        return self.down(h + self.shift) + self.down(h)


def convolved(**options):
    return nn.Sequential(nn.Conv2d(1, 2, 2, stride=2, **options), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


def pooled(**options):
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 4, **options), nn.Flatten(), nn.Linear(8, 3)
    )


MISREAD = {
    "a constant beside another use": (TwoThresholds, (4,)),
    "the same behind a reshape": (lambda: TwoThresholds(lambda h: h.view(2, 3).view(1, 6)), (4,)),
    "dilation": (lambda: convolved(dilation=2), (1, 9, 9)),
    "padded pooling": (lambda: pooled(padding=1), (1, 8, 8)),
}


@pytest.mark.parametrize("case", MISREAD)
@pytest.mark.parametrize("by_graph", [True, False])
def test_a_network_that_would_be_read_as_another_is_refused(case, by_graph, monkeypatch):
    torch.manual_seed(0)
    make, shape = MISREAD[case]
    if not by_graph:
        monkeypatch.setattr(marabou, "misread", lambda file: None)
    told = "would read another network" if by_graph else "reads another network than torch runs"
    with pytest.raises(UnreadableNetworkError, match=told):
        MarabouNetwork(make().eval(), torch.rand(1, *shape))


def test_no_proof_of_a_claim_that_is_false():
    """Class 1 wins above an input of 0.3; read with both thresholds at 0.5 it never would within 0.45."""

    class OneUnit(TwoThresholds):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(1, 1, bias=False), nn.Linear(1, 2)
            self.threshold = nn.Parameter(torch.tensor([-0.5]))

    model = OneUnit().eval()
    with torch.no_grad():
        model.up.weight.fill_(1.0)
        model.down.weight.copy_(torch.tensor([[0.0], [1.0]]))
        model.down.bias.copy_(torch.tensor([0.3, 0.0]))
        assert model(torch.tensor([[0.4]])).argmax() == 1
    with pytest.raises(UnreadableNetworkError, match=r"adds a constant to .*, which is used elsewhere too"):
        verify_robustness(model, torch.zeros(1, 1), [0], epsilons=[0.45], attack_restarts=0)


def test_a_learned_scale_per_unit_is_refused_in_words():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)
            self.scale = nn.Parameter(torch.randn(6))

        def forward(self, x):
            return self.down(torch.relu(self.up(x)) * self.scale)

    with pytest.raises(
        UnreadableNetworkError, match=r"no product with a constant for each unit \(TypeError: [^\n]+\)$"
    ):
        MarabouNetwork(Scaled().eval(), torch.rand(1, 4))


def test_what_the_parser_only_asserts_is_named():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.Linear(3, 3)

        def forward(self, x):
            left, right = self.up(x).chunk(2, dim=-1)
            return self.down(torch.relu(left) + torch.relu(right))

    with pytest.raises(UnreadableNetworkError, match=r"cannot read the network's Split \(\w+, \w+\): AssertionError$"):
        MarabouNetwork(Halves().eval(), torch.rand(1, 4))


@pytest.mark.parametrize(
    ("make", "shape"), [(Added, (4,)), (convolved, (1, 9, 9)), (pooled, (1, 9, 9))], ids=["sums", "convolution", "pool"]
)
def test_networks_that_are_read_as_they_are_pass(make, shape):
    torch.manual_seed(1)
    model, point = make().eval(), torch.rand(1, *shape)
    network = MarabouNetwork(model, point)
    low, high = network._scores_at(point[0].double().numpy())
    with torch.no_grad():
        expected = model(point)[0].double()
    torch.testing.assert_close(torch.from_numpy(low), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(high), expected, rtol=0, atol=1e-5)
