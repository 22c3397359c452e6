"""Programs in processes of their own that have imported torch and transformers, and nothing of hf_lgelu.

A new interpreter needs five seconds of a core to import the two. These are forks of one that has done it and computes
nothing itself.
"""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from functools import cache
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

LONGEST_SECONDS = 900  # on a busy machine; what takes longer hangs
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "timm", "accelerate", "transformers", "transformers.trainer"])
_READ_AT_IMPORT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start_fresh(script: Path, arguments: tuple, environment: dict[str, str], said: Path) -> BaseProcess:
    """`python SCRIPT ARGUMENTS`, which can import what is beside it; stdout and stderr go to said.out and said.err.

    `environment` is beside what is there, but for what the libraries read when they are imported.
    """
    read_at_import = _start_server()
    words = [str(word) for word in (script, *arguments)]
    process = _CONTEXT.Process(target=_run, args=(words, {**os.environ, **environment, **read_at_import}, said))
    process.start()
    return process


def run_fresh(script: Path, *arguments: object) -> subprocess.CompletedProcess:
    """One such process to its end, which is its death where it hangs."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        process = start_fresh(script, arguments, {}, said)
        process.join(LONGEST_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        texts = [said.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".out", ".err")]
    return subprocess.CompletedProcess(script, process.exitcode, *texts)


@cache
def _home() -> tempfile.TemporaryDirectory:
    """Where transformers puts the code of a checkpoint; removed with this process."""
    return tempfile.TemporaryDirectory()


def _start_server() -> dict[str, str]:
    """Starts on the first call of a session, with the variables that are read once, which are returned."""
    fixed, before = {**_READ_AT_IMPORT, "HF_HOME": _home().name}, dict(os.environ)
    os.environ.update(fixed)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return fixed


def _run(words: list[str], environment: dict[str, str], said: Path) -> None:
    gc.freeze()  # each Trainer.train() collects garbage: not among what the server has imported
    gc.set_threshold(100_000, 20)  # as in conftest.py
    os.environ.clear()
    os.environ.update(environment)
    for stream, suffix in ((1, ".out"), (2, ".err")):
        file = os.open(said.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
        os.close(file)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
