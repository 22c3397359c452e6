"""One conversion, timed in a process of its own, so that its peak of memory is its own as well."""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

import hf_lgelu
from hf_lgelu.environment import hardware, package_versions
from lgelu_lab.conversion_bench.cases import CASES

_GIB = 2**30


def measure_here(name: str, threads: int) -> dict[str, str | float | int]:
    """Convert in this process; the second of two conversions of a small network is timed, as imports take longer."""
    case = CASES[name]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    warm, inputs = CASES["rows-2048"].build()
    _convert(warm.eval(), inputs)
    model, inputs = case.build()
    model = model.eval()
    started = time.perf_counter()
    outcome = _convert(model, inputs)
    seconds = time.perf_counter() - started
    # Linux counts in KiB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "case": name,
        "units": case.units,
        "rows": case.rows,
        "width": case.width,
        "threads": threads,
        "seconds": round(seconds, 3),
        "peak_gib": round(peak / _GIB, 3),
        "outcome": outcome,
        "cpu": hardware(1)["cpu"],
        "torch": torch.__version__,
        "hf_lgelu": package_versions()["hf-lgelu"],
    }


def _convert(model: torch.nn.Module, inputs: object) -> str:
    """What came out; a refusal by the guard comes after all the work, and is as good a measurement."""
    try:
        hf_lgelu.convert_to_relu(model, inputs)
    except hf_lgelu.ConversionRefusedError as error:
        if error.report is None:
            raise
        return "refused by the guard"
    return "converted"


def measure_apart(name: str, threads: int) -> dict[str, str | float | int]:
    """`measure_here` in a new process. Raises RuntimeError with what it said if it failed."""
    script = Path(__file__).parents[1] / "bench_convert.py"
    command = [sys.executable, str(script), "--measure_here", name, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
