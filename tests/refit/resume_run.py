"""Conversions killed at one of their layers and begun again, in a process of its own: python resume_run.py FOLDER.

Prints one line a case: its name, layers fitted after the kill, whether weights and report are those of a run in one go,
layers fitted when it is begun once more.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from small_networks import convert_with
from torch import nn

from hf_lgelu.graph.recording import Recording
from hf_lgelu.networks.sites import find_sites
from hf_lgelu.refit import distill, layerwise, resume


def mlp():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 10), nn.SiLU(), nn.Linear(10, 9), nn.GELU())
    return net.append(nn.Linear(9, 4)).eval()


def convolutions():
    torch.manual_seed(4)
    parts = []
    for width in (3, 4, 5):
        parts += [nn.Conv2d(width, width + 1, 3, padding=1), nn.BatchNorm2d(width + 1), nn.SiLU()]
    net = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    net(torch.randn(64, 3, 6, 6))
    return net.eval()


def rows():
    return torch.randn(300, 6, generator=torch.Generator().manual_seed(5))


def images():
    return torch.randn(80, 3, 6, 6, generator=torch.Generator().manual_seed(5))


# name: (network, data, options, when the process is killed, one after the other: at which call of `fit_ridge`, or,
# negative, of `os.replace`, or in the midst of what `distill` does)
CASES = {
    "while-writing": (mlp, rows, {}, (-3,)),
    "ladder": (mlp, rows, {"effort": "distill", "distill_steps": 8}, (5, "distill")),
    "convolutions": (convolutions, images, {}, (3,)),
}


def trace_once():
    """The first trace of a process takes three times as long as the next; with one thread it can be inherited."""
    assert torch.get_num_threads() == 1
    Recording(mlp(), find_sites(mlp()), rows()[:4])


def counted(owner, name, at):
    """Have calls counted; the one of number `at` ends the process as nobody can see coming."""
    function, calls = getattr(owner, name), []

    def wrapped(*given, **more):
        calls.append(name)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **more)

    setattr(owner, name, wrapped)
    return calls


def forked(function, *given):
    """The exit status of a process that calls the function. This one descends nothing: torch's threads do not fork."""
    child = os.fork()
    if child == 0:
        function(*given)
        sys.stdout.flush()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(folder, at, network, data, options, _):
    if at == "distill":
        counted(distill, "output_loss", 10)
    else:
        counted(*((layerwise, "fit_ridge") if at > 0 else (resume.os, "replace")), abs(at))
    convert_with(network(), data(), checkpoint_dir=folder, **options)


def facts(report):
    told = report.as_dict()
    del told["seconds"], told["next_step"]
    for step in told["steps"]:
        del step["seconds"]
    return told


def resumed(folder, network, data, options, _):
    network, data = network(), data()
    whole = convert_with(network, data, **options)
    fits = counted(layerwise, "fit_ridge", None)
    again = convert_with(network, data, checkpoint_dir=folder, **options)
    state = again.model.state_dict()
    same = all(torch.equal(value, state[key]) for key, value in whole.model.state_dict().items())
    print(len(fits), same and facts(whole.report) == facts(again.report), end=" ")
    fits.clear()
    convert_with(network, data, checkpoint_dir=folder, **options)
    print(len(fits))


if __name__ == "__main__":
    trace_once()
    for name, case in CASES.items():
        print(name, end=" ", flush=True)
        place = Path(sys.argv[1], name)
        for at in case[-1]:
            assert forked(killed, place, at, *case) == -signal.SIGKILL
        assert forked(resumed, place, *case) == 0
