"""The Triton kernels as far as a machine without a GPU can tell: layouts, refusals, and the interpreter's runs."""

import logging
import re
import subprocess
import sys
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from expectations import random

from hf_lgelu.activation.kernels import KERNELS
from hf_lgelu.activation.kernels.choice import choose_kernel
from hf_lgelu.activation.kernels.triton import availability
from hf_lgelu.activation.kernels.triton.pattern import FLAT_BLOCK, MAX_LOOPS, find_pattern, result_strides

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
    files = (HERE / "test_triton_kernels.py", HERE / "test_triton_gradients.py")
    output = python(
        *("-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", *files),
        environment=environment | {"TRITON_INTERPRET": "1"},
    )
    assert int(re.search(r"(\d+) passed", output)[1]) > 200


@pytest.mark.kernels
def test_a_compiler_for_real_devices_takes_the_kernels(environment, tmp_path):
    """The interpreter checks no types. Compiling needs no device: Triton brings LLVM along."""
    pytest.importorskip("triton")
    output = python(HERE / "triton_compilation.py", environment=environment | {"TRITON_CACHE_DIR": str(tmp_path)})
    launches = {}
    for line in output.splitlines():
        case, kernel, *numbers = line.split()
        launches[case, kernel] = tuple(map(int, numbers))
    # 128-bit loads of 16 elements a thread, those of s, t and λ, and the bits of an index.
    for dtype, vectors in (("float32", 4), ("bfloat16", 2)):
        assert launches[f"flat,torch.{dtype}", "forward"] == (vectors, 3, 32)
        assert launches[f"flat,torch.{dtype}", "backward"] == (2 * vectors, 4, 32)
        for gate in ("lambda_gelu_tanh", "lambda_silu"):
            assert launches[f"{gate},torch.{dtype}", "forward"] == (vectors, 3, 32)
            assert launches[f"{gate},torch.{dtype}", "backward"] == (2 * vectors, 4, 32)
    assert launches["far", "forward"] == (2, 1, 64)
    assert launches["far", "backward"] == (4, 1, 64)
    # Per channel: λ comes in vectors too where channels are neighbours.
    assert launches["rows", "forward"] == (5, 0, 32)
    assert launches["rows", "backward"] == (9, 0, 32)
    # δ lies across x: x in vectors, δ in pairs.
    assert launches["mixed", "backward"] == (4, 8 + 1, 32)


# Refusals


def test_a_tensor_on_the_cpu_is_refused():
    assert TRITON.refusal(torch.zeros(1), torch.ones(1)) == "it runs on CUDA and ROCm devices, x is on cpu"
    with pytest.raises(RuntimeError, match="the kernel 'triton' was asked for and cannot be used here: it runs on"):
        choose_kernel(torch.zeros(1), torch.ones(1), "triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_is_unavailable():
    assert "torch sees none here" in TRITON.unavailable()


@pytest.mark.parametrize(
    ("x", "hardness", "reason"),
    [
        (torch.zeros(2, dtype=torch.float64), torch.ones(1), "x is torch.float64"),
        (torch.zeros(2), torch.ones(1, device="meta"), "x is on cpu and hardness on meta"),
        (torch.zeros(2).as_subclass(type("Own", (torch.Tensor,), {})), torch.ones(1), "it takes plain tensors"),
        (torch.zeros(2, dtype=torch.complex64).conj().imag, torch.ones(1), "no sign still to be flipped"),
        (torch.zeros(2, 3, 4), torch.ones(2, 1, 4), "changes along more than one axis"),
        (torch.zeros(2, 4, 3).transpose(1, 2), torch.ones(3, 4), "changes along more than one axis"),
        (torch.zeros((4,) * 7)[(slice(None, None, 2),) * 7].permute(6, 5, 4, 3, 2, 1, 0), torch.ones(1), "7 nested"),
    ],
)
def test_what_no_device_could_take_is_refused(x, hardness, reason):
    assert reason in availability.input_refusal(x, hardness)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (3, 1), (4,), (3, 4)])
def test_what_a_device_can_take_is_not_refused(shape, dtype):
    assert availability.input_refusal(torch.zeros(2, 3, 4, dtype=dtype), torch.ones(shape)) is None


def test_an_empty_input_is_not_refused():
    assert availability.input_refusal(torch.zeros(2, 0, 4), torch.ones(2, 1, 4)) is None


def test_a_device_is_tried_once_and_a_failure_is_told_in_one_line(monkeypatch, caplog):
    trials = []
    monkeypatch.setattr(availability, "_tried", {})
    monkeypatch.setattr(availability, "_trial", lambda device: trials.append(device) or "no compiler")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "being captured" in availability.device_failure(3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with caplog.at_level(logging.WARNING, logger=availability.__name__):
        assert [availability.device_failure(3) for _ in range(3)] == ["no compiler"] * 3
    assert trials == [torch.device("cuda", 3)]
    assert [record.getMessage() for record in caplog.records] == [
        "λ-GELU does without its Triton kernels on cuda:3: no compiler"
    ]


# Patterns


def offsets(sizes, strides):
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in product(*map(range, sizes))]


