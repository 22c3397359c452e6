"""From GELU to ReLU on scikit-learn's handwritten digits, by both roads, in about two minutes of two idle cores.

A GELU network is converted without training, and a network with λ-GELU hardens under `accelerate launch`. Beside both
stand the plain swap and ReLU from the start. Each network is saved, loaded again by plain torch, and timed in float32
and in int8.

    python scripts/quickstart.py --output_dir runs/quickstart
"""

import argparse
import copy
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.report.drawing import new_figure, save, style
from lgelu_lab.studies.arguments import exit_status, parse_mapping
from lgelu_lab.studies.folder import write_whole
from lgelu_lab.studies.records import RunRecord, read_record
from lgelu_lab.studies.run import run_benchmark
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from hf_lgelu import (
    MLPForClassification,
    compare_networks,
    convert_to_relu,
    export_relu,
    from_pretrained,
    substitute_relu,
)
from hf_lgelu.activation.hardness import DEFAULT_INIT_HARDNESS
from hf_lgelu.models.checkpoint import load_checkpoint, save_checkpoint

BENCHMARK, SEED = "mlp-digits", 0
TRAINED = ("gelu", "relu", "hardened")
GELU, SWAPPED, CONVERTED = "GELU", "GELU, ReLU swapped in", "GELU, converted without training"
HARDENED, FROM_START = "λ-GELU, hardened, then swapped", "ReLU from the start"
_FOLDERS = {
    GELU: "gelu", SWAPPED: "networks/swapped", CONVERTED: "networks/converted", HARDENED: "networks/hardened",
    FROM_START: "relu",
}  # fmt: skip

_PLAIN_TORCH = """
import json, sys
import torch
from safetensors.torch import load_file

features, found = torch.load("features.pt", weights_only=True), {}
for folder in sys.argv[1:]:
    weights, config = load_file(f"{folder}/model.safetensors"), json.load(open(f"{folder}/config.json"))
    modules = []
    for name in [*(f"layers.{i}.linear" for i in range(config["num_hidden_layers"])), "classifier"]:
        linear = torch.nn.Linear(*weights[f"{name}.weight"].T.shape)
        linear.load_state_dict({part: weights[f"{name}.{part}"] for part in ("weight", "bias")})
        modules += [linear, {"gelu": torch.nn.GELU, "relu": torch.nn.ReLU}[config["hidden_act"]]()]
    found[folder] = torch.nn.Sequential(*modules[:-1])(features).detach()
assert "hf_lgelu" not in sys.modules and "transformers" not in sys.modules
torch.save(found, "logits.pt")
"""

_NEXT = """\
What to try next, after `source .venv/bin/activate`:
  hf-lgelu convert YOUR_CHECKPOINT --data texts.txt --output_dir out     your own trained network, without training
  python scripts/train.py --benchmark mlp-digits --harden --init_mode increasing --output_dir runs/one
  python scripts/train.py --benchmark mlp-fmnist --harden --output_dir runs/fmnist     the paper's MLP, from the Hub
  README.md: the same in ten lines of Python; docs/train.md: your own Trainer; docs/convert.md: large networks"""


def main() -> int:
    """Train, convert, export, compare; the exit status is 1, with the reason, where a step failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output_dir", default="runs/quickstart", help="folder of networks and table")
    parser.add_argument("--num_train_epochs", type=float, default=120.0)  # a quarter of them moves λ by itself
    arguments = parser.parse_args()
    return exit_status(partial(quickstart, Path(arguments.output_dir), arguments.num_train_epochs))


def quickstart(folder: Path, epochs: float) -> list[dict[str, str]]:
    """The rows of the table, which is printed; networks and table go to `folder`."""
    say = _Clock()
    say(f"Five small networks on 1,797 handwritten digits: about two minutes on two idle cores. Networks: {folder}")
    disable_progress_bar()
    torch.set_num_threads(1)  # the second core is that of the network that hardens
    for name in (*TRAINED, "networks"):
        shutil.rmtree(folder / name, ignore_errors=True)
    benchmark, data = BENCHMARKS[BENCHMARK], BENCHMARKS[BENCHMARK].load(DataOptions(), None)
    hardening = _launch_hardening(folder / "hardened", epochs, say)
    networks = {}
    for way, activation in ((GELU, "gelu"), (FROM_START, "relu")):
        run = {"activation": activation, "output_dir": str(folder / activation)}
        say(f"training {activation} here, {epochs:g} epochs ...")
        began = time.perf_counter()
        run_benchmark(*parse_mapping({**_run_arguments(epochs), **run}))
        say(f"trained {activation} in {time.perf_counter() - began:.0f} s")
        networks[way] = load_checkpoint(folder / activation)
    networks[SWAPPED] = copy.deepcopy(networks[GELU])
    substitute_relu(networks[SWAPPED], kinds=("gelu",))
    networks[CONVERTED], report = convert_to_relu(networks[GELU], data.train.features)
    say(f"converted without training or labels in {report.seconds:.1f} s")
    for way in (SWAPPED, CONVERTED):
        save_checkpoint(networks[way], folder / _FOLDERS[way])
    if hardening.wait():
        raise RuntimeError(f"the hardening failed:\n{hardening.stdout.read()[-2000:]}")
    record = read_record(folder / "hardened")
    soft = from_pretrained(MLPForClassification, folder / "hardened", use_safetensors=True)
    export_relu(soft, folder / _FOLDERS[HARDENED], inputs=data.eval.features)
    networks[HARDENED] = load_checkpoint(folder / _FOLDERS[HARDENED])
    say(f"hardened every λ to {record.config['target_hardness']:.1f}; exported with ReLU, which costs nothing")
    apart = _in_plain_torch(folder, networks, data)
    say("loaded all of them again by plain torch; now measuring score, time and size in float32 and int8, pair by pair")
    rows, samples = _table(networks, benchmark, data, apart)
    text = pd.DataFrame(rows).set_index("network").rename_axis(None).to_string()
    write_whole(folder / "table.txt", text + "\n")
    print(
        f"\n{text}\n\nOn {samples} images held out; one image is {1 / samples:.4f} of accuracy. ms: processor time of "
        "8 images at once,\none thread of onnxruntime. plain torch: largest difference of a logit after loading.\n"
    )
    picture = _draw_hardness(record, folder / "hardened" / "hardness.png")
    say(f"done. λ of every gate, learned and then rising to its target: {picture}")
    print(_NEXT)
    return rows


class _Clock:
    """Says a line with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def __call__(self, line: str) -> None:
        print(f"[{time.perf_counter() - self._began:3.0f} s] {line}", flush=True)


