"""A small CNN with GELU, and converted, in programs of others: accuracy in int8, and its time.

    python scripts/bench_runtimes.py --csv runs/runtimes.csv        (pip install openvino nncf coremltools)

It learns scikit-learn's digits first. Core ML runs on a Mac alone: elsewhere the row says that its tools take the CNN.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version

import pandas as pd
import torch
from lgelu_lab.studies.arguments import OneLineParser, exit_status
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from hf_lgelu import convert_to_relu
from hf_lgelu.environment import hardware

_ROUNDS, _CALLS = 200, 20  # the least mean time of so many calls


def _openvino(network: nn.Module, images: Tensor) -> Callable[[Tensor], Tensor]:
    import nncf
    import openvino

    model = openvino.convert_model(network, example_input=images[:1])
    int8 = nncf.quantize(model, nncf.Dataset([image[None].numpy() for image in images[:256]]))
    compiled = openvino.Core().compile_model(int8, "CPU", {"INFERENCE_NUM_THREADS": 1})
    return lambda pictures: torch.tensor(compiled(pictures.numpy())[0])


def _coreml(network: nn.Module, images: Tensor) -> None:
    import coremltools

    shape = coremltools.TensorType(shape=tuple(images[:1].shape))
    coremltools.convert(torch.jit.trace(network, images[:1]), inputs=[shape], convert_to="mlprogram")


_PROGRAMS = {"torch": lambda network, images: network, "openvino": _openvino, "coremltools": _coreml}
"""{package: (network, images for the ranges) → what runs it}; torch in float32."""


@dataclass
class RuntimeArguments:
    """Where the rows go."""

    csv: str = field(default="runs/runtimes.csv", metadata={"help": "File of the rows, which is written anew."})
    steps: int = field(default=60, metadata={"help": "Of the network's training."})
    seed: int = field(default=0, metadata={"help": "Of the network, and of the split into training and test."})


def main() -> int:
    """Measure; the exit status is 1, with the reason, for what cannot be measured."""
    (arguments,) = OneLineParser(RuntimeArguments).parse()
    return exit_status(partial(_measure, arguments))


@torch.no_grad()
def _measure(arguments: RuntimeArguments) -> None:
    torch.set_num_threads(1)
    pixels, classes = load_digits(return_X_y=True)
    pictures = pixels.astype("float32").reshape(-1, 1, 8, 8) / 16
    split = train_test_split(pictures, classes, random_state=arguments.seed)
    images, tests, labels, answers = map(torch.tensor, split)
    gelu = _trained(images, labels, arguments)
    told = {"seed": arguments.seed, "steps": arguments.steps, "cpu": hardware(1)["cpu"], "torch": torch.__version__}
    rows = []
    for network, model in (("gelu", gelu), ("relu", convert_to_relu(gelu, images).model)):
        for name, program in _PROGRAMS.items():
            row = {"runtime": name, "version": version(name), "network": network}
            if (run := program(model, images)) is not None:
                found = torch.cat([run(test[None]).argmax(1) for test in tests])
                row |= {"accuracy": (found == answers).double().mean().item(), "ms_of_64": _least_ms(run, tests[:64])}
            rows.append(row | told)
    pd.DataFrame(rows).to_csv(arguments.csv, index=False, lineterminator="\n")


@torch.enable_grad()
def _trained(images: Tensor, labels: Tensor, arguments: RuntimeArguments) -> nn.Module:
    torch.manual_seed(arguments.seed)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 32, 3, 2, 1), nn.GELU()),
        *(nn.Flatten(), nn.Linear(512, 64), nn.GELU(), nn.Linear(64, 10)),
    )
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(arguments.steps):
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def _least_ms(run: Callable[[Tensor], Tensor], pictures: Tensor) -> float:
    times = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        for _ in range(_CALLS):
            run(pictures)
        times.append(time.process_time() - began)
    return 1e3 * min(times) / _CALLS


if __name__ == "__main__":
    sys.exit(main())
