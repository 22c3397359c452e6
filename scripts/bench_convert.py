"""How long a conversion to ReLU takes and how much memory it needs, on networks with random weights.

Each is measured in a process of its own. Rows go to a CSV file as they are measured, and a rerun measures only what
is not there.

    python scripts/bench_convert.py --csv bench.csv              the four named networks
    python scripts/bench_convert.py --csv bench.csv --sweep      rows and widths, for the figure
    python scripts/bench_convert.py --csv bench.csv --table
    python scripts/bench_convert.py --csv bench.csv --figure bench.png
    python scripts/bench_convert.py --csv docs/convert/gated.csv --gated silu --max_eval_samples 300
                                                                 trained networks with gated units, and how good
"""

import json
import sys
from dataclasses import dataclass, field

from lgelu_lab.conversion_bench import (
    CASES,
    NAMED,
    TIME_COLUMNS,
    TIME_KEY,
    draw_figure,
    markdown_table,
    measure_apart,
    measure_here,
)
from lgelu_lab.rows_file import RowsFile
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
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "Of --gated, one network each."})
    data_dir: str | None = field(default=None, metadata={"help": "Of --gated: local copies of the data sets."})
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Of --gated: judge on at most so many validation sequences; default all."}
    )
    measure_here: str | None = field(default=None, metadata={"help": "One case in this process, as JSON on stdout."})


def main() -> int:
    """Measure what is not there, or show what is; the exit status is 1, with the reason, for wrong arguments."""
    (arguments,) = HfArgumentParser(BenchArguments).parse_args_into_dataclasses()
    try:
        if arguments.measure_here:
            print(json.dumps(measure_here(arguments.measure_here, arguments.threads)))
        elif arguments.table:
            print(markdown_table(_times(arguments).frame()))
        elif arguments.figure:
            draw_figure(_times(arguments).frame(), arguments.figure)
        elif arguments.gated:
            _measure_gated(arguments)
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
    rows = _times(arguments)
    for name in chosen:
        if {"case": name, "threads": arguments.threads} in rows:
            continue
        row = measure_apart(name, arguments.threads)
        rows.append(row)
        print(f"{name}: {row['seconds']} s, {row['peak_gib']} GiB, {row['outcome']}", flush=True)


def _times(arguments: BenchArguments) -> RowsFile:
    return RowsFile(arguments.csv, TIME_COLUMNS, TIME_KEY)


def _measure_gated(arguments: BenchArguments) -> None:
    from lgelu_lab import gated_conversion  # which needs the data sets' libraries

    rows = RowsFile(arguments.csv, gated_conversion.COLUMNS, gated_conversion.KEY)
    benchmark, data = gated_conversion.load_texts(arguments.data_dir, arguments.max_eval_samples)
    for seed in arguments.seeds:
        for activation in arguments.gated:
            if {"activation": activation, "seed": seed, "eval_sequences": len(data.eval)} not in rows:
                row = gated_conversion.measure_gated(activation, seed, benchmark, data)
                rows.append(row)
                print(row, flush=True)


if __name__ == "__main__":
    sys.exit(main())