def _run_arguments(epochs: float) -> dict[str, object]:
    quiet = {"disable_tqdm": True, "log_level": "error", "use_cpu": True}
    return {"benchmark": BENCHMARK, "seed": SEED, "num_train_epochs": epochs, **quiet}


def _launch_hardening(folder: Path, epochs: float, say: _Clock) -> subprocess.Popen:
    """A network with λ-GELU, which trains and hardens in a process of its own, as on many machines."""
    launch = "--cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
    command = ["accelerate", "launch", *launch.split(), "scripts/train.py", "--harden", "--output_dir", str(folder)]
    for name, value in {**_run_arguments(epochs), "init_hardness": DEFAULT_INIT_HARDNESS}.items():
        command += [f"--{name}", str(value)]
    say(f"in the background: accelerate launch --num_processes 1 scripts/train.py --benchmark {BENCHMARK} --harden …")
    command[:1] = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    command[command.index("scripts/train.py")] = str(Path(__file__).with_name("train.py"))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@torch.no_grad()
def _in_plain_torch(folder: Path, networks: dict[str, PreTrainedModel], data: BenchmarkData) -> dict[str, float]:
    """{way: largest difference of a logit between the saved network, run by plain torch, and the network here}."""
    torch.save(data.eval.features, folder / "features.pt")
    folders = [_FOLDERS[way] for way in networks]
    subprocess.run([sys.executable, "-c", _PLAIN_TORCH, *folders], cwd=folder, check=True)
    found = torch.load(folder / "logits.pt", weights_only=True)
    for name in ("features.pt", "logits.pt"):
        (folder / name).unlink()
    return {
        way: (found[_FOLDERS[way]] - network(data.eval.features).logits).abs().max().item()
        for way, network in networks.items()
    }


def _table(
    networks: dict[str, PreTrainedModel], benchmark: Benchmark, data: BenchmarkData, apart: dict[str, float]
) -> tuple[list[dict[str, str]], int]:
    """(a row a network: what `compare_networks` says of it beside the GELU network, how many images that is of)."""
    batch = benchmark.collate(data.eval.__getitems__(range(len(data.eval))))
    compared: dict[str, list] = {}
    for way in (SWAPPED, CONVERTED, HARDENED, FROM_START):
        comparison = compare_networks(networks[GELU], networks[way], [batch], int8=True)
        for name, key in (("original", GELU), ("converted", way)):
            compared[key] = [row for row in comparison.rows if row.network == name]  # float32, int8
    rows = []
    for way in _FOLDERS:
        single, integer = compared[way]
        rows.append(
            {
                "network": way,
                "accuracy": f"{single.metrics['accuracy']:.4f}",
                "ms": f"{single.milliseconds[1]:.3f}",
                "MB": f"{single.megabytes:.2f}",
                "int8: accuracy": f"{integer.metrics['accuracy']:.4f}",
                "int8: ms": f"{integer.milliseconds[1]:.3f}",
                "int8: MB": f"{integer.megabytes:.2f}",
                "plain torch": f"{apart[way]:.1g}",
            }
        )
    return rows, comparison.samples


def _draw_hardness(record: RunRecord, path: Path) -> Path:
    """A PNG of every gate's λ over the epochs, by the logarithm of λ − 1: what is learned lies between 1 and 2."""
    figure = new_figure(6.4, 3.6)
    axis = figure.add_subplot()
    for site in record.last.hardness:
        axis.plot([epoch.epoch for epoch in record.epochs], [e.hardness[site] - 1 for e in record.epochs], label=site)
    style(axis, title="Hardness of each gate", x="epoch", y="λ − 1")
    axis.set_yscale("log")
    axis.legend(fontsize=9)
    return save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
