"""Which kernel is taken: argument, context manager, environment, and what the report says of it."""

import os

import pytest
import torch
from expectations import random
from fresh_process import run_fresh

import hf_lgelu
from hf_lgelu.activation.kernels import KERNELS, choose_kernel, use_kernel

X, HARDNESS = random(8, seed=1), torch.tensor([2.0])


def test_the_first_that_takes_the_input_runs(calls):
    hf_lgelu.lambda_gelu(X, HARDNESS)
    hf_lgelu.lambda_gelu(X.double(), HARDNESS)
    assert calls == ["cpu", "aten"]


def test_the_argument_wins_over_the_context_and_the_context_over_the_automatic_choice(calls):
    with use_kernel("aten"):
        hf_lgelu.lambda_gelu(X, HARDNESS)
        hf_lgelu.lambda_gelu(X, HARDNESS, kernel="eager")
    assert calls == ["aten", "eager"]


def test_contexts_nest_and_end_with_an_error(calls):
    with use_kernel("eager"):
        with use_kernel(None):
            hf_lgelu.lambda_gelu(X, HARDNESS)
        with pytest.raises(ZeroDivisionError), use_kernel("aten"):
            raise ZeroDivisionError
        hf_lgelu.lambda_gelu(X, HARDNESS)
    hf_lgelu.lambda_gelu(X, HARDNESS)
    assert calls == ["cpu", "eager", "cpu"]


def test_a_named_kernel_that_cannot_take_the_input_raises_and_says_why():
    with pytest.raises(RuntimeError, match=r"'cpu'.*float64"):
        hf_lgelu.lambda_gelu(X.double(), HARDNESS, kernel="cpu")
    with use_kernel("cpu"), pytest.raises(RuntimeError, match="cannot be used here"):
        hf_lgelu.LambdaGELU()(X.double())


@pytest.mark.parametrize("name", ["fast", "CPU", ""])
def test_an_unknown_name_raises_and_lists_the_kernels(name):
    for ask in (lambda: use_kernel(name).__enter__(), lambda: choose_kernel(X, HARDNESS, name)):
        with pytest.raises(ValueError, match=f"{', '.join(KERNELS)}.*{name!r}"):
            ask()


CODE = """
import os, sys
import torch
# What the process was made with: Triton is to be missing, and the others would be registered in at every new import.
for name in [name for name in sys.modules if name.split(".")[0] in ("triton", "transformers", "timm", "accelerate")]:
    del sys.modules[name]
sys.modules["triton"] = None  # torch looks for it where it is imported; it is hidden from us alone

def forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "hf_lgelu"]:
        del sys.modules[name]

import hf_lgelu
os.environ["LGELU_KERNEL"] = "fastest"
try:
    hf_lgelu.lambda_gelu
except ValueError as error:
    print("unknown:", error)
forget()
os.environ["LGELU_KERNEL"] = "eager"
import hf_lgelu
from hf_lgelu.activation.kernels import use_kernel
from hf_lgelu.activation.kernels import kernel_report
print("named:", kernel_report().splitlines()[0])
with use_kernel(None):
    print("automatic:", kernel_report().splitlines()[0])
del os.environ["LGELU_KERNEL"]
print("built:", *(hf_lgelu.lambda_gelu(torch.ones(3), 1.0, kernel="cpu").tolist()))
from hf_lgelu.activation import kernels
print("triton's:", "hf_lgelu.activation.kernels.triton" in sys.modules)
class OnCuda:
    is_cuda = True
del sys.modules["triton"]
sys.path.insert(0, os.environ["BROKEN"])
print("broken:", kernels._triton_refusal(OnCuda, None))
"""


def test_a_new_process(tmp_path, monkeypatch):
    broken = tmp_path / "broken" / "triton"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtriton.so: no such file')")
    for name in [name for name in os.environ if name.startswith("LGELU_KERNEL")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BROKEN", str(broken.parent))
    (tmp_path / "program.py").write_text(CODE)
    done = run_fresh(tmp_path / "program.py")
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said["unknown"].startswith("the environment variable LGELU_KERNEL must be one of cpu, ")
    assert said["unknown"].endswith("got 'fastest'")
    assert "choice: eager (use_kernel or LGELU_KERNEL)" in said["named"]
    assert said["automatic"].endswith("choice: automatic")
    assert [round(float(word), 4) for word in said["built"].split()] == [0.8413] * 3  # Φ(1)
    assert said["triton's"] == "False"  # imported where there is a device
    assert said["broken"].startswith("Triton cannot be imported (libtriton.so: no such file); pip install triton")
    assert done.stderr == ""
