"""Measure what ReLU networks allow: `python scripts/measure.py --runs runs/paper --output_dir runs/measured`."""

import sys
from dataclasses import dataclass, field

from lgelu_lab.benchmarks.table import check_benchmark
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.records import measurement_path
from lgelu_lab.measurements.run import MEASUREMENTS, check_measurements, run_measurement
from lgelu_lab.studies.arguments import OneLineParser
from lgelu_lab.studies.study import parse_settings


@dataclass
class MeasureArguments:
    """Which measurements, on which networks."""

    runs: str = field(metadata={"help": "Output folder of: scripts/study.py --study downstream."})
    output_dir: str = field(metadata={"help": "Folder of the records; measurements that have one are skipped."})
    measurements: list[str] = field(
        default_factory=list,
        metadata={"help": f"Of {', '.join(MEASUREMENTS)}; default: all."},
    )
    benchmarks: list[str] = field(default_factory=lambda: ["mlp-digits"], metadata={"help": "On these benchmarks."})
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "Seeds of the runs."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder with local copies of the data sets."})
    settings: list[str] = field(
        default_factory=list, metadata={"help": "Of one measurement, as name=value, e.g. 'rows=[64,256]'."}
    )


def main() -> int:
    """Measure what has no record yet; the exit status is 1 if a measurement failed."""
    (arguments,) = OneLineParser(MeasureArguments).parse()
    try:
        measurements = check_measurements(arguments.measurements or list(MEASUREMENTS))
        given = parse_settings(arguments.settings)
        if given and len(measurements) != 1:
            raise ValueError("settings belong to one measurement: name it with --measurements")
        for benchmark in arguments.benchmarks:
            check_benchmark(benchmark)
        # JSON has lists where the settings have tuples.
        chosen = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        settings = {measurement.name: measurement.settings(**chosen) for measurement in measurements}
    except (ValueError, TypeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    failed = 0
    for benchmark in arguments.benchmarks:
        for measurement in (each for each in measurements if benchmark in each.benchmarks or arguments.measurements):
            for seed in arguments.seeds:
                failed += not _measure(measurement, benchmark, seed, settings[measurement.name], arguments)
    return int(failed > 0)


def _measure(
    measurement: Measurement, benchmark: str, seed: int, settings: object, arguments: MeasureArguments
) -> bool:
    """One measurement, told in a line; whether it is there now."""
    name = f"{benchmark}/{measurement.name}-seed{seed}"
    there = measurement_path(arguments.output_dir, benchmark, measurement.name, seed).exists()
    try:
        places = arguments.runs, arguments.output_dir
        record = run_measurement(measurement, benchmark, seed, *places, settings, data_dir=arguments.data_dir)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"failed: {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return False
    how = "there already" if there else f"measured in {record.seconds:.1f} s"
    print(f"{name}: {len(record.rows)} rows, {how}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