SHAPES_AND_STRIDES = [
    ((2, 3, 4), ((12, 4, 1), (12, 4, 1)), (3, 1)),
    ((2, 3, 4), ((12, 4, 1), (1, 8, 2)), (3, 1)),
    ((2, 3, 4), ((12, 4, 1), (0, 5, 0)), (1,)),
    ((5, 6), ((6, 1), (12, 2)), (6,)),
    ((2, 3, 4, 5), ((60, 1, 15, 3), (60, 20, 5, 1)), (3, 1, 1)),
    ((2, 3, 4), ((12, 4, 1), (24, 8, 2)), (3, 4)),
    ((), ((), ()), (1,)),
]


@pytest.mark.parametrize(("shape", "strides", "hardness_shape"), SHAPES_AND_STRIDES)
def test_a_pattern_visits_each_element_with_its_hardness(shape, strides, hardness_shape):
    pattern = find_pattern(shape, strides, hardness_shape)
    hardness = torch.arange(prod(hardness_shape)).reshape(hardness_shape).expand(shape or (1,)).flatten().tolist()
    wanted = sorted(zip(*(offsets(shape, stride) for stride in strides), hardness, strict=True))
    got = []
    for o, c, i in product(
        product(*map(range, pattern.outer_sizes)), range(pattern.channels), product(*map(range, pattern.inner_sizes))
    ):
        steps = [
            sum(a * b for a, b in zip(o, outer, strict=True))
            + c * channel
            + sum(a * b for a, b in zip(i, inner, strict=True))
            for outer, channel, inner in pattern.strides
        ]
        got.append((*steps, c))
    assert sorted(got) == wanted


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_dense_operands_under_one_hardness_are_one_run(layout):
    strides = random(2, 3, 4, 5).contiguous(memory_format=layout).stride()
    assert find_pattern((2, 3, 4, 5), (strides, strides), (1,)).flat
    other = random(2, 3, 5, 4).transpose(2, 3).stride()
    assert not find_pattern((2, 3, 4, 5), (strides, other), (1,)).flat
    assert not find_pattern((2, 3, 4, 5), (strides, strides), (5,)).flat


def test_gaps_and_repetitions_are_no_run():
    assert not find_pattern((8,), ((1,), (2,)), (1,)).flat
    assert not find_pattern((8,), ((1,), (0,)), (1,)).flat


@pytest.mark.parametrize("n", [2**31 - 2 * FLAT_BLOCK - 8, 2**31, 2**33])
def test_indices_are_64_bits_wide_only_where_they_must_be(n):
    wide = n >= 2**31
    assert find_pattern((n,), ((1,), (1,)), (1,)).wide == wide
    assert find_pattern((n // 8, 8), ((8, 1), (8, 1)), (8,)).wide == wide
    assert find_pattern((2, 8), ((8, 1), (n, 1)), (1,)).wide == wide


@pytest.mark.parametrize("outer", [1, 2, 7, 300])
@pytest.mark.parametrize("channels", [1, 3, 64, 768])
@pytest.mark.parametrize("inner", [1, 49, 1024, 5000])
def test_tiles_fit_a_program_and_cover_everything(outer, channels, inner):
    shape, strides = (outer, channels, inner), (channels * inner, inner, 1)
    pattern = find_pattern(shape, (strides, strides), (channels, 1))
    assert prod(pattern.tile) <= FLAT_BLOCK
    assert all(block & (block - 1) == 0 for block in pattern.tile)
    elements = outer * channels * inner
    assert elements <= prod(pattern.tile) * prod(pattern.blocks)
    # No more idle lanes than powers of two make: half of each axis.
    assert prod(pattern.tile) * prod(pattern.blocks) < max(8 * elements, 2 * FLAT_BLOCK)


def test_results_lie_as_torch_lays_its_own():
    for x in (
        random(2, 3, 4).transpose(0, 1),
        random(2, 3, 4)[:, :, ::2],
        random(3, 1).expand(3, 5),
        torch.tensor(2.0),
    ):
        assert result_strides(tuple(x.shape), x.stride()) == torch.nn.functional.gelu(x).stride()


def test_more_loops_than_the_kernels_have_are_no_pattern():
    strides = tuple(3**k for k in range(MAX_LOOPS + 1, 0, -1))
    assert isinstance(find_pattern((2,) * (MAX_LOOPS + 1), (strides, strides), (1,)), str)
    assert not isinstance(find_pattern((2,) * MAX_LOOPS, (strides[1:], strides[1:]), (1,)), str)
