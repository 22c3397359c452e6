"""Programs in processes of their own that have imported torch and transformers, and nothing of hf_lgelu.

A new interpreter needs eight seconds of a core for the imports. These processes are forks of one that has them and
computes nothing itself. In a worker of several that one is itself a fork, from before the worker imported hf_lgelu.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

LONGEST_SECONDS = 900  # on a busy machine; what takes longer hangs
_CONTEXT = multiprocessing.get_context("forkserver")
_IMPORTED = ["torch", "timm", "accelerate", "transformers", "transformers.trainer"]
_CONTEXT.set_forkserver_preload(_IMPORTED)
_HOME = tempfile.TemporaryDirectory()  # where transformers puts the code of a checkpoint; removed with this process
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": _HOME.name}


def start_server(*, fork: bool) -> None:
    """The server: a fork of this process as it is, which then has the imports too; or a new interpreter."""
    os.environ.update(_ENVIRONMENT)  # read when the libraries are imported
    if not fork:
        return forkserver.ensure_running()
    assert not any(name.partition(".")[0] == "hf_lgelu" for name in sys.modules)
    with contextlib.redirect_stderr(sys.__stderr__):  # where transformers will write what it warns of
        for name in _IMPORTED:
            importlib.import_module(name)
    resource_tracker.ensure_running()
    with mock.patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(executable: bytes, arguments: list[str], kept: list[int]) -> int:
    """In the place of a new interpreter."""
    pid = os.fork()
    if pid:
        return pid
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for file in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, *kept}:
            os.dup2(nowhere, file)  # its number is not given anew: what pytest opened may still write there
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # which pytest has taken
        forkserver._forkserver.__init__()
        forkserver.main(*kept, preload=[])
    finally:
        os._exit(0)


def start_fresh(script: Path, arguments: tuple, environment: dict[str, str], said: Path) -> BaseProcess:
    """`python SCRIPT ARGUMENTS`, which can import what is beside it; stdout and stderr go to said.out and said.err.

    `environment` is beside what is there, but for what the libraries read when they are imported.
    """
    start_server(fork=False)  # where none runs
    words = [str(word) for word in (script, *arguments)]
    fixed = {**_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    process = _CONTEXT.Process(target=_run, args=(words, {**os.environ, **environment, **fixed}, said))
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
