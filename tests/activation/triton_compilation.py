"""Compiles the Triton kernels for a device that is not there. Run by test_triton.py in a process of its own.

Each launch of launch.py is stopped after compiling. Prints per launch: the case, the kernel, its 128-bit loads, its
other loads, and the bits of its element indices.
"""

import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hf_lgelu.activation.kernels.triton import launch


class Absent:
    """As much of a driver as Triton asks for before it launches anything."""

    def get_current_target(self):
        return GPUTarget("cuda", 80, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


run, compiled = JITFunction.run, []


def compile_only(self, *arguments, warmup, **options):
    compiled.append(run(self, *arguments, warmup=True, **options))


def report(case):
    for kernel in compiled:
        wide = len(re.findall(r"ld\.global\S*\.v4\.b32", kernel.asm["ptx"]))
        loads = len(re.findall(r"ld\.global", kernel.asm["ptx"]))
        bits = 64 if re.search(r"tensor<[0-9x]*xi64>", kernel.asm["ttir"]) else 32
        print(case, kernel.metadata.name, wide, loads - wide, bits)
    compiled.clear()


def compile_both(case, x, delta, hardness, gate="lambda_gelu"):
    launch.backward(x, delta, hardness, True, True, gate)
    launch.forward(x, hardness, gate)
    report(case)


JITFunction.run = compile_only
triton.runtime.driver.set_active(Absent())
one, state = launch.Hardness(torch.ones(1)), launch.Hardness(torch.ones(1), torch.ones(1), torch.zeros(1))
for dtype in (torch.float32, torch.bfloat16):
    dense = torch.empty(64, 1024, dtype=dtype)
    compile_both(f"flat,{dtype}", dense, dense, state)
    for gate in ("lambda_gelu_tanh", "lambda_silu"):
        compile_both(f"{gate},{dtype}", dense, dense, state, gate)
# Memory that is promised and never touched.
far = torch.empty(2**31, dtype=torch.float16)
compile_both("far", far, far, one)
dense = torch.empty(64, 1024)
compile_both("rows", dense, dense, launch.Hardness(torch.ones(1024)))
images = torch.empty(4, 16, 32, 32)
compile_both("mixed", images, images.contiguous(memory_format=torch.channels_last), one)
