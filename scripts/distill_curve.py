"""How near distillation brings a trained network, by the tokens that pass through its steps.

    python scripts/distill_curve.py --network minilm --packages runs/packages --tokens 50000 200000 1000000

The network is converted once (`refit`) and distilled anew for each budget, on a GPU where there is one. Texts are the
paragraphs of WikiText, with those of the docstrings of installed packages, or with names for <unk>. Rows go to a CSV
file as they are measured, and a rerun measures only what is not there.
"""

import copy
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Literal

import torch
from lgelu_lab.benchmarks.docstrings import docstring_paragraphs
from lgelu_lab.benchmarks.real_inputs import Inputs, cut_samples, in_batches, paragraphs
from lgelu_lab.benchmarks.real_networks import REAL
from lgelu_lab.measurements.real import Measured, RealSettings, load_measured
from lgelu_lab.rows_file import RowsFile
from lgelu_lab.studies.arguments import OneLineParser, exit_status

from hf_lgelu import convert_to_relu
from hf_lgelu.comparing.comparison import samples_at_once
from hf_lgelu.environment import hardware, package_versions
from hf_lgelu.networks.batches import read_batches
from hf_lgelu.networks.outputs import OutputReader
from hf_lgelu.refit.distill import distill, moved_names
from hf_lgelu.refit.folds import deal_folds
from hf_lgelu.refit.samples import read_samples

_JUDGED = ("score", "kl", "agreement", "cosine", "least_cosine")
_KEY = ("network", "tokens", "unique_tokens", "text", "moved", "seed")
_COLUMNS = (
    *_KEY, "refit_tokens", "steps", "numbers", "loss_before", "loss_after", *_JUDGED, "judged", "seconds", "device",
    "bf16", "cpu", "torch", "transformers", "hf_lgelu",
)  # fmt: skip


@dataclass
class CurveArguments:
    """Which network, on how much text, in how many steps."""

    network: str = field(metadata={"help": f"One of {', '.join(REAL)}.", "choices": list(REAL)})
    tokens: list[int] = field(metadata={"help": "Budgets: tokens that pass through the steps, with repetitions."})
    csv: str = field(default="runs/distill_curve.csv", metadata={"help": "File of the rows; they are added to it."})
    packages: str | None = field(default=None, metadata={"help": "Folder of installed packages with weights."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder with local copies of the data sets."})
    samples: int = field(default=1024, metadata={"help": "Sequences that the refit takes."})
    evaluation_samples: int = field(default=400, metadata={"help": "Sequences that are judged on."})
    unique_tokens: int = field(default=2_000_000, metadata={"help": "Tokens of text, about; more are repetitions."})
    text: Literal["docstrings", "named"] = field(
        default="docstrings", metadata={"help": "More than the sentences of WikiText without <unk>."}
    )
    bf16: bool = field(default=False, metadata={"help": "Steps in bfloat16."})
    seed: int = field(default=0, metadata={"help": "Of the draws."})


def main() -> int:
    """Measure what has no row yet; the exit status is 1, with the reason, for what cannot be measured."""
    (arguments,) = OneLineParser(CurveArguments).parse()
    return exit_status(partial(_measure, arguments))


def _measure(arguments: CurveArguments) -> None:
    rows = RowsFile(arguments.csv, _COLUMNS, _KEY, {"network": arguments.network, "seed": arguments.seed})
    packages = Path(arguments.packages) if arguments.packages else None
    everything = RealSettings(
        samples=(sys.maxsize,), evaluation_samples=arguments.evaluation_samples, seed=arguments.seed
    )
    measured = load_measured(REAL[arguments.network], everything, arguments.data_dir, packages)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measured.model.to(device)
    text = "none" if measured.network.corpus.label else arguments.text
    own = _named(measured, arguments) if text == "named" else measured.fitted
    fitted = in_batches(own[: arguments.samples], measured.pad, 16, labelled=False)
    refitted = convert_to_relu(measured.model, fitted).model
    samples = [*own, *_more(measured, arguments.unique_tokens)] if text == "docstrings" else own
    data = read_batches(in_batches(samples, measured.pad, 64, labelled=False), model=measured.model)
    folds = deal_folds(read_samples(data, model=measured.model), OutputReader(measured.model))
    most = samples_at_once(OutputReader(measured.model), folds.fitted[-1].load())
    a_step = folds.rows / sum(len(list(batch.pieces(most))) for batch in folds.fitted)
    for tokens in (0, *arguments.tokens):
        asked = {"tokens": tokens, "unique_tokens": folds.rows, "text": text, "moved": "all"}
        if asked in rows:
            continue
        moved, started = copy.deepcopy(refitted), time.perf_counter()
        names, steps, losses = moved_names(moved), round(tokens / a_step), (None, None)
        if steps:
            losses = distill(OutputReader(measured.model), moved, folds, names=names, steps=steps, bf16=arguments.bf16)
        judged = measured.row("distilled", moved)
        row = asked | {name: judged[name] for name in (*_JUDGED, "judged")} | {
            "refit_tokens": sum(next(iter(sample.values())).numel() for sample in own[: arguments.samples]),
            "steps": steps,
            "numbers": sum(moved.get_parameter(name).numel() for name in names), "bf16": arguments.bf16,
            "loss_before": losses[0], "loss_after": losses[1], "seconds": round(time.perf_counter() - started, 1),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type, "cpu": hardware(1)["cpu"],
            **{name.replace("-", "_"): package_versions()[name] for name in ("torch", "transformers", "hf-lgelu")},
        }  # fmt: skip
        rows.append(row)
        print(", ".join(f"{name} {row[name]}" for name in ("tokens", "steps", *_JUDGED) if row[name] is not None))


def _more(measured: Measured, tokens: int) -> Iterator[Inputs]:
    """Sequences of docstrings beside those of the network's own data, until there are so many tokens."""
    texts, left = docstring_paragraphs(), tokens - sum(sample["input_ids"].numel() for sample in measured.fitted)
    while left > 0 and (some := list(islice(texts, 512))):
        found = cut_samples(measured.network, some, None, measured.tokenizer)
        yield from found
        left -= sum(sample["input_ids"].numel() for sample in found)


def _named(measured: Measured, arguments: CurveArguments) -> list[Inputs]:
    """All paragraphs to fit on, with names of their own in the place of <unk>, in a seeded order."""
    network = measured.network
    lines = network.corpus.load(arguments.data_dir).splits[network.corpus.fit_split][network.corpus.column][:]
    names = sorted({name for line in lines for name in re.findall(r"(?<=[a-z] )[A-Z][a-z]{3,}", line)})
    draw = partial(Random(0).choice, names)
    texts = paragraphs([re.sub("<unk>", lambda _: draw(), line) for line in lines])
    samples = cut_samples(network, texts, None, measured.tokenizer)
    Random(arguments.seed).shuffle(samples)
    return samples


if __name__ == "__main__":
    sys.exit(main())
