"""The implementations of λ-GELU under test."""

import pytest

from hf_lgelu.activation.functional import lambda_gelu
from hf_lgelu.activation.kernels import KERNELS

FUNCTIONS = {name: kernel.function for name, kernel in KERNELS.items()} | {"lambda_gelu": lambda_gelu}


@pytest.fixture(params=FUNCTIONS)
def function(request):
    """(x, λ) → x·Φ(λx): every row of KERNELS, and the public function."""
    return FUNCTIONS[request.param]
