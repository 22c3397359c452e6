"""Two CPU processes that know of each other, for tests that compare them with one."""

import time
from multiprocessing import connection
from pathlib import Path

from fresh_process import LONGEST_SECONDS, start_fresh
from torch.distributed import TCPStore


def two_that_know_each_other() -> tuple[TCPStore, list[dict[str, str]]]:
    """The environments of two processes, and the store where they meet, which must live as long as they do."""
    # What torchrun has its processes know, and its store, which has a port before they begin. accelerate's own
    # launcher starts one process on a CPU; ACCELERATE_USE_CPU lets two know each other.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "ACCELERATE_USE_CPU": "true"}
    of_each = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(2)]
    return store, [{name: str(value) for name, value in environment.items()} for environment in of_each]


def run_in_two_processes(script: Path, folder: Path) -> None:
    """Run `script FOLDER` in two processes; it can import from its folder. Fails with its last words."""
    store, environments = two_that_know_each_other()
    said = [folder / f"process-{rank}" for rank in range(2)]
    processes = [
        start_fresh(script, (folder,), environment, place)
        for environment, place in zip(environments, said, strict=True)
    ]
    waiting, end = set(processes), time.monotonic() + LONGEST_SECONDS
    while waiting and time.monotonic() < end and not any(process.exitcode for process in processes):
        connection.wait([process.sentinel for process in waiting], timeout=1)
        waiting = {process for process in processes if process.exitcode is None}
    for process in waiting:  # the other one has failed, or both hang
        process.kill()
        process.join()
    del store
    last = "\n".join(path.with_suffix(".err").read_text(encoding="utf-8")[-3000:] for path in said)
    assert [process.exitcode for process in processes] == [0, 0], last
