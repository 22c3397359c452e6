"""Train one model of one benchmark: `python scripts/train.py --benchmark mlp-digits --harden`."""

import sys

from lgelu_lab.report.write import summarize
from lgelu_lab.studies.arguments import parse_command_line
from lgelu_lab.studies.run import run_benchmark


def main() -> int:
    """Parse, train, and say what came out; the exit status is 1, with the reason, where it was refused or failed."""
    run, training = parse_command_line()
    try:
        record = run_benchmark(run, training)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if training.should_log:
        print(summarize(record, training.output_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
