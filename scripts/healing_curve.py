"""What a conversion is worth in training tokens: perplexity of a language model as it trains on from several starts.

    python scripts/healing_curve.py --network smollm2 --packages runs/packages --tokens 50000 100000 250000 500000

The original, the plain swap and the conversions (`refit`, and `distill` after it) take the same steps on the same
tokens in the same order, plain next-token prediction. No token comes twice, and none of those that the conversion was
fitted on. All starts get to a budget before any goes on to the next. Rows go to a CSV file as they are measured; a
rerun goes on from the last state in `--state_dir`.
"""

import copy
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import torch
from lgelu_lab.benchmarks.docstrings import docstring_paragraphs
from lgelu_lab.benchmarks.real_inputs import cut_samples
from lgelu_lab.benchmarks.real_networks import REAL
from lgelu_lab.measurements.real import Measured, RealSettings, load_measured
from lgelu_lab.rows_file import RowsFile
from lgelu_lab.studies.arguments import OneLineParser, exit_status
from torch import nn

from hf_lgelu import convert_to_relu, substitute_relu
from hf_lgelu.environment import hardware, package_versions
from hf_lgelu.networks.sites import SMOOTH_KINDS

STARTS = ("original", "swap", "refit", "distill")
_BLOCKS_A_STEP = 4
_WARMUP = 20
_KEY = ("network", "start", "tokens", "learning_rate", "seed")
_COLUMNS = (
    *_KEY, "perplexity", "kl", "agreement", "judged", "refit_tokens", "steps", "seconds", "bf16", "cpu", "torch",
    "transformers", "hf_lgelu",
)  # fmt: skip


@dataclass
class HealingArguments:
    """Which language model, from which starts, on how much text."""

    network: str = field(metadata={"help": "A language model.", "choices": ["smollm2"]})
    tokens: list[int] = field(metadata={"help": "Budgets at which each network is judged; 0 is always judged."})
    starts: list[str] = field(default_factory=lambda: list(STARTS), metadata={"help": ", ".join(STARTS)})
    csv: str = field(default="runs/healing_curve.csv", metadata={"help": "File of the rows; they are added to it."})
    state_dir: str = field(default="runs/healing", metadata={"help": "Folder of the networks between two budgets."})
    packages: str | None = field(default=None, metadata={"help": "Folder of installed packages with weights."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder with local copies of the data sets."})
    samples: int = field(default=256, metadata={"help": "Sequences that the conversion is fitted on."})
    evaluation_samples: int = field(default=32, metadata={"help": "Sequences that are judged on."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Of AdamW, constant after 20 steps."})
    bf16: bool = field(default=False, metadata={"help": "Products in bfloat16."})
    seed: int = field(default=0, metadata={"help": "Of the order of the text."})


def main() -> int:
    """Measure what has no row yet; the exit status is 1, with the reason, for what cannot be measured."""
    (arguments,) = OneLineParser(HealingArguments).parse()
    return exit_status(partial(_measure, arguments))


def _measure(arguments: HealingArguments) -> None:
    fixed = {"network": arguments.network, "learning_rate": arguments.learning_rate, "seed": arguments.seed}
    rows = RowsFile(arguments.csv, _COLUMNS, _KEY, fixed)
    settings = RealSettings(
        samples=(sys.maxsize,), evaluation_samples=arguments.evaluation_samples, seed=arguments.seed
    )
    packages = Path(arguments.packages) if arguments.packages else None
    measured = load_measured(REAL[arguments.network], settings, arguments.data_dir, packages)
    text = _text(measured, arguments)
    if max(arguments.tokens) > len(text) * measured.network.length:
        raise ValueError(f"there are {len(text) * measured.network.length:,} tokens; ask for fewer")
    for tokens in (0, *sorted(arguments.tokens)):
        for start in arguments.starts:
            if {"start": start, "tokens": tokens} not in rows:
                rows.append(_healed(measured, text, arguments, start, tokens))


def _text(measured: Measured, arguments: HealingArguments) -> torch.Tensor:
    """(blocks, length): what the refit does not see of WikiText, and the docstrings, in one seeded order."""
    blocks = [sample["input_ids"] for sample in measured.fitted[arguments.samples :]]
    prose = cut_samples(measured.network, list(docstring_paragraphs()), None, measured.tokenizer)
    blocks += [sample["input_ids"] for sample in prose]
    Random(arguments.seed).shuffle(blocks)
    return torch.cat(blocks)


def _start(measured: Measured, arguments: HealingArguments, name: str) -> nn.Module:
    """The network of a start before its first step."""
    model = copy.deepcopy(measured.model)
    if name == "swap":
        substitute_relu(model, kinds=SMOOTH_KINDS)
    elif name != "original":
        path = Path(arguments.state_dir, f"{name}.pt")  # for each learning rate the same
        if not path.exists():
            converted = convert_to_relu(model, measured.fitted[: arguments.samples], effort=name).model
            torch.save(converted.state_dict(), path)
        substitute_relu(model, kinds=SMOOTH_KINDS)
        model.load_state_dict(torch.load(path, weights_only=True))
    return model


def _healed(
    measured: Measured, text: torch.Tensor, arguments: HealingArguments, name: str, tokens: int
) -> dict[str, object]:
    """The row of a start after so many tokens; its state is kept for the next budget."""
    began = time.perf_counter()
    path = Path(arguments.state_dir, f"{name}-{arguments.learning_rate:g}-{arguments.seed}.pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    known = torch.load(path, weights_only=True) if path.exists() else {"steps": 0}
    done = known["steps"]
    model = _start(measured, arguments, name)
    optimizer = torch.optim.AdamW(model.parameters(), arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    if done:
        model.load_state_dict(known["model"])
        optimizer.load_state_dict(known["optimizer"])
    steps = round(tokens / (_BLOCKS_A_STEP * text.shape[1]))
    model.train()
    for step in range(done, steps):
        optimizer.param_groups[0]["lr"] = arguments.learning_rate * min(1, (step + 1) / _WARMUP)
        batch = text[step * _BLOCKS_A_STEP : (step + 1) * _BLOCKS_A_STEP]
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.bf16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}, path)
    judged = measured.row("healed", model)
    row = {"start": name, "tokens": tokens, "perplexity": judged["score"], "steps": steps} | {
        "kl": judged["kl"], "agreement": judged["agreement"], "judged": judged["judged"],
        "refit_tokens": 0 if name in STARTS[:2] else arguments.samples * text.shape[1], "bf16": arguments.bf16,
        "seconds": round(time.perf_counter() - began, 1), "cpu": hardware(1)["cpu"],
        **{package.replace("-", "_"): package_versions()[package] for package in ("torch", "transformers", "hf-lgelu")},
    }  # fmt: skip
    print(", ".join(f"{column} {row[column]}" for column in ("start", "tokens", "perplexity", "kl")), flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
