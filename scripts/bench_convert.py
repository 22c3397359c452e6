"""How long a conversion to ReLU takes and how much memory it needs, on networks with random weights.

Each is measured in a process of its own. Rows go to a CSV file as they are measured, and a rerun measures only what
is not there.

    python scripts/bench_convert.py --csv bench.csv              the four networks
"""

import json
import sys
from dataclasses import dataclass, field

from lgelu_lab.conversion_bench import (
    CASES,
    TIME_COLUMNS,
    TIME_KEY,
    measure_apart,
    measure_here,
)
from lgelu_lab.rows_file import RowsFile
from transformers import HfArgumentParser


@dataclass
class BenchArguments:
    """What is measured, and where the rows go."""

    csv: str = field(default="runs/bench_convert.csv", metadata={"help": "File of the rows; they are added to it."})
    cases: list[str] = field(default_factory=list, metadata={"help": f"Of {', '.join(CASES)}; default all."})
    threads: int = field(default=2, metadata={"help": "Threads of the CPU."})
    measure_here: str | None = field(default=None, metadata={"help": "One case in this process, as JSON on stdout."})


def main() -> int:
    """Measure what is not there; the exit status is 1, with the reason, for wrong arguments."""
    (arguments,) = HfArgumentParser(BenchArguments).parse_args_into_dataclasses()
    try:
        if arguments.measure_here:
            print(json.dumps(measure_here(arguments.measure_here, arguments.threads)))
        else:
            _measure(arguments)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _measure(arguments: BenchArguments) -> None:
    chosen = arguments.cases or list(CASES)
    unknown = [name for name in chosen if name not in CASES]
    if unknown:
        raise ValueError(f"unknown case {', '.join(unknown)}; accepted: {', '.join(CASES)}")
    rows = RowsFile(arguments.csv, TIME_COLUMNS, TIME_KEY)
    for name in chosen:
        if {"case": name, "threads": arguments.threads} in rows:
            continue
        row = measure_apart(name, arguments.threads)
        rows.append(row)
        print(f"{name}: {row['seconds']} s, {row['peak_gib']} GiB, {row['outcome']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
