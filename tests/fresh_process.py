"""Programs in processes of their own that have imported torch and transformers, and nothing of hf_lgelu.

A new interpreter needs eight seconds of a core for the imports. These processes are forks of a server that has them.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

LONGEST_SECONDS = 900  # on a busy machine; what takes longer hangs
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "timm", "accelerate", "transformers", "transformers.trainer"])
_HOME = tempfile.TemporaryDirectory()  # where transformers puts the code of a checkpoint; removed with this process
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": _HOME.name}


def start_fresh(script: Path, arguments: tuple, environment: dict[str, str], said: Path) -> BaseProcess:
    """`python SCRIPT ARGUMENTS`, which can import from its folder; stdout and stderr go to said.out and said.err.

    `environment` is beside what is there, but for what the libraries read when they are imported.
    """
    words = [str(word) for word in (script, *arguments)]
    fixed = {**_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    process = _CONTEXT.Process(target=_run, args=(words, {**os.environ, **environment, **fixed}, said))
    with mock.patch.dict(os.environ, _ENVIRONMENT):  # the first one starts the server, which reads it as it imports
        process.start()
    return process


def run_fresh(script: Path, *arguments: object) -> subprocess.CompletedProcess:
    """Run one fresh process to its end; one that hangs is killed."""
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
    os.environ.clear()
    os.environ.update(environment)
    for stream, suffix in ((1, ".out"), (2, ".err")):
        file = os.open(said.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
        os.close(file)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
