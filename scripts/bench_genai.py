"""SmolLM2, and converted in its own shape, in ONNX Runtime GenAI: what fewer bits cost either.

    python scripts/bench_genai.py --packages runs/packages    (pip install onnxruntime-genai sentencepiece)

Each is compared with itself in torch, in float32, on blocks of WikiText. Rows go to a CSV file as they are measured,
and a rerun measures only what is not there.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from lgelu_lab.benchmarks.real_inputs import Inputs, in_batches
from lgelu_lab.benchmarks.real_networks import REAL
from lgelu_lab.measurements.real import RealSettings, load_measured
from lgelu_lab.rows_file import RowsFile
from lgelu_lab.studies.arguments import OneLineParser, exit_status
from torch import Tensor, nn

from hf_lgelu import ConversionConfig, convert_to_relu

_KEY = ("network", "precision", "units", "judged", "seed")
_TOOLS = ("onnxruntime-genai", "torch", "transformers")
_COLUMNS = (*_KEY, "kl_to_torch", "perplexity", "megabytes", *_TOOLS)


@dataclass
class GenaiArguments:
    """Which networks, in which precisions."""

    packages: str = field(metadata={"help": "Folder of installed packages with weights."})
    csv: str = field(default="runs/int4.csv", metadata={"help": "File of the rows; they are added to it."})
    folder: str = field(default="runs/genai", metadata={"help": "Folder of the networks; a refit goes on if killed."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder with local copies of the data sets."})
    made: list[str] = field(
        default_factory=lambda: ["original", "refit"], metadata={"help": "Which networks: original, refit."}
    )
    precisions: list[str] = field(
        default_factory=lambda: ["fp32", "int8", "int4", "int4 block_size=16", "int4 algo_config=k_quant_mixed"],
        metadata={"help": "-p of the builder, and its --extra_options."},
    )
    units: int = field(default=64, metadata={"help": "Blocks of 256 tokens that the refit takes."})
    evaluation_units: int = field(default=2, metadata={"help": "Blocks that are judged on."})
    seed: int = field(default=0, metadata={"help": "Of the draws."})


class _Built(nn.Module):
    """What the builder makes of a checkpoint in a precision, beside it."""

    def __init__(self, checkpoint: Path, precision: str) -> None:
        super().__init__()
        import onnxruntime_genai

        (kind, *options), self.folder = precision.split(), checkpoint.with_name("built")
        shutil.rmtree(self.folder, ignore_errors=True)
        line = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", checkpoint, "-e", "cpu", "-p", kind]
        extra = ["--extra_options", *options] if options else []
        subprocess.run([*line, "-o", self.folder, *extra], check=True, capture_output=True)
        self._genai, self._model = onnxruntime_genai, onnxruntime_genai.Model(str(self.folder))

    def forward(self, input_ids: Tensor) -> Inputs:
        generator = self._genai.Generator(self._model, self._genai.GeneratorParams(self._model))
        generator.append_tokens(input_ids.int().numpy())
        return {"logits": torch.tensor(generator.get_output("logits"))}


def main() -> int:
    """Measure what has no row yet; the exit status is 1, with the reason, for what cannot be measured."""
    (arguments,) = OneLineParser(GenaiArguments).parse()
    return exit_status(partial(_measure, arguments))


def _measure(arguments: GenaiArguments) -> None:
    told = {"units": arguments.units, "judged": arguments.evaluation_units, "seed": arguments.seed}
    rows = RowsFile(arguments.csv, _COLUMNS, _KEY, told | {name: version(name) for name in _TOOLS})
    settings = RealSettings(units=(arguments.units,), evaluation_units=arguments.evaluation_units, seed=arguments.seed)
    measured = load_measured(REAL["smollm2"], settings, arguments.data_dir, Path(arguments.packages))
    folder, networks = Path(arguments.folder), {"original": measured.model}
    if "refit" in arguments.made:
        fitted = in_batches(measured.fitted, measured.pad, 16, labelled=False)
        options = ConversionConfig(checkpoint_dir=folder / "work")
        networks["refit"] = convert_to_relu(measured.model, fitted, options=options).model
    for made in arguments.made:
        for part in (networks[made], measured.processor):
            part.save_pretrained(folder / made)
        for precision in arguments.precisions:
            row = {"network": made, "precision": precision}
            if row in rows:
                continue
            built = _Built(folder / made, precision)
            judged = replace(measured, model=networks[made]).row(made, built)
            size = sum(file.stat().st_size for file in built.folder.glob("*.onnx*")) / 1e6
            rows.append(row | {"kl_to_torch": judged["kl"], "perplexity": judged["score"], "megabytes": round(size, 3)})
            print(made, precision, judged["kl"], judged["score"], flush=True)


if __name__ == "__main__":
    sys.exit(main())
