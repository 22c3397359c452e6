"""How long a conversion to ReLU takes and how much memory it needs, on networks with random weights.

Each is measured in a process of its own. Rows go to a CSV file as they are measured, and a rerun measures only what
is not there.

    python scripts/bench_convert.py --csv bench.csv              the four named networks
    python scripts/bench_convert.py --csv bench.csv --sweep      rows and widths, for the figure
    python scripts/bench_convert.py --csv bench.csv --table
    python scripts/bench_convert.py --csv bench.csv --figure bench.png
    python scripts/bench_convert.py --csv docs/convert/gated.csv --gated silu gelu --seeds 0 1 2
                                                                 trained networks with gated units, and how good
    python scripts/bench_convert.py --csv docs/convert/detector.csv --detector --seeds 0
                                                                 a trained detector, in float and int8, and how good
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from lgelu_lab.conversion_bench import (
    CASES,
    NAMED,
    append_row,
    draw_figure,
    markdown_table,
    measure_apart,
    measure_here,
    read_rows,
)
from transformers import HfArgumentParser


@dataclass
class BenchArguments:
    """What is measured, and where the rows go."""

    csv: str = field(default="runs/bench_convert.csv", metadata={"help": "File of the rows; they are added to it."})
    cases: list[str] = field(default_factory=list, metadata={"help": f"Of {', '.join(CASES)}; default {NAMED}."})
    sweep: bool = field(default=False, metadata={"help": "Rows and widths in the place of the named networks."})
    threads: int = field(default=2, metadata={"help": "Threads of the CPU."})
    table: bool = field(default=False, metadata={"help": "Print a Markdown table of the rows, and measure nothing."})
    figure: str | None = field(default=None, metadata={"help": "Draw the sweep into this PNG, and measure nothing."})
    gated: list[str] = field(default_factory=list, metadata={"help": "silu (SwiGLU), gelu (GEGLU): train and convert."})
    detector: bool = field(default=False, metadata={"help": "Train and convert a detector (needs pycocotools)."})
    seeds: list[int] = field(
        default_factory=lambda: [0, 1, 2], metadata={"help": "Of --gated and --detector, one network each."}
    )
    data_dir: str | None = field(default=None, metadata={"help": "Of --gated: local copies of the data sets."})
    measure_here: str | None = field(default=None, metadata={"help": "One case in this process, as JSON on stdout."})


def main() -> int:
    """Measure what is not there, or show what is; the exit status is 1, with the reason, for wrong arguments."""
    (arguments,) = HfArgumentParser(BenchArguments).parse_args_into_dataclasses()
    try:
        if arguments.measure_here:
            print(json.dumps(measure_here(arguments.measure_here, arguments.threads)))
        elif arguments.table:
            print(markdown_table(read_rows(Path(arguments.csv))))
        elif arguments.figure:
            draw_figure(read_rows(Path(arguments.csv)), arguments.figure)
        elif arguments.gated:
            _measure_gated(arguments)
        elif arguments.detector:
            _measure_detector(arguments)
        else:
            _measure(arguments)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _measure(arguments: BenchArguments) -> None:
    chosen = arguments.cases or [name for name, case in CASES.items() if bool(case.sweep) == arguments.sweep]
    unknown = [name for name in chosen if name not in CASES]
    if unknown:
        raise ValueError(f"unknown case {', '.join(unknown)}; accepted: {', '.join(CASES)}")
    path = Path(arguments.csv)
    there = read_rows(path)
    there = set(zip(there["case"], there["threads"], strict=True))
    for name in chosen:
        if (name, arguments.threads) in there:
            continue
        row = measure_apart(name, arguments.threads)
        append_row(path, row)
        print(f"{name}: {row['seconds']} s, {row['peak_gib']} GiB, {row['outcome']}", flush=True)


def _measure_gated(arguments: BenchArguments) -> None:
    from lgelu_lab.gated_conversion import load_texts, measure_gated  # which needs the data sets' libraries

    benchmark, data = load_texts(arguments.data_dir)
    there = read_rows(Path(arguments.csv))
    there = set(zip(there["activation"], there["seed"], strict=True))
    for seed in arguments.seeds:
        for activation in arguments.gated:
            if (activation, seed) not in there:
                row = measure_gated(activation, seed, benchmark, data)
                append_row(Path(arguments.csv), row)
                print(row, flush=True)


def _measure_detector(arguments: BenchArguments) -> None:
    from lgelu_lab.detector_conversion import measure_detector  # which needs pycocotools

    there = set(read_rows(Path(arguments.csv))["seed"])
    for seed in arguments.seeds:
        for row in measure_detector(seed) if seed not in there else ():
            append_row(Path(arguments.csv), row)
            print(row, flush=True)


if __name__ == "__main__":
    sys.exit(main())
