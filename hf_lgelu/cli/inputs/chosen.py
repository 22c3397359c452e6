"""The calibration and the second set that a conversion's arguments name."""

from typing import Any

from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.benchmarks.table import BENCHMARKS
from transformers import PreTrainedModel

from hf_lgelu.cli.convert_arguments import ConvertArguments
from hf_lgelu.cli.inputs.benchmark_inputs import evaluation_rows, load_benchmark, training_rows
from hf_lgelu.cli.inputs.dataset_inputs import DatasetName, dataset_rows, load_splits
from hf_lgelu.cli.inputs.input_set import InputSet
from hf_lgelu.cli.inputs.texts import context_length

_SECOND_SPLITS = ("validation", "valid", "test")
# Inputs taken where the user names no number: past 32 times the width of a layer no gain was seen.
_FEATURE_ROWS, _IMAGES, _TOKENS, _FEWEST_SEQUENCES = 8192, 1024, 32768, 32


def input_sets(arguments: ConvertArguments, model: PreTrainedModel) -> tuple[InputSet, InputSet | None]:
    """(calibration inputs, second set or None) as `model` takes them.

    Raises ValueError that says what is accepted where a set is not to be had, does not fit the model, or is the same
    rows twice; RuntimeError where the Hub cannot be reached; ImportError without `datasets`.
    """
    _refuse_what_benchmarks_lack(arguments)
    wanted = arguments.max_calibration_samples or _default_samples(arguments, model)
    if arguments.calibration in BENCHMARKS:
        benchmark = BENCHMARKS[arguments.calibration]
        data = _benchmark_data(arguments, benchmark.name, model)
        calibration = training_rows(benchmark, data, wanted, arguments.seed)
        if arguments.evaluation in (None, benchmark.name):
            return calibration, evaluation_rows(benchmark, data)
        return calibration, _second_set(arguments, model)
    splits = load_splits(arguments.calibration, arguments.calibration_config)
    rows = _split(splits, arguments.calibration_split, arguments.calibration, "--calibration_split")
    calibration = dataset_rows(
        _dataset_name(arguments, arguments.calibration, arguments.calibration_config, arguments.calibration_split),
        rows, model, arguments.model, wanted=wanted, seed=arguments.seed, sequence_length=arguments.sequence_length,
    )  # fmt: skip
    return calibration, _second_set(arguments, model)


def _refuse_what_benchmarks_lack(arguments: ConvertArguments) -> None:
    """A benchmark has its own splits and columns; an option that would be ignored is refused."""
    second = arguments.evaluation or arguments.calibration
    given = (
        (arguments.calibration, "--calibration_split", arguments.calibration_split != "train"),
        (arguments.calibration, "--calibration_config", arguments.calibration_config is not None),
        (second, "--evaluation_split", arguments.evaluation_split is not None),
        (second, "--evaluation_config", arguments.evaluation_config is not None),
    )
    for name, option, is_given in given:
        if name in BENCHMARKS and is_given:
            raise ValueError(f"{option}: {name} is a benchmark, which has its own splits; leave the option out")


def _second_set(arguments: ConvertArguments, model: PreTrainedModel) -> InputSet | None:
    """What --evaluation names; left out, another split of the calibration's data set."""
    if arguments.evaluation == "none":
        return None
    if arguments.evaluation in BENCHMARKS:
        data = _benchmark_data(arguments, arguments.evaluation, model)
        return evaluation_rows(BENCHMARKS[arguments.evaluation], data)
    name, config = arguments.evaluation, arguments.evaluation_config
    if name is None:
        name, config = arguments.calibration, config or arguments.calibration_config
    splits = load_splits(name, config)
    same = (name, config) == (arguments.calibration, arguments.calibration_config)
    split = arguments.evaluation_split or _usual_split(splits, arguments.calibration_split if same else None)
    if split is None and arguments.evaluation is None:
        return None
    if split is None or (same and split == arguments.calibration_split):
        raise ValueError(
            f"the second set must be other rows than the calibration set, split {arguments.calibration_split!r}; give "
            f"--evaluation_split, of {', '.join(splits)}, or --evaluation another data set"
        )
    return dataset_rows(
        _dataset_name(arguments, name, config, split),
        _split(splits, split, name, "--evaluation_split"),
        model,
        arguments.model,
        wanted=arguments.max_evaluation_samples,
        seed=arguments.seed,
        sequence_length=arguments.sequence_length,
    )


def _usual_split(splits: dict[str, Any], taken: str | None) -> str | None:
    usual = [name for name in (*_SECOND_SPLITS, *(splits if len(splits) == 1 else ())) if name in splits]
    return next((name for name in usual if name != taken), None)


def _split(splits: dict[str, Any], name: str, source: str, option: str) -> Any:
    if name not in splits:
        raise ValueError(f"{source} has no split {name!r}; give {option}, of {', '.join(splits)}")
    return splits[name]


def _dataset_name(arguments: ConvertArguments, name: str, config: str | None, split: str) -> DatasetName:
    return DatasetName(name, config, split, arguments.column, arguments.label_column)


def _benchmark_data(arguments: ConvertArguments, name: str, model: PreTrainedModel) -> BenchmarkData:
    return load_benchmark(
        name, arguments.model, model.config, data_dir=arguments.data_dir,
        max_eval_samples=arguments.max_evaluation_samples, sequence_length=arguments.sequence_length,
    )  # fmt: skip


def _default_samples(arguments: ConvertArguments, model: PreTrainedModel) -> int:
    if model.main_input_name == "input_ids":
        return max(_FEWEST_SEQUENCES, _TOKENS // context_length(model.config, arguments.sequence_length))
    return _IMAGES if model.main_input_name == "pixel_values" else _FEATURE_ROWS
