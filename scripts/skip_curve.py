"""What zeros are worth: score and distance by the share of units, and of weights, that one token uses.

    python scripts/skip_curve.py --network smollm2 --packages runs/packages --folder runs/skip

Networks: the original, converted in its own shape, with more units, distilled, and refitted behind gates whose
threshold was chosen first (as cut:0.2, see lgelu_lab/measurements/skipping.py). Rows go to a CSV file. A rerun makes
and measures only what is not there. One thread by OMP_NUM_THREADS=1.
"""

import bisect
import itertools
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from lgelu_lab.benchmarks.real_inputs import Inputs, in_batches
from lgelu_lab.benchmarks.real_networks import REAL
from lgelu_lab.measurements.networks import TrainedModel, load_data
from lgelu_lab.measurements.real import Measured, RealSettings, load_measured
from lgelu_lab.measurements.skipping import FORMS, Wiring, measure, read_wiring, refit_skipping, score_of
from lgelu_lab.report.zeros import critical_sparsities, draw_curves, read_curves
from lgelu_lab.rows_file import RowsFile
from lgelu_lab.studies.arguments import OneLineParser, exit_status
from lgelu_lab.studies.records import read_record
from torch import nn

from hf_lgelu import ConversionConfig, convert_to_relu
from hf_lgelu.environment import hardware, package_versions
from hf_lgelu.networks.outputs import OutputReader
from hf_lgelu.refit.distill import distill, moved_names

_KEY = ("network", "made", "rule", "asked", "seed")
_COLUMNS = (
    *_KEY, "live", "live_8", "live_32", "read", "metric", "score", "kl", "cosine", "width", "tokens", "judged",
    "processor_seconds", "cpu", "threads", "torch", "transformers", "hf_lgelu",
)  # fmt: skip
_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
_FEWER = (0.3, 0.2, 0.1)  # of a ReLU network; more than are live anyway change nothing
_SHIFTED = (0.25, 0.2, 0.15, 0.1)
_CALIBRATED_ON = 1024  # tokens, of those that are fitted on


