"""What is installed: optional packages, what depends on the version of a host library, and a run's record of both."""

import importlib
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "timm", "evaluate", "tokenizers", "numpy")


def require(module: str, extra: str) -> ModuleType:
    """Import and return `module`, which the optional extra `extra` of this package brings.

    Raises ImportError that says what to install if it is not there, or is there and cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} cannot be imported ({error}); install it with: pip install 'hf-lgelu[{extra}]', or in a clone: "
            f"pip install '.[{extra}]'",
            name=module,
        ) from error


def matmul_backends() -> tuple[Any, ...]:
    """The backends that have a precision of their own, `fp32_precision`, for products in float32."""
    if not hasattr(torch.backends.mkldnn, "matmul"):  # torch 2.8 has one precision for all backends
        return ()
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def package_versions() -> dict[str, str]:
    """{package: version} of Python, hf-lgelu and what it stands on, as far as installed."""
    versions = {"python": platform.python_version()}
    for package in ("hf-lgelu", *_PACKAGES):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def hardware(processes: int = 1) -> dict[str, Any]:
    """CPU, cores, accelerators and the number of processes of the run."""
    file = Path("/proc/cpuinfo")
    named = re.search("^model name\\s*: (.*)$", file.read_text(encoding="utf-8") if file.exists() else "", re.MULTILINE)
    return {
        "cpu": named[1] if named else platform.processor() or platform.machine(),
        "cpu_cores": os.cpu_count(),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processes": processes,
        "threads_per_process": torch.get_num_threads(),
        "platform": platform.platform(),
    }
