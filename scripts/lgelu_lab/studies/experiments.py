"""The studies: lists of runs. No torch here, as in records: the report reads which runs there should be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SEEDS = (0, 1, 2)
"""The paper's number of seeds."""

INIT_MODES = ("uniform", "increasing", "decreasing")
GRID_TEMPERATURES = (0.1, 0.3, 0.6, 0.9)
GRID_LR_MULTIPLIERS = (1.0, 3.0, 6.0, 9.0)
PAPER_TEMPERATURE = 0.1

Configuration = Mapping[str, Any]
"""Arguments of `scripts/train.py` that tell the runs of a study apart, apart from benchmark and seed."""


@dataclass(frozen=True)
class Experiment:
    """One run of a study: the folder of its record, and the arguments of `scripts/train.py`."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Study:
    """A named list of runs.

    Args:
        name: its key in STUDIES.
        benchmarks: what it runs on.
        configurations: benchmark → its configurations, baselines first.
        folder: below the output folder; "" where studies share runs with each other.
        arguments: of every run.
    """

    name: str
    benchmarks: tuple[str, ...]
    configurations: Callable[[str], Sequence[Configuration]]
    folder: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def build(self, benchmarks: Sequence[str], seeds: Sequence[int] = SEEDS) -> list[Experiment]:
        """Every run on these benchmarks. One seed of all comes before the next, so that what is there compares."""
        return [
            self._experiment(benchmark, configuration, seed)
            for benchmark in benchmarks
            for seed in seeds
            for configuration in self.configurations(benchmark)
        ]

    def _experiment(self, benchmark: str, configuration: Configuration, seed: int) -> Experiment:
        name = experiment_name(benchmark, configuration, seed)
        name = f"{self.folder}/{name}" if self.folder else name
        fixed = {"benchmark": benchmark, "seed": seed, "save_final_model": False, "run_name": name}
        return Experiment(name, {**fixed, **self.arguments, **configuration})


def experiment_name(benchmark: str, configuration: Configuration, seed: int) -> str:
    """The folder of a run's record, e.g. "mlp-adult/lambda_gelu-uniform-hardened-seed0".

    t and c are named where the configuration sets them, and the schedule where it is not the paper's.
    """
    parts = [configuration["activation"]]
    if "init_mode" in configuration:
        parts.append(configuration["init_mode"])
    for letter, argument in (("t", "temperature"), ("c", "hardness_lr_multiplier")):
        if argument in configuration:
            parts.append(f"{letter}{configuration[argument]:g}")
    parts += ["geometric"] * (configuration.get("hardening_schedule") == "geometric")
    parts += ["hardened"] * configuration.get("harden", False)
    parts += ["relufied"] * configuration.get("relufication", False)
    return f"{benchmark}/{'-'.join(parts)}-seed{seed}"


_MLPS = ("mlp-adult", "mlp-fmnist")
_PAIRS = (*_MLPS, "resnet18-cifar10", "resnet18-cifar100", "deit-tiny-imagenet", "gpt2-wikitext2")
_GELU: Configuration = {"activation": "gelu"}
_RELU: Configuration = {"activation": "relu"}
_LEARNED: tuple[Configuration, ...] = tuple({"activation": "lambda_gelu", "init_mode": mode} for mode in INIT_MODES)
_HARDENED: Configuration = {"activation": "lambda_gelu", "init_mode": "uniform", "harden": True}
_RELUFIED: Configuration = {"activation": "gelu", "relufication": True}
_RELATED = ("relu", "gelu", "silu", "mish", "prelu", "learnable_swish")


def _pretrained(benchmark: str) -> list[Configuration]:
    """The network fine-tuned, hardened by two schedules, swapped early, and swapped before the first step."""
    smooth, gate = ("silu", "lambda_silu") if benchmark == "smollm2" else ("gelu", "lambda_gelu")
    by_step = {"hardening_strategy": "steps"}
    hardened = {**_HARDENED, "activation": gate, **by_step}
    return [
        {"activation": smooth, "save_final_model": True},
        {**hardened, "save_final_model": True},
        {"activation": smooth, "relufication": True, **by_step},
        _RELU,
        {**hardened, "hardening_schedule": "geometric"},
    ]


def _grid(benchmark: str) -> list[Configuration]:
    # The paper varies t on the MLP alone.
    temperatures = GRID_TEMPERATURES if benchmark in _MLPS else (PAPER_TEMPERATURE,)
    points = [
        {"temperature": temperature, "hardness_lr_multiplier": multiplier}
        for temperature in temperatures
        for multiplier in GRID_LR_MULTIPLIERS
    ]
    return [_GELU, *({**learned, **point} for point in points for learned in _LEARNED)]


_BY_STEPS = {"logging_strategy": "steps", "logging_steps": 0.05, "save_strategy": "steps", "save_steps": 0.25}
_MOVING = {"init_hardness": 1.05}  # from 1.0067 λ would hardly move in so few steps, and every option be one

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        Study("grid", ("mlp-fmnist", "resnet18-cifar100"), _grid, folder="grid"),
        Study("profiles", _PAIRS, lambda benchmark: (_GELU, _RELU, *_LEARNED)),  # the paper's Table I
        Study("substitution", _PAIRS, lambda benchmark: (_GELU, _HARDENED, _RELUFIED)),  # its Table II
        Study("related", _MLPS, lambda benchmark: (*({"activation": name} for name in _RELATED), *_LEARNED)),
        Study(
            "downstream",
            ("mlp-digits", *_PAIRS),
            lambda benchmark: (_GELU, _RELU, _LEARNED[0], _HARDENED),
            folder="downstream",
            arguments={"save_final_model": True},  # for scripts/measure.py
        ),
        Study("pretrained", ("reactions", "smollm2"), _pretrained, folder="pretrained", arguments=_MOVING | _BY_STEPS),
    )
}
