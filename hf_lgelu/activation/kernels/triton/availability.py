"""Where the Triton kernels can run, and what they refuse."""

import logging
import subprocess
from importlib.util import find_spec

import torch
from torch import Tensor

from hf_lgelu.activation.gates import DEFAULT_GATE
from hf_lgelu.activation.kernels import aten, eager
from hf_lgelu.activation.kernels.opaque import opaque_refusal
from hf_lgelu.activation.kernels.triton.pattern import find_pattern, result_strides

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GATES = ("lambda_gelu", "lambda_gelu_tanh", "lambda_silu")


def unavailable() -> str | None:
    """Why these kernels cannot run on this machine, or None."""
    if not torch.cuda.is_available():
        return "it runs on CUDA and ROCm devices, and torch sees none here"
    return device_failure(torch.cuda.current_device())


def refusal(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> str | None:
    """Why these kernels cannot take this input, or None."""
    if gate not in _GATES:
        return f"it has no formula for {gate}"
    if not x.is_cuda:
        return f"it runs on CUDA and ROCm devices, x is on {x.device}"
    return input_refusal(x, hardness) or device_failure(x.device.index)


def input_refusal(x: Tensor, hardness: Tensor) -> str | None:
    """Why no device could take this input, or None."""
    if x.dtype not in _DTYPES:
        return f"it takes float32, bfloat16 and float16, x is {x.dtype}"
    if hardness.device != x.device:
        return f"x is on {x.device} and hardness on {hardness.device}"
    if (reason := opaque_refusal(x, hardness)) is not None:
        return reason
    if x.numel() == 0:
        return None
    shape, strides = tuple(x.shape), x.stride()
    pattern = find_pattern(shape, (result_strides(shape, strides), strides, strides), tuple(hardness.shape))
    return pattern if isinstance(pattern, str) else None


def device_failure(index: int) -> str | None:
    """Why the kernels do not work on CUDA device `index`, found out by running them once; None if they do."""
    if index not in _tried:
        if torch.cuda.is_current_stream_capturing():
            # Compiling and comparing would break the capture; who captures a graph has mostly run it before.
            return "they have not run on this device before, and a CUDA graph is being captured"
        _tried[index] = reason = _trial(torch.device("cuda", index))
        if reason is not None:
            logger.warning("λ-GELU does without its Triton kernels on cuda:%d: %s", index, reason)
    return _tried[index]


_tried: dict[int, str | None] = {}


def _trial(device: torch.device) -> str | None:
    """Why the kernels do not run there, or do not agree with torch; None if they do."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton; torch for CUDA on Linux brings it along)"
    try:
        from triton.errors import TritonError

        from hf_lgelu.activation.kernels.triton import launch
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    # Of the alignment and size of real ones, so that what is compiled here is what they need.
    x = torch.linspace(-6, 6, 4096, device=device, dtype=torch.float32)
    hardness, delta = x.new_full((1,), 1.5), torch.cos(x)
    try:
        got = launch.forward(x, launch.Hardness(hardness))
        got_gradients = launch.backward(x, delta, launch.Hardness(hardness), True, True)
    except torch.OutOfMemoryError:
        raise
    except (TritonError, RuntimeError, OSError, subprocess.CalledProcessError) as error:
        return f"they do not run: {' '.join(str(error).split())[:300]}"
    with torch.no_grad():
        wanted_gradients = aten.gradients(x, hardness, delta, True, True)
        pairs = zip((got, *got_gradients), (eager.lambda_gate(x, hardness), *wanted_gradients), strict=True)
        for result, wanted in pairs:
            if not torch.allclose(result, wanted, rtol=1e-4, atol=1e-5):
                return "their results differ from torch's; please report the device and the versions"
    return None
