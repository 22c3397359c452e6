"""`hf-lgelu compare`: a table of two checkpoints, which helps to choose the one to ship."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from hf_lgelu.cli.arguments import CompareArguments
from hf_lgelu.cli.checkpoint import read_checkpoint
from hf_lgelu.cli.command import say
from hf_lgelu.cli.data import Rows
from hf_lgelu.cli.inputs import InputSet, read_rows
from hf_lgelu.export.comparison import NetworkComparison, compare_networks
from hf_lgelu.refit.report import REPORT_FILE


def compare(arguments: CompareArguments, data: Rows) -> None:
    """Print the table of both checkpoints. Raises what loading, reading and `compare_networks` raise."""
    original, converted = (
        read_checkpoint(name, **arguments.reading) for name in (arguments.model, arguments.converted)
    )
    inputs = read_rows(data, original)
    networks = (original.network, converted.network)
    print_table(*networks, inputs, converted.name, int8=arguments.int8, progress=arguments.progress)


def print_table(
    original: nn.Module, converted: nn.Module, data: InputSet, folder: str, *, progress: bool, int8: bool = False
) -> NetworkComparison:
    """The printed comparison of two networks on `data`; the second is in `folder`."""
    forms = "float32 and int8, by ONNX" if int8 else "float32"
    say(f"Measuring both networks in {forms}: score and distance on {len(data):,} inputs, then time ...")
    batches, options = data.batches("comparison", progress=progress), conversion_options(folder, data)
    compared = compare_networks(original, converted, batches, int8=int8, **options)
    say(f"{data.description}:\n{compared}")
    return compared


def conversion_options(folder: str, data: InputSet) -> dict[str, Any]:
    """The options `outputs` and `box_channels` of the conversion that wrote a folder; empty for other folders.

    Says if that conversion was fitted to inputs of this set.
    """
    file = Path(folder) / REPORT_FILE
    report = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    if not (isinstance(report, dict) and report.keys() >= {"report", "provenance"}):  # other programs have such files
        return {}
    if report["provenance"]["data"] == data.description:
        say("The conversion was fitted to inputs of this set: on other inputs the distance may be larger.")
    return {name: report["report"]["config"].get(name) for name in ("outputs", "box_channels")}
