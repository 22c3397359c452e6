"""The studies: lists of runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SEEDS = (0, 1, 2)
"""The paper's number of seeds."""


@dataclass(frozen=True)
class Experiment:
    """One run of a study: the folder of its record, and the arguments of `scripts/train.py`."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Study:
    """A named list of runs; `build` maps benchmark names to it."""

    name: str
    description: str
    benchmarks: tuple[str, ...]
    build: Callable[[tuple[str, ...]], list[Experiment]]


_BASELINES: tuple[dict[str, Any], ...] = ({"activation": "gelu"}, {"activation": "relu"})
_INIT_MODES: tuple[dict[str, Any], ...] = tuple(
    {"activation": "lambda_gelu", "init_mode": mode} for mode in ("uniform", "increasing", "decreasing")
)
_HARDENED: dict[str, Any] = {"activation": "lambda_gelu", "init_mode": "uniform", "harden": True}


def _every(configurations: tuple[dict[str, Any], ...]) -> Callable[[tuple[str, ...]], list[Experiment]]:
    def build(benchmarks: tuple[str, ...]) -> list[Experiment]:
        return [
            Experiment(
                experiment_name(benchmark, configuration, seed),
                {"benchmark": benchmark, "seed": seed, "save_final_model": False, **configuration},
            )
            for benchmark in benchmarks
            for seed in SEEDS
            for configuration in configurations
        ]

    return build


def experiment_name(benchmark: str, configuration: Mapping[str, Any], seed: int) -> str:
    """The folder of a run's record, e.g. "mlp-adult/lambda_gelu-uniform-hardened-seed0"."""
    parts = [configuration["activation"]]
    if "init_mode" in configuration:
        parts.append(configuration["init_mode"])
    parts += ["hardened"] * configuration.get("harden", False)
    return f"{benchmark}/{'-'.join(parts)}-seed{seed}"


STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        Study(
            "quickstart",
            "GELU, ReLU, λ-GELU and hardened λ-GELU on scikit-learn's digits",
            ("mlp-digits",),
            _every((*_BASELINES, _INIT_MODES[0], _HARDENED)),
        ),
        Study(
            "mlp",
            "GELU, ReLU, λ-GELU with three init modes and hardened λ-GELU on the paper's MLP benchmarks",
            ("mlp-adult", "mlp-fmnist"),
            _every((*_BASELINES, *_INIT_MODES, _HARDENED)),
        ),
    )
}
