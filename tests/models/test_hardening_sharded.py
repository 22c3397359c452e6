"""Hardening a model whose s FSDP2 has sharded, in a group of one process."""

import pytest
import torch
import torch.distributed as dist
from closed_forms import hardness, target
from tiny_training import FEATURES, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from hf_lgelu import anneal_hardness, freeze_hardness, hardness_profile, initialize_hardness
from hf_lgelu.models.hardening import is_hardened, release_hardness
from hf_lgelu.training.refusals import check_hardness_learns


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor")
def test_a_sharded_s_is_annealed_frozen_and_released(process_group):
    model = tiny_model()
    start = [float(hardness(module.raw_hardness.item(), 0.1)) for module in model.activations]
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert all(isinstance(module.raw_hardness, DTensor) for module in model.activations)
    anneal_hardness(model, 0.25)
    wanted = [value + 0.25 * (float(target()) - value) for value in start]
    assert [module.hardness_override.item() for module in model.activations] == pytest.approx(wanted, rel=1e-6)
    assert list(hardness_profile(model).values()) == pytest.approx(wanted, rel=1e-6)
    assert not is_hardened(model)
    model(torch.ones(2, FEATURES)).logits.sum().backward()
    assert [module.raw_hardness.grad.full_tensor().item() for module in model.activations] == [0, 0]
    freeze_hardness(model)
    assert [module.raw_hardness.grad for module in model.activations] == [None, None]
    anneal_hardness(model, 1.0)
    assert is_hardened(model)
    release_hardness(model)
    assert list(hardness_profile(model).values()) == pytest.approx(start, rel=1e-6)


OF_HARDNESS = {
    "hardness_profile": hardness_profile,
    "is_hardened": is_hardened,
    "anneal_hardness": lambda model: anneal_hardness(model, 0.5),
    "initialize_hardness": initialize_hardness,
    "HardeningCallback": lambda model: check_hardness_learns(model, torch.optim.SGD(model.parameters(), lr=0.1)),
}


@pytest.mark.filterwarnings("ignore:FSDP is switching to use")
@pytest.mark.parametrize(("name", "originals"), [*((name, True) for name in OF_HARDNESS), ("anneal_hardness", False)])
def test_a_flattened_s_is_refused_by_every_process(process_group, originals, name):
    """FSDP1 leaves most processes no element of s. All are to refuse: in a group of one, s is whole and marked."""
    model = tiny_model()
    before = [module.hardness_override.clone() for module in model.activations]
    wrapped = FullyShardedDataParallel(model, use_orig_params=originals, device_id=torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"FSDP1.*FSDP2.*fsdp_ver"):
        OF_HARDNESS[name](wrapped)
    assert [module.hardness_override for module in model.activations] == before
    wrapped(torch.ones(2, FEATURES)).logits.sum().backward()  # the forward has s
