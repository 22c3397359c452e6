"""Run a study: `python scripts/study.py --study profiles --output_dir runs/mlp`; again resumes it."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from lgelu_lab.benchmarks.table import check_benchmark
from lgelu_lab.studies.arguments import OneLineParser
from lgelu_lab.studies.experiments import SEEDS, STUDIES
from lgelu_lab.studies.study import ERROR_FILE, check_settings, parse_settings, run_study


@dataclass
class StudyArguments:
    """Which study, and where its records go."""

    study: str = field(metadata={"help": f"One of {', '.join(STUDIES)}.", "choices": list(STUDIES)})
    output_dir: str = field(metadata={"help": "Folder of the records; runs that have one there are skipped."})
    benchmarks: list[str] = field(default_factory=list, metadata={"help": "These benchmarks, not the study's."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder with local copies of the data sets."})
    num_train_epochs: float | None = field(default=None, metadata={"help": "Shorter or longer than the recipe."})
    seeds: list[int] = field(default_factory=lambda: list(SEEDS), metadata={"help": "Seeds of the runs."})
    settings: list[str] = field(
        default_factory=list,
        metadata={"help": "Any arguments of scripts/train.py for every run, e.g. bf16=true max_train_samples=5000."},
    )


def main() -> int:
    """Run what has no record; the exit status is 1 if a run failed."""
    (arguments,) = OneLineParser(StudyArguments).parse()
    try:
        study = STUDIES[arguments.study]
        benchmarks = [check_benchmark(name).name for name in arguments.benchmarks] or study.benchmarks
        chosen = parse_settings(arguments.settings)
        for name in ("data_dir", "num_train_epochs"):
            if getattr(arguments, name) is not None:
                chosen[name] = getattr(arguments, name)
        experiments = study.build(benchmarks, arguments.seeds)
        check_settings(chosen, experiments)
        failed = run_study(experiments, arguments.output_dir, overrides=chosen)
    except ValueError as error:  # a wrong call, or a record there that is of other settings
        print(f"ValueError: {error}", file=sys.stderr)
        return 1
    for name in failed:
        report = Path(arguments.output_dir) / name / ERROR_FILE
        # None is there of a run that another process trains: stderr has said so.
        print(f"failed: {name}{f' (see {report})' if report.is_file() else ''}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
