"""`hf-lgelu compare`: a table of two checkpoints, which helps to choose the one to ship."""

import json
from collections.abc import Sequence
from pathlib import Path

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
        is_fitted=was_fitted_to(converted.name, inputs),
        progress=progress,
    )


def was_fitted_to(name: str, inputs: InputSet) -> bool:
    """Whether the report in a conversion's folder names this set as fitted; False for any other folder."""
    try:
        report = json.loads((Path(name) / REPORT_FILE).read_text(encoding="utf-8"))
        return report["provenance"]["data"] == inputs.description
    except (OSError, ValueError, LookupError, TypeError):
        return False


def print_table(
    original: nn.Module,
    converted: nn.Module,
    data: InputSet,
    *,
    int8: bool,
    progress: bool,
    is_fitted: bool = False,
    outputs: Sequence[str] | None = None,
    onnx_dir: str | None = None,
) -> NetworkComparison:
    """The printed comparison of two networks on `data`. `is_fitted`: the conversion was fitted to the data."""
    forms = "float32 and int8, by ONNX" if int8 else "float32"
    say(f"Measuring both networks in {forms}: score and distance on {len(data):,} inputs, then time ...")
    batches = data.batches("comparison", progress=progress)
    compared = compare_networks(original, converted, batches, int8=int8, outputs=outputs, onnx_dir=onnx_dir)
    say(f"{data.description}:\n{compared}")
    if is_fitted:
        say("The conversion was fitted to inputs of this set: on other inputs the distance may be larger.")
    return compared
