"""Train one model of one benchmark: `python scripts/train.py --benchmark mlp-digits --harden`."""

from hf_lgelu.report.write import summarize
from hf_lgelu.studies.arguments import parse_command_line
from hf_lgelu.studies.run import run_benchmark


def main() -> None:
    """Parse, train, and say what came out."""
    run, training = parse_command_line()
    record = run_benchmark(run, training)
    if training.should_log:
        print(summarize(record, training.output_dir))


if __name__ == "__main__":
    main()
