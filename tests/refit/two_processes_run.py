"""What each of two processes does for the tests of plans and conversions: `torchrun --nproc_per_node 2 … FOLDER`."""

import sys
from pathlib import Path

import convert_run
import efforts_run
import folds_run
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType


def main(folder: Path) -> None:
    """All in one launch, which takes longer than they do."""
    state = PartialState(cpu=True)
    if state.num_processes != 2 or state.distributed_type != DistributedType.MULTI_CPU:
        raise RuntimeError(f"two processes with gloo expected, got {state}")
    folds_run.run(folder, state)
    convert_run.run(folder, state)
    efforts_run.run(folder, state)
    state.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
