"""Targets from pre-activations: predicted errors next to measured errors, on samples of known density."""

import copy
import functools
import math

import mpmath
import pytest
import torch
from activation.oracle import EXACT_STEPS as STEPS
from lgelu_lab.studies.layer_targets import layer_targets
from torch import nn

from hf_lgelu import anneal_hardness, hardness_profile
from hf_lgelu.activation.gates import GATES
from hf_lgelu.activation.module import GATE_MODULES
from hf_lgelu.models.hardening import is_hardened

every_gate = pytest.mark.parametrize("gate", GATES)


@functools.cache
def moments(gate):
    """∫|u|·|H(u) − G(u)|du and ∫u²·(H(u) − G(u))²du: c₁ and c₂ of `layer_targets`."""
    parts = [0, 1, 2, 4, 8, 16, 32, 100]
    return [2 * float(mpmath.quad(lambda u, p=power: (u * STEPS[gate](-u)) ** p, parts)) for power in (1, 2)]


def normal(count=400_000, mean=0.3, deviation=2.0, seed=0):
    return mean + deviation * torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@every_gate
def test_the_measured_error_is_the_predicted_one(gate):
    tolerance = 1e-2
    model, z = nn.Sequential(nn.Identity(), GATE_MODULES[gate]()), normal()
    (target,) = layer_targets(model, z, tolerance=tolerance).values()
    error = GATES[gate].plain_function(target * z) / target - z.relu()
    relative = error.square().mean().sqrt() / z.relu().square().mean().sqrt()
    assert relative.item() == pytest.approx(tolerance, rel=0.05)
    moment, square_moment = moments(gate)
    density = math.exp(-0.5 * (0.3 / 2) ** 2) / (2 * math.sqrt(2 * math.pi))
    assert error.abs().mean().item() == pytest.approx(density * moment / target**2, rel=0.05)
    exact = (density * square_moment / (tolerance**2 * z.relu().square().mean().item())) ** (1 / 3)
    assert target == pytest.approx(exact, rel=0.02)


def test_each_layer_has_its_own_and_hardening_takes_them():
    model = nn.Sequential(
        nn.Linear(4, 64), GATE_MODULES["lambda_gelu"](), nn.Linear(64, 64), GATE_MODULES["lambda_silu"]()
    )
    before = copy.deepcopy(model.state_dict())
    batches = [torch.randn(256, 4) for _ in range(3)]
    targets = layer_targets(model, batches)
    assert list(targets) == ["1", "3"]
    assert targets == pytest.approx(layer_targets(model, torch.cat(batches)), rel=1e-12)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    anneal_hardness(model, 1.0, target_hardness=targets)
    assert hardness_profile(model) == pytest.approx(targets, rel=1e-6)
    assert is_hardened(model, targets, fraction=1.0)
    assert not is_hardened(model, {"1": 2 * targets["1"], "3": targets["3"]}, fraction=1.0)
    for call in (
        lambda: anneal_hardness(model, 1.0, target_hardness={"2": 9.0}),
        lambda: is_hardened(model, {"2": 9.0}),
    ):
        with pytest.raises(ValueError, match="target_hardness names 2, which is no row of GATES and no λ-gate of"):
            call()


def exact_error(gate, hardness, deviation):
    """E[z²(H(z) − G(λz))²] of a normal z."""

    def density(u):
        return (u / hardness * STEPS[gate](-u)) ** 2 * mpmath.npdf(u / hardness, 0, deviation) / hardness

    return float(2 * mpmath.quad(density, [0, 1, 2, 4, 8, 16, 32]))


