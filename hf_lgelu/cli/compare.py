"""`hf-lgelu compare`: a table of two checkpoints, which helps to choose the one to ship."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from hf_lgelu.cli.arguments import CompareArguments
from hf_lgelu.cli.checkpoint import read_checkpoint
from hf_lgelu.cli.command import say
from hf_lgelu.cli.data import Rows
from hf_lgelu.cli.inputs import read_rows
from hf_lgelu.cli.rows import InputSet
from hf_lgelu.export.comparison import NetworkComparison, compare_networks
from hf_lgelu.refit.report import REPORT_FILE


def compare(arguments: CompareArguments, data: Rows) -> None:
    """Print the table of both checkpoints. Raises what loading, reading and `compare_networks` raise."""
    progress = arguments.progress
    original, converted = (
        read_checkpoint(name, **arguments.reading) for name in (arguments.model, arguments.converted)
    )
    inputs = read_rows(data, original)
    print_table(
        original.network,
        converted.network,
        inputs,
        int8=arguments.int8,
        onnx_dir=arguments.onnx_dir,
        report=Converted.read(converted.name),
        progress=progress,
    )


@dataclass(frozen=True)
class Converted:
    """What the report in a conversion's folder says: the data, and how its outputs are read. Else nothing is known."""

    data: str | None = None
    reading: Mapping[str, Any] = field(default_factory=dict)  # the options `outputs` and `box_channels`

    @classmethod
    def read(cls, folder: str) -> "Converted":
        try:
            report = json.loads((Path(folder) / REPORT_FILE).read_text(encoding="utf-8"))
            reading = {name: report["report"]["config"].get(name) for name in ("outputs", "box_channels")}
            return cls(report["provenance"]["data"], reading)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return cls()


def print_table(
    original: nn.Module,
    converted: nn.Module,
    data: InputSet,
    *,
    int8: bool,
    progress: bool,
    report: Converted | None = None,
    onnx_dir: str | None = None,
) -> NetworkComparison:
    """The printed comparison of two networks on `data`. `report` is that of the second, if it is a conversion."""
    report = report or Converted()
    forms = "float32 and int8, by ONNX" if int8 else "float32"
    say(f"Measuring both networks in {forms}: score and distance on {len(data):,} inputs, then time ...")
    batches = data.batches("comparison", progress=progress)
    compared = compare_networks(original, converted, batches, int8=int8, onnx_dir=onnx_dir, **report.reading)
    say(f"{data.description}:\n{compared}")
    if report.data == data.description:
        say("The conversion was fitted to inputs of this set: on other inputs the distance may be larger.")
    return compared
