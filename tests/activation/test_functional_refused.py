"""What the activation refuses, and in which words; torch's tracer records it."""

import numpy
import pytest
import torch
from expectations import X

import hf_lgelu
from hf_lgelu.activation.gates import GATES
from hf_lgelu.activation.module import GATE_MODULES

every_gate = pytest.mark.parametrize("gate", GATES)


# Inputs


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (X.reshape(4, 15).to_sparse(), "x .*dense.*torch.sparse_coo"),
        (X.reshape(4, 15).to_sparse_csr(), "sparse_csr"),
        (torch.quantize_per_tensor(X, 0.1, 0, torch.quint8), "quint8"),
        (X.long(), "int64"),
        (X > 0, "torch.bool"),
        (torch.complex(X, X), "complex64"),
        ("1.0", "got str"),
        (1.0, "got float"),
        (numpy.ones(3), "got ndarray"),
        (None, "got NoneType"),
    ],
)
def test_an_input_of_another_kind_is_named(x, said):
    for call in (hf_lgelu.LambdaGELU(), hf_lgelu.LambdaSiLU(), lambda x: hf_lgelu.lambda_gelu(x, 2.0)):
        with pytest.raises(TypeError, match=said):
            call(x)


@pytest.mark.parametrize(
    ("hardness", "said"),
    [
        ("2", "hardness.* str"),
        (True, "got bool"),
        (2 + 0j, "got complex"),
        (torch.ones(1, dtype=torch.int64), "int64"),
        (torch.ones(4).to_sparse(), "sparse_coo"),
        (torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.quint8), "quint8"),
    ],
)
def test_a_hardness_of_another_kind_is_named(hardness, said):
    with pytest.raises(TypeError, match=said):
        hf_lgelu.lambda_silu(X, hardness)


def test_two_devices_are_named():
    with pytest.raises(ValueError, match=r"meta.*cpu"):
        hf_lgelu.LambdaGELU()(X.to("meta"))
    with pytest.raises(ValueError, match=r"cpu.*meta"):
        hf_lgelu.lambda_gelu(X, torch.ones(1, device="meta"))
    assert hf_lgelu.LambdaGELU(device="meta")(X.to("meta")).shape == X.shape


# Arguments as torch's modules have them


@every_gate
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float64])
def test_device_and_dtype_are_taken_and_the_state_stays_float32(gate, dtype):
    module = GATE_MODULES[gate](device="meta", dtype=dtype)
    assert {(t.device.type, t.dtype) for t in module.state_dict().values()} == {("meta", torch.float32)}
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert module.hardness.item() == pytest.approx(1.05, rel=1e-6)


# States


BAD_STATES = {
    "hardness_override": (-0.5, -1.0, torch.inf, torch.nan),
    "raw_hardness": (torch.inf, -torch.inf, torch.nan),
    "temperature": (0.0, -0.1, torch.inf, torch.nan),
}


@every_gate
@pytest.mark.parametrize(("name", "number"), [(name, n) for name, numbers in BAD_STATES.items() for n in numbers])
def test_a_state_that_stands_for_no_hardness_is_refused(gate, name, number):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), GATE_MODULES[gate](init_hardness=3.0))
    state = model.state_dict()
    bad = state | {f"1.{name}": torch.full_like(state[f"1.{name}"], number)}
    with pytest.raises(RuntimeError, match=f"{name}.*{number}"):
        model.load_state_dict(bad)
    assert model[1].hardness.item() == pytest.approx(3.0, rel=1e-6)  # as it was
    model.load_state_dict({name: tensor.to("meta") for name, tensor in state.items()}, assign=True)  # nothing to read


# What torch asks of an operation