@pytest.mark.parametrize(("gate", "shape"), [("lambda_gelu", (3, 5)), ("lambda_silu", (3, 1))])
def test_each_channel_and_element_has_its_own(gate, shape):
    deviations = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    gate_module = GATE_MODULES[gate](raw_shape=shape)
    model = nn.Sequential(nn.Identity(), gate_module)
    z = deviations[:, None] * normal(900_000, mean=0.0, deviation=1.0).view(-1, 3, 5)
    targets = layer_targets(model, [z[:20_000], z[20_000:]], tolerance=0.01)["1"]
    assert targets.shape == shape
    # ρ² = σ²/2 for all together; the error of each by its own density.
    allowed = 1e-4 * (deviations.square() / 2).mean().item()
    for deviation, row in zip(deviations.tolist(), targets.tolist(), strict=True):
        error = exact_error(gate, row[0], deviation)
        assert error == pytest.approx(allowed, rel=0.03 if shape == (3, 1) else 0.1)
        assert row == pytest.approx([row[0]] * len(row), rel=0.05)
    anneal_hardness(model, 1.0, target_hardness={"1": targets})
    torch.testing.assert_close(gate_module.hardness.double(), targets, rtol=1e-6, atol=0)
    error = gate_module(z) - z.relu()
    assert (error.square().mean() / z.relu().square().mean()).sqrt().item() == pytest.approx(0.01, rel=0.05)
    assert is_hardened(model, {"1": targets}, fraction=1.0)
    assert not is_hardened(model, {"1": targets * torch.tensor([[1.0], [1.0], [2.0]])}, fraction=1.0)
    for wrong in (targets[0], targets.flatten()):
        with pytest.raises(ValueError, match="the target of 1 has shape"):
            anneal_hardness(model, 1.0, target_hardness={"1": wrong})
    with pytest.raises(ValueError, match="target_hardness must be a finite number > 1"):
        anneal_hardness(model, 1.0, target_hardness={"1": targets - targets.min() + 1})


def test_a_channel_that_is_far_from_0_needs_no_hardness():
    """Where the density near 0 says nothing, the error itself does."""
    module = GATE_MODULES["lambda_gelu"](raw_shape=(2,))
    z = torch.stack([torch.linspace(-9.0, -8.0, 1000), torch.linspace(0.5, 0.6, 1000)], dim=1).double()
    dead, alive = layer_targets(module, z, tolerance=0.01)[""].tolist()
    assert dead == pytest.approx(1.05, rel=1e-9)
    allowed = 0.01**2 * z.relu().square().mean().item()

    def mean_square(hardness):
        return float(mpmath.quad(lambda x: (x * mpmath.ncdf(-hardness * x)) ** 2, [0.5, 0.6]) / 0.1)

    assert mean_square(1.05 * alive) < allowed < mean_square(alive / 1.05)


def test_sites_that_share_a_hardness_count_together():
    owner = GATE_MODULES["lambda_gelu"]()
    model = nn.Sequential(owner, owner)
    z = normal(50_000)
    (target,) = layer_targets(model, z).values()
    alone = GATE_MODULES["lambda_gelu"]()
    (wanted,) = layer_targets(nn.Sequential(alone), torch.cat([z, owner(z).detach()])).values()
    assert target == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("data", "tolerance", "said"),
    [
        (torch.ones(3), 0.0, r"tolerance must be a number in \(0, 1\), got 0\.0"),
        ([], 0.01, "0 gets no finite inputs above 0"),
        (-torch.ones(3), 0.01, "0 gets no finite inputs above 0"),
    ],
)
def test_what_gives_no_target_is_refused(data, tolerance, said):
    with pytest.raises(ValueError, match=said):
        layer_targets(nn.Sequential(GATE_MODULES["lambda_gelu"]()), data, tolerance=tolerance)


class Tokens(nn.Module):
    """A gate that follows an embedding, with as many λ as its granularity says."""

    def __init__(self, **options):
        super().__init__()
        self.embedding, self.act = nn.Embedding(30, 8), GATE_MODULES["lambda_gelu"](**options)

    def forward(self, input_ids, attention_mask=None):
        return self.act(self.embedding(input_ids))


@pytest.mark.parametrize("options", [{}, {"raw_shape": (8,)}], ids=["layer", "channel"])
def test_padding_does_not_count(options):
    model = Tokens(**options)
    with torch.no_grad():
        model.embedding.weight[0] *= 20  # what is padded with
    rows = [torch.randint(1, 30, (length,)) for length in (9, 5, 7)]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    (found,) = layer_targets(model, {"input_ids": ids, "attention_mask": mask}).values()
    (expected,) = layer_targets(model, [{"input_ids": row[None]} for row in rows]).values()
    (with_padding,) = layer_targets(model, {"input_ids": ids}).values()
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-9, atol=0)
    assert (torch.as_tensor(with_padding) != torch.as_tensor(expected)).all()


def test_a_network_that_was_compiled_before_is_measured():
    """Its code, made before there were hooks, looks at none."""
    model = nn.Sequential(nn.Linear(4, 6), GATE_MODULES["lambda_gelu"](), nn.Linear(6, 2)).eval()
    rows = torch.randn(64, 4)
    wanted = layer_targets(model, rows, tolerance=0.01)
    model.compile(backend="eager")
    with torch.no_grad():
        model(rows)
    assert layer_targets(model, rows, tolerance=0.01) == wanted
