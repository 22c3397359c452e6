"""The measurements, and one of them on the networks of one benchmark and seed: load, measure, record."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from hf_lgelu.environment import hardware
from lgelu_lab.benchmarks.table import check_benchmark
from lgelu_lab.measurements.conversion import CONVERSION
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.networks import find_models, load_data
from lgelu_lab.measurements.records import (
    MeasurementRecord,
    measurement_path,
    plain_settings,
    read_same,
    write_measurement,
)
from lgelu_lab.studies.checkout import software_versions

MEASUREMENTS: dict[str, Measurement] = {measurement.name: measurement for measurement in (CONVERSION,)}

_TOOLS = ("onnx", "onnxscript", "onnxruntime")


def run_measurement(
    measurement: Measurement,
    benchmark: str,
    seed: int,
    runs: str | os.PathLike,
    output_dir: str | os.PathLike,
    settings: Any,
    *,
    data_dir: str | None = None,
) -> MeasurementRecord:
    """Measure, and write the record below `output_dir`; one that is there with the same settings is returned.

    Args:
        measurement: a row of MEASUREMENTS.
        benchmark: a key of BENCHMARKS that the measurement knows.
        seed: of the runs that trained the networks.
        runs: output folder of the study "downstream".
        output_dir: of the records.
        settings: an instance of `measurement.settings`. A None of `measurement.of_run` becomes what the run had, and a
            record that is there may say either.
        data_dir: folder with local copies of the data sets, as for training.

    Raises:
        ValueError: the measurement cannot be made on this benchmark or these networks, the record that is there has
            other settings, or the networks were trained on other data than is read.
        FileNotFoundError: the networks are not trained yet.
    """
    if benchmark not in measurement.benchmarks:
        raise ValueError(f"{measurement.name} is measured on {', '.join(measurement.benchmarks)}, not on {benchmark!r}")
    left = [name for name in measurement.of_run if getattr(settings, name) is None]
    path = measurement_path(output_dir, benchmark, measurement.name, seed)
    if path.exists():
        return read_same(path, settings, unnamed={"bf16": False}, left=left)
    found = find_models(runs, benchmark, seed, measurement.models)
    record = next(iter(found.values())).record
    data = load_data(record, data_dir)
    for model in found.values():
        data.origin.require_same(model.record.data, f"the run {model.record.name}")
    settings = replace(settings, **{name: record.config.get(name) for name in left})
    started = time.perf_counter()
    rows = [dict(row) for row in measurement.measure(found, check_benchmark(benchmark), data, settings)]
    measured = MeasurementRecord(
        measurement=measurement.name,
        benchmark=benchmark,
        seed=seed,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - started, 3),
        settings=plain_settings(settings),
        models={name: model.summary() for name, model in found.items()},
        rows=tuple(rows),
        versions=software_versions() | {tool: version(tool) for tool in _TOOLS if find_spec(tool.replace("-", "_"))},
        hardware=hardware(1),
    )
    write_measurement(measured, output_dir)
    return measured


def check_measurements(names: Sequence[str]) -> list[Measurement]:
    """The rows of MEASUREMENTS of these names."""
    for name in names:
        if name not in MEASUREMENTS:
            raise ValueError(f"unknown measurement {name!r}; accepted: {', '.join(MEASUREMENTS)}")
    return [MEASUREMENTS[name] for name in names]
