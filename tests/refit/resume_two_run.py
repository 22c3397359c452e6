"""A conversion by two processes of which one is killed, begun again, in processes of their own.

`python resume_two_run.py FOLDER` prints of each call what the two processes say, in the order of their ranks.
"""

import functools
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from resume_run import counted, facts, mlp, rows, trace_once
from small_networks import convert_with
from two_processes import two_that_know_each_other

from hf_lgelu.refit import layerwise, resume


def converted(rank: int, folder: Path | None):
    """Each process has a share of the rows."""
    return convert_with(mlp(), rows()[rank::2], checkpoint_dir=folder)


def said(folder: Path, rank: int) -> str:
    """What a process says that does not come to the end."""
    try:
        converted(rank, folder)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "converted"


def killed(folder: Path, victim: int, owner: object, name: str, at: int, rank: int) -> str:
    """One process ends at a call of a function as nobody can see coming."""
    counted(owner, name, at if rank == victim else None)
    return said(folder, rank)


def resumed(folder: Path, rank: int) -> str:
    """Layers fitted, and whether the result is that of a run in one go."""
    whole = converted(rank, None)
    fits = counted(layerwise, "fit_ridge", None)
    again = converted(rank, folder)
    state = again.model.state_dict()
    same = all(torch.equal(value, state[key]) for key, value in whole.model.state_dict().items())
    return f"{len(fits)} {same and facts(whole.report) == facts(again.report)}"


def forked(call: Callable[[int], str], environments: list[dict[str, str]]) -> None:
    """Print what forks of this process say, or how they ended."""
    children = []
    for rank, environment in enumerate(environments):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.environ.update(environment)
                os.write(writing, call(rank).encode())
                os._exit(0)
            finally:  # an error must not end it as the parent would end: that waits for threads that no fork has
                traceback.print_exc()
                os._exit(1)
        os.close(writing)
        children.append((child, reading))
    for child, reading in children:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with os.fdopen(reading) as words:
            print(signal.Signals(-status).name if status < 0 else words.read(), flush=True)


def in_two(call: Callable[[int], str]) -> None:
    """The same of two that know each other."""
    _store, environments = two_that_know_each_other()
    forked(call, environments)


def main(folder: Path) -> None:
    """One conversion, killed in another process each time."""
    work, copy = folder / "work", folder / "copy"
    trace_once()
    in_two(functools.partial(killed, work, 1, layerwise, "fit_ridge", 1))
    forked(functools.partial(said, work), [{}])
    shutil.copytree(work, copy)
    (copy / "refit-00000.safetensors").unlink()
    in_two(lambda rank: said((work, copy)[rank], rank))
    in_two(functools.partial(killed, work, 0, resume.os, "replace", 3))
    in_two(functools.partial(resumed, work))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
