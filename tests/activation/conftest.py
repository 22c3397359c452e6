"""The implementations of λ-GELU under test."""

import os
from pathlib import Path

import pytest
import torch

import hf_lgelu
from hf_lgelu.activation.functional import lambda_gelu
from hf_lgelu.activation.kernels import KERNELS, Kernel

HERE = [name for name, kernel in KERNELS.items() if kernel.refusal(torch.zeros(1), torch.ones(1)) is None]
"""The rows that run on this machine's CPU; test_cpu_function.py sees to it that "cpu" is among them."""

TRANSFORMABLE = ["aten", "eager", "automatic"]
"""Those that torch.func, forward mode and float64 can go through; "automatic" is the public function."""


def named(name):
    """(x, λ) → x·Φ(λx) by the kernel; a test whose input it refuses is skipped with the kernel's reason."""
    if name == "automatic":
        return lambda_gelu
    kernel = KERNELS[name]

    def function(x, hardness):
        if (reason := kernel.refusal(x, hardness)) is not None:
            pytest.skip(reason)
        return kernel.function(x, hardness)

    return function


@pytest.fixture(params=[*HERE, "automatic"])
def function(request):
    """Every row of KERNELS that runs here, and the public function."""
    return named(request.param)


@pytest.fixture(params=TRANSFORMABLE)
def transformable(request):
    """The rows whose operations torch can see, and the public function, which chooses among them."""
    return named(request.param)


@pytest.fixture
def environment():
    """Of a new process that imports the package under test."""
    root = str(Path(hf_lgelu.__file__).parents[1])
    return {name: value for name, value in os.environ.items() if not name.startswith("LGELU_KERNEL")} | {
        "PYTHONPATH": root,
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels that ran, in order."""
    ran = []
    for name, kernel in list(KERNELS.items()):

        def function(x, hardness, gate, name=name, kernel=kernel):
            ran.append(name)
            return kernel.function(x, hardness, gate)

        monkeypatch.setitem(KERNELS, name, Kernel(name, kernel.description, function, kernel.refusal))
    return ran
