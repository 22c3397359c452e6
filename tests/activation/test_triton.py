"""The Triton kernel as far as a machine without a GPU can tell: refusals, the interpreter's run, and compiling it."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_lgelu.activation.kernels import KERNELS, choose_kernel

HERE = Path(__file__).parent
TRITON = KERNELS["triton"]


def python(*arguments, environment):
    run = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    return run.stdout


@pytest.mark.kernels
def test_the_kernels_in_the_interpreter(environment):
    """In a process of its own: the interpreter has to be chosen before Triton is imported."""
    pytest.importorskip("triton")
    output = python(
        *("-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"),
        HERE / "test_triton_kernels.py",
        environment=environment | {"TRITON_INTERPRET": "1"},
    )
    assert int(re.search(r"(\d+) passed", output)[1]) > 100


@pytest.mark.kernels
def test_a_compiler_for_real_devices_takes_the_kernels(environment, tmp_path):
    """The interpreter checks no types. Compiling needs no device: Triton brings LLVM along."""
    pytest.importorskip("triton")
    output = python(HERE / "triton_compilation.py", environment=environment | {"TRITON_CACHE_DIR": str(tmp_path)})
    # 128-bit loads of 16 elements a thread, and those of s, t and λ or the override.
    for dtype, vectors in (("float32", 4), ("bfloat16", 2)):
        for gate in ("lambda_gelu", "lambda_gelu_tanh", "lambda_silu"):
            assert f"{gate} torch.{dtype} _forward {vectors} 3" in output
            assert f"{gate} torch.{dtype} _backward {2 * vectors} 3" in output


# Refusals


def test_a_tensor_on_the_cpu_is_refused():
    assert TRITON.refusal(torch.zeros(1), torch.ones(1)) == "it runs on CUDA and ROCm devices, x is on cpu"
    with pytest.raises(RuntimeError, match="'triton'"):
        choose_kernel(torch.zeros(1), torch.ones(1), "triton")


@pytest.mark.parametrize(
    ("x", "hardness", "reason"),
    [
        (torch.zeros(2, dtype=torch.float64), torch.ones(1), "x is torch.float64"),
        (torch.zeros(2), torch.ones(1, device="meta"), "takes one λ on x's device"),
        (torch.zeros(2, 3), torch.ones(3), r"takes one λ .* shape \(3,\)"),
        (torch.zeros(2).as_subclass(type("Own", (torch.Tensor,), {})), torch.ones(1), "it takes plain tensors"),
        (torch.zeros(2, dtype=torch.complex64).conj().imag, torch.ones(1), "no sign still to be flipped"),
    ],
)
def test_what_no_device_could_take_is_refused(x, hardness, reason):
    triton = pytest.importorskip("hf_lgelu.activation.kernels.triton", exc_type=ImportError)
    assert re.search(reason, triton.input_refusal(x, hardness))
    assert triton.input_refusal(torch.zeros(2, dtype=torch.bfloat16), torch.ones(1)) is None


def test_a_device_is_tried_once_and_a_failure_is_told_in_one_line(monkeypatch, caplog):
    triton = pytest.importorskip("hf_lgelu.activation.kernels.triton", exc_type=ImportError)
    trials = []
    monkeypatch.setattr(triton, "_tried", {})
    monkeypatch.setattr(triton, "_trial", lambda device: trials.append(device) or "no compiler")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "being captured" in triton.device_failure(3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with caplog.at_level(logging.WARNING, logger=triton.__name__):
        assert [triton.device_failure(3) for _ in range(3)] == ["no compiler"] * 3
    assert trials == [torch.device("cuda", 3)]
    assert [record.getMessage() for record in caplog.records] == [
        "λ-GELU does without its Triton kernels on cuda:3: no compiler"
    ]
