"""Measure what ReLU networks allow: `python scripts/downstream.py --runs runs/paper --output_dir runs/measured`."""

import sys
import traceback
from dataclasses import dataclass, field

from transformers import HfArgumentParser

from hf_lgelu.downstream.run import check_measurements, choose_settings, run_measurement
from hf_lgelu.downstream.table import MEASUREMENTS
from hf_lgelu.studies.study import parse_settings


@dataclass
class DownstreamArguments:
    """Which measurements, on which networks."""

    runs: str = field(metadata={"help": "Output folder of: scripts/study.py --study downstream."})
    output_dir: str = field(metadata={"help": "Folder of the records; measurements that have one are skipped."})
    measurements: list[str] = field(default_factory=list, metadata={"help": f"Of {', '.join(MEASUREMENTS)}."})
    benchmarks: list[str] = field(default_factory=lambda: ["mlp-digits"], metadata={"help": "On these benchmarks."})
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "Seeds of the runs."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder with local copies of the data sets."})
    settings: list[str] = field(
        default_factory=list, metadata={"help": "Of one measurement, as name=value, e.g. 'epsilons=[0.01,0.02]'."}
    )


def main() -> int:
    """Measure what has no record yet; the exit status is 1 if a measurement failed."""
    (arguments,) = HfArgumentParser(DownstreamArguments).parse_args_into_dataclasses()
    measurements = check_measurements(arguments.measurements)
    given = parse_settings(arguments.settings)
    if given and len(measurements) != 1:
        raise ValueError("settings belong to one measurement: name it with --measurements")
    failed = 0
    for measurement in measurements:
        settings = choose_settings(measurement, given)
        for benchmark in arguments.benchmarks:
            if benchmark not in measurement.benchmarks and len(measurements) > 1:
                continue
            for seed in arguments.seeds:
                name = f"{benchmark}/{measurement.name}-seed{seed}"
                try:
                    record = run_measurement(
                        measurement, benchmark, seed, arguments.runs, arguments.output_dir, settings,
                        data_dir=arguments.data_dir,
                    )  # fmt: skip
                    print(f"{name}: {len(record.rows)} rows in {record.seconds:.1f} s", flush=True)
                except (ValueError, RuntimeError, OSError, ImportError):
                    failed += 1
                    print(f"failed: {name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
