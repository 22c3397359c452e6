"""The launch configurations: accelerate reads them, and they say what λ-GELU needs. No GPU, so none is launched."""

import re
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

FOLDER = Path(__file__).parents[1] / "scripts" / "accelerate"
KINDS = {
    "multi_gpu.yaml": (DistributedType.MULTI_GPU, 1),
    "multi_node.yaml": (DistributedType.MULTI_GPU, 2),
    "fsdp.yaml": (DistributedType.FSDP, 1),
}


def test_every_configuration_is_tested():
    assert {path.name for path in FOLDER.iterdir()} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_accelerate_reads_it(name):
    config = load_config_from_file(str(FOLDER / name))
    assert (config.distributed_type, config.num_machines) == KINDS[name]
    assert config.mixed_precision == "bf16"
    assert not config.use_cpu
    assert config.num_processes % config.num_machines == 0


@pytest.mark.parametrize("name", KINDS)
def test_the_command_in_it_names_itself(name):
    assert re.search(rf"accelerate launch --config_file scripts/accelerate/{name} ", (FOLDER / name).read_text())


def test_fsdp_shards_parameter_by_parameter_and_saves_one_file():
    # FSDP1 without original parameters hides the raw hardness from its parameter group; FSDP2 always keeps them.
    sharding = load_config_from_file(str(FOLDER / "fsdp.yaml")).fsdp_config
    assert sharding["fsdp_version"] == 2
    assert sharding["fsdp_state_dict_type"] == "FULL_STATE_DICT"
