import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="package")
def two_processes(tmp_path_factory):
    """The folder of what two processes found: {process}.json of plans, {process}.pt of conversions."""
    folder = tmp_path_factory.mktemp("processes")
    # accelerate's own launcher starts one process on a CPU; torchrun with this variable starts two that know it.
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(HERE)))),
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, str(HERE / "two_processes_run.py"), str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return folder
