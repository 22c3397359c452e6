"""A benchmark's rows as a checkpoint takes them."""

import os
from pathlib import Path
from typing import Any

from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.benchmarks.image_rows import ImageRows
from lgelu_lab.benchmarks.options import DataOptions
from lgelu_lab.benchmarks.table import check_benchmark
from lgelu_lab.studies.records import RECORD_FILE, read_record
from torch.utils.data import Subset
from transformers import PreTrainedConfig

from hf_lgelu.cli.inputs.input_set import InputSet, sample_numbers
from hf_lgelu.cli.inputs.texts import context_length

_SAME_AS_TRAINED = ("validation_fraction", "max_train_samples")


def load_benchmark(
    name: str,
    model: str,
    config: PreTrainedConfig,
    *,
    data_dir: str | os.PathLike | None = None,
    max_eval_samples: int | None = None,
    sequence_length: int | None = None,
) -> BenchmarkData:
    """The benchmark's data by the checkpoint's own tokenizer, sequence length and image size.

    Of a run of that benchmark, whose record.json is beside the model, the rows are divided as they were in training,
    so that features are standardized as they were and no row that it learned from is evaluated on.

    Raises what the benchmark's `load` raises.
    """
    benchmark = check_benchmark(name)
    given: dict[str, Any] = {}
    if "pretrained" in benchmark.model_defaults:
        given["pretrained"] = model
        own = {
            "context_length": context_length(config, sequence_length),
            "image_size": getattr(config, "image_size", None),
        }
        given |= {name: value for name, value in own.items() if name in benchmark.pretrained_model_defaults}
    rows = DataOptions(data_dir=data_dir, max_eval_samples=max_eval_samples, **_division(benchmark, model))
    return benchmark.load(rows, benchmark.model_options(given))


def training_rows(benchmark: Benchmark, data: BenchmarkData, wanted: int | None, seed: int) -> InputSet:
    """`wanted` training rows, or all; images as they are, neither cropped nor flipped."""
    rows = _as_evaluated(data.train)
    chosen = Subset(rows, sample_numbers(len(rows), wanted, seed).tolist())
    return InputSet(
        chosen, f"{benchmark.name}, training rows", data.origin.source if data.origin.folder is None else None
    )


def evaluation_rows(benchmark: Benchmark, data: BenchmarkData) -> InputSet:
    """The rows that the benchmark's runs are evaluated on."""
    return InputSet(
        data.eval, f"{benchmark.name}, {data.eval_split}", data.origin.source if data.origin.folder is None else None
    )


def _as_evaluated(rows: Any) -> Any:
    if isinstance(rows, ImageRows):
        return ImageRows(rows.images, rows.labels, rows.mean, rows.deviation, rows.image_size)
    return rows


def _division(benchmark: Benchmark, model: str) -> dict[str, Any]:
    path = Path(model) / RECORD_FILE
    if not path.is_file():
        return {}
    config = read_record(model).config
    if config["benchmark"] != benchmark.name:
        return {}
    return {name: config[name] for name in _SAME_AS_TRAINED if config.get(name) is not None}
