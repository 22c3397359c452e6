"""ReLU forward, the λ-gate's gradients backward."""

import copy

import pytest
import torch
from expectations import DELTA, X
from torch import nn
from torch.nn import functional as F

import hf_lgelu
from hf_lgelu.activation.gates import GATES
from hf_lgelu.activation.module import GATE_MODULES, SharedLambdaGate
from hf_lgelu.models.profile import swap_errors

every_gate = pytest.mark.parametrize("gate", GATES)


@every_gate
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("hardness", [1.5, 30.0])
def test_the_value_is_relus_and_the_gradients_are_the_gates(gate, dtype, hardness):
    soft = GATE_MODULES[gate](init_hardness=hardness)
    hard = GATE_MODULES[gate](init_hardness=hardness, forward="relu")
    results = []
    for module in (soft, hard):
        x = X.to(dtype).clone().requires_grad_()
        y = module(x)
        y.backward(DELTA.to(dtype))
        results.append((y.detach(), x.grad, module.raw_hardness.grad))
    assert torch.equal(results[1][0], F.relu(X.to(dtype)))
    assert not torch.equal(results[1][0], results[0][0])
    assert torch.equal(results[1][1], results[0][1])
    assert torch.equal(results[1][2], results[0][2])
    with torch.no_grad():
        assert torch.equal(hard(X), F.relu(X))


@every_gate
def test_a_network_of_them_is_a_relu_network_before_and_after_a_swap(gate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), GATE_MODULES[gate](forward="relu"), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    for _ in range(3):
        (model(X) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(model.state_dict()[name], before[name]) for name in ("0.weight", "1.raw_hardness"))
    wanted = model(X).detach()
    hf_lgelu.substitute_relu(model)
    assert torch.equal(model(X), wanted)


def test_while_hardening_holds_the_hardness_s_gets_exactly_zero():
    module = hf_lgelu.LambdaGELU(forward="relu")
    hf_lgelu.anneal_hardness(module, 0.5)
    module(X).backward(DELTA)
    assert module.raw_hardness.grad.tolist() == [0.0]


def test_followers_copies_and_transforms():
    module = hf_lgelu.LambdaSiLU(init_hardness=2.0, forward="relu")
    assert torch.equal(SharedLambdaGate(module)(X), F.relu(X))
    assert torch.equal(copy.deepcopy(module)(X), F.relu(X))
    assert "forward='relu'" in repr(module)
    assert torch.equal(torch.func.vmap(module)(X), F.relu(X))
    soft = hf_lgelu.LambdaSiLU(init_hardness=2.0)
    tangents = [torch.func.jvp(m, (X,), (DELTA,))[1] for m in (module, soft)]
    torch.testing.assert_close(*tangents)
    with pytest.raises(ValueError, match="forward must be one of gate, relu, got 'step'"):
        hf_lgelu.LambdaGELU(forward="step")


def test_what_is_relu_already_has_no_swap_error_and_no_fold():
    model = nn.Sequential(nn.Linear(5, 8), hf_lgelu.LambdaGELU(forward="relu"), nn.Linear(8, 2)).eval()
    assert swap_errors(model) == {"1": 0.0}
    found = hf_lgelu.certify_substitution(model, X.reshape(-1, 5))
    assert found.bound == 0.0
    with pytest.raises(ValueError, match="1 computes ReLU"):
        hf_lgelu.fold_hardness(model, X.reshape(-1, 5))


def test_graphs_that_leave_are_relus():
    module = hf_lgelu.LambdaSiLU(forward="relu")
    x = torch.randn(3, 5)
    exported = torch.export.export(module, (x,))
    operations = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert operations == ["aten.relu.default"]
    traced = torch.jit.trace(module, x)
    assert [node.kind() for node in traced.inlined_graph.nodes()] == ["aten::relu"]
    assert torch.equal(traced(X[:3, :5]), F.relu(X[:3, :5]))


def test_compiled_it_has_the_same_values_and_gradients():
    torch._dynamo.reset()
    module = hf_lgelu.LambdaGELU(init_hardness=2.0, forward="relu")
    results = []
    for function in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        x = X.clone().requires_grad_()
        y = function(x)
        y.backward(DELTA)
        results.append((y.detach(), x.grad, module.raw_hardness.grad))
        module.raw_hardness.grad = None
    torch._dynamo.reset()
    assert torch.equal(results[1][0], F.relu(X))
    for compiled, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(compiled, wanted, rtol=1e-5, atol=1e-6)
