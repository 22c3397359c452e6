"""Compiles the Triton kernel for a device that is not there. Run by test_triton.py in a process of its own.

Each launch is stopped after compiling. Prints a line for each: the gate, the dtype, the kernel, its 128-bit loads, its
other loads.
"""

import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hf_lgelu.activation.kernels.triton import learned_lambda_gate


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


JITFunction.run = compile_only
triton.runtime.driver.set_active(Absent())
for dtype in (torch.float32, torch.bfloat16):
    for gate in ("lambda_gelu", "lambda_gelu_tanh", "lambda_silu"):
        x, s = torch.zeros(64, 1024, dtype=dtype, requires_grad=True), torch.ones(1, requires_grad=True)
        learned_lambda_gate(x, s, torch.ones(1), torch.zeros(1), gate).sum().backward()
        for kernel in compiled:
            wide = len(re.findall(r"ld\.global\S*\.v4\.b32", kernel.asm["ptx"]))
            loads = len(re.findall(r"ld\.global", kernel.asm["ptx"]))
            print(gate, dtype, kernel.metadata.name, wide, loads - wide)
        compiled.clear()
