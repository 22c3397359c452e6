"""Records → configurations: what the seeds of one benchmark have in common, its name, and its place in a table."""

from collections.abc import Iterable, Sequence

from lgelu_lab.studies.experiments import PAPER_TEMPERATURE, SEEDS, STUDIES, experiment_name
from lgelu_lab.studies.records import EpochRecord, RunRecord

PAPER_LR_MULTIPLIER = 9.0
GRID_PREFIX = "grid/"
DOWNSTREAM_PREFIX = "downstream/"

_ACTIVATION_LABELS = {
    "gelu": "GELU",
    "relu": "ReLU",
    "silu": "SiLU",
    "mish": "Mish",
    "prelu": "PReLU",
    "learnable_swish": "Swish, learnable β",
}
_ORDER = (*_ACTIVATION_LABELS.values(), "λ-GELU uniform", "λ-GELU increasing", "λ-GELU decreasing")

_BENCHMARKS = STUDIES["profiles"].benchmarks  # the paper's, in its order

_RECIPE = (
    *("optim", "learning_rate", "weight_decay", "lr_scheduler_type", "train_batch_size", "num_train_epochs"),
    *("max_steps", "bf16", "validation_fraction", "pretrained", "image_size", "patch_size", "num_layers", "width"),
    *("num_heads", "context_length", "vocabulary_size"),
)

Groups = dict[tuple[str, str], list[RunRecord]]
"""{(benchmark, configuration label): its seeds}."""


def is_grid(record: RunRecord) -> bool:
    """Whether a run belongs to the study of t and c, which has baselines of its own."""
    return record.name.startswith(GRID_PREFIX)


def is_downstream(record: RunRecord) -> bool:
    """Whether a run trained a network for the downstream measurements; other studies have runs of their own."""
    return record.name.startswith(DOWNSTREAM_PREFIX)


def learns_hardness(record: RunRecord) -> bool:
    """Whether the run has λ-GELU gates."""
    return record.config["activation"] == "lambda_gelu"


def is_relufied(record: RunRecord) -> bool:
    """Whether ReLU was swapped in for the smooth gate in the middle of training (the rival of hardening)."""
    return bool(record.config.get("relufication"))


def configuration_label(record: RunRecord) -> str:
    """What the seeds of one configuration have in common, in words: "λ-GELU uniform, hardened".

    t and c are named where they are not the paper's 0.1 and 9.
    """
    config = record.config
    name = _ACTIVATION_LABELS.get(config["activation"], config["activation"])
    if is_relufied(record):
        return f"{name} → ReLU at {config.get('switch_fraction', 0.25):.0%}, trained on"
    if not learns_hardness(record):
        return name
    parts = [f"λ-GELU {config['init_mode']}"]
    if config.get("temperature", PAPER_TEMPERATURE) != PAPER_TEMPERATURE:
        parts.append(f"t = {config['temperature']:g}")
    if config.get("hardness_lr_multiplier", PAPER_LR_MULTIPLIER) != PAPER_LR_MULTIPLIER:
        parts.append(f"c = {config['hardness_lr_multiplier']:g}")
    return ", ".join([*parts, *["hardened"] * config["harden"]])


def configuration_key(record: RunRecord) -> str:
    """The same as in a run's folder name, without the seed: "lambda_gelu-uniform-hardened"."""
    config = record.config
    named = {"activation": config["activation"], "harden": config["harden"], "relufication": is_relufied(record)}
    if learns_hardness(record):
        named["init_mode"] = config["init_mode"]
    return experiment_name("", named, 0).removeprefix("/").removesuffix("-seed0")


def grouped(records: Iterable[RunRecord]) -> Groups:
    """{(benchmark, configuration label): its seeds in order}: benchmarks in the paper's order, baselines first.

    Raises ValueError where two records are the same seed of the same configuration.
    """
    records = list(records)
    order = benchmarks_of(records)
    groups: Groups = {}
    for record in sorted(records, key=lambda record: (order.index(record.config["benchmark"]), _rank(record))):
        groups.setdefault((record.config["benchmark"], configuration_label(record)), []).append(record)
    for (benchmark, label), seeds in groups.items():
        numbers = [record.config["seed"] for record in seeds]
        if len(set(numbers)) < len(numbers):
            raise ValueError(
                f"{benchmark}, {label}: more than one record of a seed ({', '.join(map(str, numbers))}). Their mean "
                "would count it twice; report on a folder that holds each run once"
            )
    return groups


def benchmarks_of(records: Iterable[RunRecord]) -> list[str]:
    """The benchmarks in the paper's order, others last."""
    found = dict.fromkeys(record.config["benchmark"] for record in records)
    return [*(name for name in _BENCHMARKS if name in found), *(name for name in found if name not in _BENCHMARKS)]


def of_benchmark(groups: Groups, benchmark: str) -> dict[str, list[RunRecord]]:
    """{configuration label: its seeds} of one benchmark."""
    return {label: seeds for (name, label), seeds in groups.items() if name == benchmark}


def same_recipe(first: RunRecord, second: RunRecord) -> bool:
    """Whether two runs trained alike, on as much data: their difference is the activation's doing."""
    recipes = [(*(run.config.get(name) for name in _RECIPE), run.data["train_samples"]) for run in (first, second)]
    return recipes[0] == recipes[1]


def paired(runs: Sequence[RunRecord], baselines: Sequence[RunRecord]) -> list[tuple[RunRecord, RunRecord]]:
    """(run, baseline) for each run that has a baseline with the same seed and recipe."""
    by_seed = {baseline.config["seed"]: baseline for baseline in baselines}
    pairs = [(run, by_seed.get(run.config["seed"])) for run in runs]
    return [(run, baseline) for run, baseline in pairs if baseline is not None and same_recipe(run, baseline)]


def smallest_hardness(epoch: EpochRecord) -> float | None:
    """λ of the softest gate; None without λ-GELU."""
    return min(epoch.hardness.values()) if epoch.hardness else None


def seed_count(seeds: Sequence[RunRecord]) -> str:
    """How many of the paper's seeds are there: "3", or "2 of 3"."""
    return str(len(seeds)) if len(seeds) >= len(SEEDS) else f"{len(seeds)} of {len(SEEDS)}"


def _rank(record: RunRecord) -> tuple[int, str, int]:
    label = configuration_label(record)
    base = label.removesuffix(", hardened")
    place = _ORDER.index(base) if base in _ORDER else len(_ORDER)
    return place + 100 * record.config["harden"] + 200 * is_relufied(record), label, record.config["seed"]
