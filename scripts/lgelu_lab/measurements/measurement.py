"""What a measurement is: networks compared on a benchmark's rows, with settings, giving flat rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.measurements.networks import TrainedModel

Measure = Callable[[Mapping[str, TrainedModel], Benchmark, BenchmarkData, Any], Sequence[Mapping[str, Any]]]
"""(networks, benchmark, its rows, settings) → flat rows with the same keys, "model" among them."""


@dataclass(frozen=True)
class Measurement:
    """One kind of measurement.

    Args:
        name: its key in MEASUREMENTS.
        benchmarks: what it can be made on.
        models: keys of `networks.MODELS` that it compares.
        settings: a dataclass with a default in every field.
        measure: makes the rows.
        of_run: settings that are taken from the config of the run that trained the networks where they are None.
    """

    name: str
    benchmarks: tuple[str, ...]
    models: tuple[str, ...]
    settings: type
    measure: Measure
    of_run: tuple[str, ...] = ()