@dataclass
class SkipArguments:
    """Which network, made how, on how much text."""

    network: str = field(metadata={"help": f"One of {', '.join(REAL)}, or gpt2.", "choices": [*REAL, "gpt2"]})
    made: list[str] = field(
        default_factory=lambda: ["original", "refit", "width:1.25"],
        metadata={
            "help": "original, refit, width:1.25, distill:STEPS (from refit), or shift, cut, smooth, place:LIVE."
        },
    )
    folder: str = field(
        default="runs/skip", metadata={"help": "Folder of the layers of a refit, which goes on if killed."}
    )
    csv: str = field(default="runs/skip.csv", metadata={"help": "File of the rows; they are added to it."})
    packages: str | None = field(default=None, metadata={"help": "Folder of installed packages with weights."})
    run: str = field(default="runs/gpt2", metadata={"help": "Of gpt2: folder of train.py --benchmark gpt2-wikitext2."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder with local copies of the data sets."})
    units: int = field(default=64, metadata={"help": "Sequences that are fitted on."})
    evaluation_units: int = field(default=12, metadata={"help": "Sequences that are judged on."})
    seed: int = field(default=0, metadata={"help": "Of the draws."})
    draw: str | None = field(
        default=None,
        metadata={"help": "Measure nothing: draw the rows into this PNG file, and write critical.csv beside."},
    )


def main() -> int:
    """Measure what has no row yet; the exit status is 1, with the reason, for what cannot be measured."""
    (arguments,) = OneLineParser(SkipArguments).parse()
    return exit_status(partial(_measure, arguments))


def _measure(arguments: SkipArguments) -> None:
    if arguments.draw is not None:
        curves, file = read_curves(arguments.csv), Path(arguments.draw)
        critical_sparsities(curves).to_csv(file.with_name("critical.csv"), index=False, lineterminator="\n")
        draw_curves(curves, file)
        return
    torch.manual_seed(arguments.seed)
    rows = RowsFile(arguments.csv, _COLUMNS, _KEY, {"network": arguments.network, "seed": arguments.seed})
    settings = RealSettings(units=(arguments.units,), evaluation_units=arguments.evaluation_units, seed=arguments.seed)
    packages = Path(arguments.packages) if arguments.packages else None
    if arguments.network == "gpt2":
        measured = _own_gpt2(arguments, settings)
    else:
        measured = load_measured(REAL[arguments.network], settings, arguments.data_dir, packages)
    fitted = in_batches(measured.fitted, measured.pad, 16, labelled=False)
    ends = list(itertools.accumulate(unit["input_ids"].numel() for unit in measured.fitted))
    few = measured.fitted[: 1 + bisect.bisect_left(ends, _CALIBRATED_ON)]
    (calibration,) = in_batches(few, measured.pad, len(few), labelled=False)
    wiring = read_wiring(measured.model, fitted)
    asked: list[tuple[str, float | None]]
    for made in arguments.made:
        form, _, number = made.partition(":")
        asked = [("gate", None)]
        if form == "original":
            asked += [(rule, share) for rule in ("gate", "product")[: 1 + wiring.is_gated] for share in _SHARES]
        elif form not in FORMS or made == "place:1":  # else the threshold is its own
            asked += [("gate", share) for share in _FEWER]
            asked += [("shift", share) for share in _SHIFTED if form == "refit"]
        keys = {(rule, share): {"made": made, "rule": rule, "asked": "" if share is None else share}
                for rule, share in asked}  # fmt: skip
        asked = [pair for pair in asked if keys[pair] not in rows]
        if not asked:
            continue
        began = time.process_time()
        network = _made(form, float(number or 1), measured, wiring, fitted, calibration, Path(arguments.folder))
        width = float(number) if form == "width" else 1.0
        told = {
            "width": width, "judged": len(measured.evaluation),
            "processor_seconds": round(time.process_time() - began, 1), "threads": torch.get_num_threads(),
            "tokens": sum(unit["input_ids"].numel() for unit in measured.fitted), "cpu": hardware(1)["cpu"],
            **{name.replace("-", "_"): package_versions()[name] for name in ("torch", "transformers", "hf-lgelu")},
        }  # fmt: skip
        found = measure(measured.model, network, wiring, asked, measured.judged, calibration)
        for pair, (change, used) in zip(asked, found, strict=True):
            metric, score = score_of(change)
            judged = {
                "live": round(used.share, 4), "live_8": used.union(8), "live_32": used.union(32),
                "read": round(wiring.read(pair[0], used.share, width), 4), "metric": metric,
                "score": 1 / score if metric == "perplexity" else score, "kl": change.kl,
                "cosine": change.embedding.get("cosine"),
            }  # fmt: skip
            rows.append(told | keys[pair] | judged)
            print(made, *pair, *(judged[name] for name in ("live", "read", "metric", "score", "kl")), flush=True)


def _made(
    form: str,
    number: float,
    measured: Measured,
    wiring: Wiring,
    fitted: list[Inputs],
    calibration: Inputs,
    folder: Path,
) -> nn.Module:
    """A network; the layers of its refit are kept in the folder."""
    model = measured.model
    if form == "original":
        return model
    if form not in ("refit", "distill"):
        return refit_skipping(model, wiring, form, number, calibration)
    options = ConversionConfig(checkpoint_dir=folder / measured.network.name)
    network = convert_to_relu(model, fitted, options=options, progress=True).model
    if form == "distill":
        losses = distill(OutputReader(model), network, wiring.folds, names=moved_names(network), steps=int(number))
        print(f"distilled: loss {losses[0]} → {losses[1]}", flush=True)
    return network


def _own_gpt2(arguments: SkipArguments, settings: RealSettings) -> Measured:
    """The GPT-2 that the laboratory has trained itself, on the blocks of its run."""
    trained = TrainedModel("gelu", Path(arguments.run), read_record(arguments.run))
    network, data = replace(REAL["smollm2"], name="gpt2", length=128), load_data(trained.record, arguments.data_dir)
    blocks = data.train.tokens[: arguments.units], data.eval.tokens[: arguments.evaluation_units]
    units = [[{"input_ids": block[None]} for block in part] for part in blocks]
    return Measured(network, settings, trained.load(), data.processor, *units, data.origin)


if __name__ == "__main__":
    sys.exit(main())
