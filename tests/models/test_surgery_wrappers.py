"""Surgery on models that something else has wrapped: distributed, compiled."""

import copy

import pytest
import torch
import torch.distributed as dist
from families import BY_NAME
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hf_lgelu import LambdaGELU, replace_activations, substitute_relu
from hf_lgelu.models.surgery import TemporaryRelu

BERT = BY_NAME["bert"]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))


def relu_inside(model):
    with TemporaryRelu(model, kinds=("gelu",)).applied():
        pytest.fail("it must not get here")


OPERATIONS = [replace_activations, lambda model: substitute_relu(model, kinds=("gelu",)), relu_inside]


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _sharded(model):
    fully_shard(model)
    return model


def _sharded_inside(model):
    fully_shard(model[2])
    return model


class FullyShardedLike(nn.Module):
    """Stands for wrappers of FSDP1, which a CPU cannot run: the module path is what is looked at."""

    __module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"

    def __init__(self, module):
        super().__init__()
        self.module = module


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "ddp inside": lambda model: nn.Sequential(DistributedDataParallel(model)),
    "dp": DataParallel,
    "fsdp2": _sharded,
    "fsdp2 inside": _sharded_inside,
    "fsdp1": FullyShardedLike,
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("wrap", "operate"),
    # For one evaluation a sharded model may do without its activations; for good it may not.
    [
        (wrap, operate)
        for wrap in WRAPPERS
        for operate in OPERATIONS
        if operate is not relu_inside or "fsdp" not in wrap
    ],
)
def test_wrapped_for_distributed_training_is_refused(wrap, operate):
    model = mlp()
    wrapped = WRAPPERS[wrap](model)
    with pytest.raises(RuntimeError, match="before wrapping"):
        operate(wrapped)
    assert [type(module) for module in (model[1], model[3])] == [nn.GELU] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize("operate", OPERATIONS)
def test_torchscript_inside_is_refused(operate):
    model = nn.Sequential(nn.GELU(), torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.GELU())))
    with pytest.raises(RuntimeError, match=r"module '1' is TorchScript.* before torch\.jit\.script"):
        operate(model)
    assert isinstance(model[0], nn.GELU)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("whole", [True, False], ids=["root alone", "each linear layer too"])
def test_a_model_sharded_by_fsdp2_can_be_substituted_for_an_evaluation(whole):
    model = mlp()
    replace_activations(model)
    x = torch.randn(3, 4)
    with torch.no_grad():
        before = model(x)
        expected = nn.Sequential(model[0], nn.ReLU(), model[2], nn.ReLU(), model[4])(x)
    for layer in () if whole else (model[0], model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
    with torch.no_grad():
        with TemporaryRelu(model).applied():
            torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(model(x), before)
    assert not torch.allclose(before, expected)


@pytest.mark.parametrize("in_place", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_compiled_model_computes_what_surgery_put_in(in_place):
    torch.compiler.reset()
    model = mlp()
    eager = copy.deepcopy(model)
    if in_place:
        model.compile(backend="eager", fullgraph=True)
        compiled = model
    else:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(3, 4)
    outputs = []
    for change in (lambda m: None, lambda m: replace_activations(m, init_hardness=3.0), substitute_relu):
        change(compiled)
        change(eager)
        outputs.append(compiled(x))
        torch.testing.assert_close(outputs[-1], eager(x), rtol=0, atol=1e-6)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2
    assert (outputs[1] - outputs[2]).abs().max() > 1e-3
    assert type(model[1]) is nn.ReLU


def test_compiled_layers_inside_do_not_hide_the_config_key():
    model = BERT.build()
    layers = model.bert.encoder.layer
    layers[0] = torch.compile(layers[0], backend="eager")
    report = replace_activations(model)
    assert len(report) == 3
    assert model.config.hidden_act == "lambda_gelu"
    assert type(layers[0]._orig_mod.intermediate.intermediate_act_fn) is LambdaGELU
    substitute_relu(model)
    assert model.config.hidden_act == "relu"


def test_the_record_of_sites_names_them_as_the_class_does():
    model = BY_NAME["mpt"].build()
    model.transformer.blocks[0] = torch.compile(model.transformer.blocks[0], backend="eager")
    replace_activations(model)
    assert [entry["site"] for entry in model.config.lambda_gelu] == [f"transformer.blocks.{i}.ffn.act" for i in (0, 1)]
