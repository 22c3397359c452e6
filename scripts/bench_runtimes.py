"""Networks as they are, and converted in their own shape, in programs of others.

    python scripts/bench_runtimes.py --network digits      (pip install openvino nncf coremltools)
    python scripts/bench_runtimes.py --network smollm2 --packages runs/packages    (onnxruntime-genai sentencepiece)

digits: a small CNN with GELU learns scikit-learn's digits first. Core ML runs on a Mac alone: elsewhere its row says
that the tools take the CNN. smollm2: KL to the same network in torch, on blocks of WikiText. Rows go to a CSV file as
they are measured, and a rerun measures only what is not there.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lgelu_lab.benchmarks.real_inputs import Inputs, in_batches
from lgelu_lab.benchmarks.real_networks import REAL
from lgelu_lab.measurements.real import RealSettings, load_measured
from lgelu_lab.rows_file import RowsFile
from lgelu_lab.studies.arguments import OneLineParser, exit_status
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from hf_lgelu import ConversionConfig, convert_to_relu
from hf_lgelu.environment import hardware

_KEY = ("network", "made", "program", "precision", "units", "judged", "seed")
_COLUMNS = (*_KEY, "version", "accuracy", "ms_of_64", "kl_to_torch", "perplexity", "megabytes", "cpu", "torch")
_ROUNDS, _CALLS = 200, 20  # the least mean time of so many calls


@dataclass
class RuntimeArguments:
    """Which network, made how, in which precisions."""

    network: str = field(metadata={"help": "digits or smollm2.", "choices": ["digits", "smollm2"]})
    made: list[str] = field(default_factory=lambda: ["original", "refit"], metadata={"help": "Of original and refit."})
    precisions: list[str] = field(
        default_factory=lambda: ["fp32", "int8", "int4", "int4 block_size=16", "int4 algo_config=k_quant_mixed"],
        metadata={"help": "Of smollm2: -p of the builder, and its --extra_options."},
    )
    csv: str = field(default="runs/runtimes.csv", metadata={"help": "File of the rows; they are added to it."})
    folder: str = field(default="runs/runtimes", metadata={"help": "Of files, and of a refit that goes on if killed."})
    packages: str | None = field(default=None, metadata={"help": "Folder of installed packages with weights."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder with local copies of the data sets."})
    units: int = field(default=64, metadata={"help": "Of smollm2: blocks of 256 tokens that the refit takes."})
    evaluation_units: int = field(default=2, metadata={"help": "Of smollm2: blocks that are judged on."})
    seed: int = field(default=0, metadata={"help": "Of the draws, and of the CNN."})


class _Task(NamedTuple):
    """Two networks, {(package, precision): what makes a runnable of one}, and (network, runnable) → cells of a row."""

    original: nn.Module
    convert: Callable[[], nn.Module]
    programs: dict[tuple[str, str], Callable[[nn.Module], Any]]
    judge: Callable[[nn.Module, Any], dict[str, Any]]


def main() -> int:
    """Measure what has no row yet; the exit status is 1, with the reason, for what cannot be measured."""
    (arguments,) = OneLineParser(RuntimeArguments).parse()
    return exit_status(partial(_measure, arguments))


def _measure(arguments: RuntimeArguments) -> None:
    torch.set_num_threads(1)
    task = {"digits": _digits, "smollm2": _smollm2}[arguments.network](arguments)
    told = {"network": arguments.network, "seed": arguments.seed, "cpu": hardware(1)["cpu"], "torch": version("torch")}
    sizes = (arguments.units, arguments.evaluation_units) if arguments.network == "smollm2" else ("", "")
    rows = RowsFile(arguments.csv, _COLUMNS, _KEY, told | dict(zip(("units", "judged"), sizes, strict=True)))
    for made in arguments.made:
        network = task.original if made == "original" else task.convert()
        for (package, precision), program in task.programs.items():
            row = {"made": made, "program": package, "precision": precision, "version": version(package)}
            if row not in rows:
                rows.append(row := row | task.judge(network, program(network)))
                print(row, flush=True)


def _digits(arguments: RuntimeArguments) -> _Task:
    pixels, classes = load_digits(return_X_y=True)
    pictures = pixels.astype("float32").reshape(-1, 1, 8, 8) / 16
    split = train_test_split(pictures, classes, random_state=arguments.seed)
    images, tests, labels, answers = map(torch.tensor, split)
    torch.manual_seed(arguments.seed)
    gelu = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 32, 3, 2, 1), nn.GELU()),
        *(nn.Flatten(), nn.Linear(512, 64), nn.GELU(), nn.Linear(64, 10)),
    )
    optimizer = torch.optim.Adam(gelu.parameters(), 2e-3)
    for _ in range(60):
        F.cross_entropy(gelu(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def judge(network: nn.Module, run: Callable[[Tensor], Tensor] | None) -> dict[str, float]:
        if run is None:
            return {}
        found, times = torch.cat([run(test[None]).argmax(1) for test in tests]), []
        for _ in range(_ROUNDS):
            began = time.process_time()
            for _ in range(_CALLS):
                run(tests[:64])
            times.append(time.process_time() - began)
        return {"accuracy": (found == answers).double().mean().item(), "ms_of_64": 1e3 * min(times) / _CALLS}

    programs: dict[tuple[str, str], Callable[[nn.Module], Any]] = {
        ("torch", "float32"): lambda network: network,
        ("openvino", "int8"): partial(_openvino, images[:256]),
        ("coremltools", "float32"): partial(_coreml, images[:1]),
    }
    return _Task(gelu.eval(), lambda: convert_to_relu(gelu, images).model, programs, judge)


def _openvino(images: Tensor, network: nn.Module) -> Callable[[Tensor], Tensor]:
    import nncf
    import openvino

    model = openvino.convert_model(network, example_input=images[:1])
    int8 = nncf.quantize(model, nncf.Dataset([image[None].numpy() for image in images]))
    compiled = openvino.Core().compile_model(int8, "CPU", {"INFERENCE_NUM_THREADS": 1})
    return lambda pictures: torch.tensor(compiled(pictures.numpy())[0])


def _coreml(image: Tensor, network: nn.Module) -> None:
    import coremltools

    shape = coremltools.TensorType(shape=tuple(image.shape))
    coremltools.convert(torch.jit.trace(network, image), inputs=[shape], convert_to="mlprogram")


def _smollm2(arguments: RuntimeArguments) -> _Task:
    settings = RealSettings(units=(arguments.units,), evaluation_units=arguments.evaluation_units, seed=arguments.seed)
    measured = load_measured(REAL["smollm2"], settings, arguments.data_dir, Path(arguments.packages or ""))
    fitted = in_batches(measured.fitted, measured.pad, 16, labelled=False)
    options = ConversionConfig(checkpoint_dir=Path(arguments.folder, "work"))

    def judge(network: nn.Module, built: _Built) -> dict[str, float]:
        judged = replace(measured, model=network).row("built", built)
        size = sum(file.stat().st_size for file in built.folder.glob("*.onnx*"))
        return {"kl_to_torch": judged["kl"], "perplexity": judged["score"], "megabytes": size / 1e6}

    build = partial(_Built, Path(arguments.folder), measured.processor)
    programs = {("onnxruntime-genai", precision): partial(build, precision) for precision in arguments.precisions}
    return _Task(
        measured.model, lambda: convert_to_relu(measured.model, fitted, options=options).model, programs, judge
    )


class _Built(nn.Module):
    """What the builder of ONNX Runtime GenAI makes of a network in a precision."""

    def __init__(self, folder: Path, tokenizer: Any, precision: str, network: Any) -> None:
        super().__init__()
        import onnxruntime_genai

        (kind, *options), source, self.folder = precision.split(), folder / "checkpoint", folder / "built"
        shutil.rmtree(self.folder, ignore_errors=True)
        for part in (network, tokenizer):
            part.save_pretrained(source)
        line = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", source, "-e", "cpu", "-p", kind]
        extra = ["--extra_options", *options] if options else []
        subprocess.run([*line, "-o", self.folder, *extra], check=True, capture_output=True)
        self._genai, self._model = onnxruntime_genai, onnxruntime_genai.Model(str(self.folder))

    def forward(self, input_ids: Tensor) -> Inputs:
        generator = self._genai.Generator(self._model, self._genai.GeneratorParams(self._model))
        generator.append_tokens(input_ids.int().numpy())
        return {"logits": torch.tensor(generator.get_output("logits"))}


if __name__ == "__main__":
    sys.exit(main())
