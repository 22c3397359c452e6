"""Score a checkpoint on a run's rows, exactly as the run was: `python scripts/score.py --run runs/digits`.

The rows are divided and prepared as the run's record tells, and other data is refused; the arithmetic is the run's,
bfloat16 autocast where it had --bf16. What is scored is the run's own network, or another that
was made of it, such as an export or a conversion: --model out/relu.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from lgelu_lab.benchmarks.table import check_benchmark
from lgelu_lab.measurements.networks import as_in_run, evaluate, load_data
from lgelu_lab.studies.arguments import OneLineParser
from lgelu_lab.studies.records import RECORD_FILE, read_record, require_own_weights

from hf_lgelu.models.checkpoint import load_checkpoint


@dataclass
class ScoreArguments:
    """Which network, on whose rows."""

    run: str = field(metadata={"help": "Folder of the run whose rows are taken, with its record.json."})
    model: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of the checkpoint; default: the run's own."}
    )
    data_dir: str | None = field(default=None, metadata={"help": "Folder with local copies of the data sets."})
    bf16: bool | None = field(
        default=None, metadata={"help": "Under bfloat16 autocast (true) or in float32 (false); default: as the run."}
    )


def main() -> int:
    """Evaluate and print; the exit status is 1, with the reason, where that is not possible."""
    (arguments,) = OneLineParser(ScoreArguments).parse()
    try:
        print(score(arguments))
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def score(arguments: ScoreArguments) -> str:
    """The scores beside those of the record, in words."""
    if not (Path(arguments.run) / RECORD_FILE).is_file():
        raise FileNotFoundError(f"{arguments.run} is no run's folder: it has no {RECORD_FILE}")
    record = read_record(arguments.run)
    if arguments.model is None:
        require_own_weights(record, arguments.run)
    model = as_in_run(load_checkpoint(arguments.model or Path(arguments.run)).float(), record)
    data = load_data(record, arguments.data_dir)
    bf16 = bool(record.config.get("bf16")) if arguments.bf16 is None else arguments.bf16
    scores = evaluate(model, check_benchmark(record.config["benchmark"]), data, bf16=bf16)
    shown = [f"{name} {scores[name]:.6g}" for name in (record.metric, f"relu_{record.metric}") if name in scores]
    recorded = f"{record.metric} {record.saved.score:.6g}"
    if record.saved.relu_score is not None:
        recorded += f", relu_{record.metric} {record.saved.relu_score:.6g}"
    rows = f"{record.config['benchmark']}, {data.eval_split}, {len(data.eval):,} rows of {data.origin.source}"
    rows += f", in {'bfloat16' if bf16 else 'float32'}"
    return f"{rows}: {', '.join(shown)}\nthe record's evaluation of the saved weights: {recorded}"


if __name__ == "__main__":
    sys.exit(main())
