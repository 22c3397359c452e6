"""Train one model of one benchmark: `python scripts/train.py --benchmark mlp-digits --harden`."""

from lgelu_lab.report.write import summarize
from lgelu_lab.studies.arguments import parse_command_line
from lgelu_lab.studies.run import run_benchmark


def main() -> None:
    """Parse, train, and say what came out."""
    run, training = parse_command_line()
    record = run_benchmark(run, training)
    if training.should_log:
        print(summarize(record, training.output_dir))


if __name__ == "__main__":
    main()
