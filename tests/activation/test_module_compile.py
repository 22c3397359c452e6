"""λ-GELU under torch.compile: one graph for every λ, one kernel each way, and float64's values from Inductor's code."""

import copy
import re

import oracle
import pytest
import torch
from expectations import assert_within, random
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, jacrev, jvp, vmap

from hf_lgelu import anneal_hardness, freeze_hardness
from hf_lgelu.activation.functional import lambda_gelu
from hf_lgelu.activation.module import LambdaGELU
from hf_lgelu.models.hardening import release_hardness

pytestmark = pytest.mark.kernels

HARDNESSES = (1.0, 2.0, 20.0, 160.0)


@pytest.fixture(autouse=True)
def anew():
    torch.compiler.reset()


class Block(nn.Module):
    """LayerNorm, λ-GELU and a residual."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.activation = nn.LayerNorm(width), LambdaGELU(init_hardness=2.0)

    def forward(self, x):
        return x + self.activation(self.norm(x))


# Inductor

COMPILED = [
    ("alone", torch.float32),
    ("block", torch.float32),
    pytest.param("alone", torch.bfloat16, marks=pytest.mark.slow),
    pytest.param("block", torch.bfloat16, marks=pytest.mark.slow),
]


def kernels_of(code):
    """Names of the kernels that a generated module defines, and how often it launches one."""
    defined = re.findall(r"^(\w+) = async_compile\.", code, flags=re.MULTILINE)
    return defined, len(re.findall(rf"^ +(?:{'|'.join(defined)})\(", code, flags=re.MULTILINE))


@pytest.mark.parametrize(("kind", "dtype"), COMPILED)
def test_one_kernel_each_way_and_nothing_but_x_is_kept(kind, dtype):
    module = LambdaGELU(init_hardness=2.0) if kind == "alone" else Block(256).to(dtype)
    compiled = torch.compile(module, fullgraph=True)
    x = random(64, 256, seed=1, dtype=dtype).requires_grad_()
    delta = random(64, 256, seed=2, dtype=dtype)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def step():
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            value = compiled(x)
        value.backward(delta)

    from torch._inductor.utils import run_and_get_code  # torch has no public way to the code that it generates

    _, codes = run_and_get_code(step)
    assert len(codes) == 2  # forward and backward
    for code in codes:
        defined, launches = kernels_of(code)
        assert len(defined) == launches == 1, defined
    large = [tensor for tensor in kept.values() if tensor.numel() >= x.numel()]
    assert [tensor.untyped_storage().nbytes() for tensor in large] == [x.numel() * dtype.itemsize]
    rest = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) - x.numel() * dtype.itemsize
    # s, t and the override; of the normalization two numbers a row, and its parameters.
    assert rest <= 12 + (0 if kind == "alone" else 64 * 2 * 4 + 2 * 256 * dtype.itemsize)


# One graph


def test_training_hardening_and_release_of_a_model_need_one_graph():
    model = nn.Sequential(nn.Linear(6, 16), Block(16), nn.Linear(16, 3))
    plain, compiled = copy.deepcopy(model), torch.compile(model, fullgraph=True, backend="aot_eager")
    x, start = random(32, 6, seed=9), model[1].activation.raw_hardness.item()
    seen = []
    for network, forward in ((model, compiled), (plain, plain)):
        optimizer, losses = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9), []
        for step in range(8):
            if step == 2:
                learned = network[1].activation.raw_hardness.item()
            if step in (2, 4):
                anneal_hardness(network, step / 4)
            if step == 6:
                release_hardness(network)
            with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
                loss = forward(x).square().mean()
            loss.backward()
            if 2 <= step < 6:
                assert network[1].activation.raw_hardness.grad.item() == 0
                freeze_hardness(network)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == 5:
                assert network[1].activation.raw_hardness.item() == learned != start
        assert network[1].activation.raw_hardness.item() != learned
        seen.append(losses)
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)
    assert len(set(seen[0])) == 8


# What else looks into the function


def test_an_exported_graph_is_plain():
    """As it was learned: erf, in as few operations as it takes."""
    program = torch.export.export(LambdaGELU(), (torch.ones(3),))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert sum("erf" in name for name in names) == 1
    assert not any("exp." in name for name in names)


TRANSFORMS = {
    "vmap": lambda x, h: vmap(grad(lambda y: lambda_gelu(y, h).sum()))(x),
    "jacrev": lambda x, h: jacrev(lambda y: lambda_gelu(y, h).sum())(x),
    "jvp": lambda x, h: jvp(lambda y: lambda_gelu(y, h), (x,), (torch.ones_like(x),))[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_inside_of_a_compiled_function_and_the_digits_of_float64(name):
    for dtype, accuracy in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        x, hardness = random(12, seed=10, dtype=dtype), torch.tensor([2.0], dtype=dtype)
        compiled = torch.compile(TRANSFORMS[name], fullgraph=True, backend="aot_eager")
        assert_within(compiled(x, hardness), oracle.derivative_in_x(x, hardness), accuracy)
    value = torch.compile(lambda_gelu, fullgraph=True, backend="aot_eager")(x, hardness)
    assert_within(value, oracle.value(x, hardness), 1e-14)
