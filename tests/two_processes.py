"""Two CPU processes that know of each other, for tests that compare them with one."""

import os
import subprocess
import sys
from pathlib import Path


def run_in_two_processes(script: Path, folder: Path) -> None:
    """Run `script FOLDER` in two processes; modules beside the script can be imported. Fails with its last words."""
    # accelerate's own launcher starts one process on a CPU; torchrun with this variable starts two that know it.
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(script.parent)))),
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, str(script), str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
