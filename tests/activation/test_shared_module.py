"""SharedLambdaGate: one hardness for every site of a model."""

import oracle
import pytest
import safetensors.torch
import torch
from expectations import (
    CASTS,
    COPIES,
    DELTA,
    X,
    assert_evaluates_at,
    assert_same_state,
    assert_within,
    override,
    state_of,
)
from torch import nn

from hf_lgelu.activation.module import LambdaGELU, SharedLambdaGate


class TwoSites(nn.Module):
    """a(x) + a(2x), the second site sharing the hardness of the first."""

    def __init__(self, init_hardness=1.5):
        super().__init__()
        self.first = LambdaGELU(init_hardness=init_hardness, granularity="network")
        self.second = SharedLambdaGate(self.first)

    def forward(self, x):
        return self.first(x) + self.second(2 * x)


def test_a_follower_has_no_tensors_of_its_own():
    model = TwoSites()
    assert list(model.second.state_dict()) == []
    assert list(model.second.parameters()) == []
    assert list(model.second.buffers()) == []
    assert list(model.state_dict()) == ["first.raw_hardness", "first.temperature", "first.hardness_override"]
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == ["first.raw_hardness"]


def test_a_follower_shows_the_state_of_its_owner():
    model = TwoSites()
    assert model.second.owner is model.first
    assert model.second.raw_hardness is model.first.raw_hardness
    assert model.second.granularity == model.first.granularity == "network"
    override(model.first, 40.0)
    assert model.second.hardness.tolist() == [40.0]


@pytest.mark.parametrize("hardness_override", [0.0, 40.0])
def test_a_follower_evaluates_at_the_hardness_of_its_owner(hardness_override):
    model = TwoSites(init_hardness=1.5)
    override(model.first, hardness_override)
    assert_evaluates_at(model.second, hardness_override or 1.5)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_all_sites_add_up_in_the_owner(compiled):
    torch._dynamo.reset()
    model = TwoSites()
    function = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    function(X).backward(DELTA)
    raw = model.first.raw_hardness.detach()
    hardness = oracle.hardness_of(raw, 0.1)
    terms = torch.stack([oracle.derivative_in_hardness(x, hardness) for x in (X, 2 * X)])
    terms = DELTA.double() * terms * oracle.hardness_rate(raw, 0.1)
    assert_within(model.first.raw_hardness.grad, terms.sum(), 1e-5 * terms.abs().sum())


@pytest.mark.parametrize("copied", COPIES)
def test_the_follower_of_a_copy_follows_the_owner_of_the_copy(copied):
    model = TwoSites(init_hardness=1.5)
    other = COPIES[copied](model)
    assert other.second.owner is other.first
    assert other.first is not model.first
    override(other.first, 40.0)
    assert_evaluates_at(other.second, 40.0)
    assert_evaluates_at(model.second, 1.5)


def test_a_shared_model_survives_safetensors(tmp_path):
    model, other = TwoSites(init_hardness=1.5), TwoSites(init_hardness=9.0)
    override(model.first, 30.0)
    safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    safetensors.torch.load_model(other, tmp_path / "model.safetensors")
    assert_same_state(other, state_of(model))
    assert_evaluates_at(other.second, 30.0)


@pytest.mark.parametrize("cast", CASTS)
def test_casting_leaves_a_follower_in_step(cast):
    model = CASTS[cast](TwoSites(init_hardness=1.5))
    assert model.second.raw_hardness.dtype == torch.float32
    assert_evaluates_at(model.second, 1.5)


@pytest.mark.parametrize("owner", [nn.GELU(), None, SharedLambdaGate(LambdaGELU())])
def test_a_follower_needs_a_lambda_gelu_to_follow(owner):
    with pytest.raises(TypeError, match=f"owner must be the λ-gate .*, got {type(owner).__name__}"):
        SharedLambdaGate(owner)


def test_data_parallel_is_refused_where_a_replica_would_use_the_hardness_of_another_device():
    replica = LambdaGELU()._replicate_for_data_parallel()  # what torch.nn.DataParallel calls for each device
    assert isinstance(replica, LambdaGELU)
    with pytest.raises(RuntimeError, match=r"DataParallel copies each module .* Train with DistributedDataParallel"):
        TwoSites().second._replicate_for_data_parallel()
