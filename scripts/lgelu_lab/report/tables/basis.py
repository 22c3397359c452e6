"""What the numbers rest on: seeds, epochs, samples, recipe, machine, and what is not as in the paper."""

from collections.abc import Callable, Sequence

from lgelu_lab.report.configurations import benchmarks_of, is_downstream, is_grid
from lgelu_lab.report.markup import Cell, Table
from lgelu_lab.report.numbers import NONE, count, either, listed, metric_with_direction
from lgelu_lab.report.paper import differences, model_size
from lgelu_lab.studies.records import RunRecord

_PARTS = ("", "grid", "downstream")
_VERSIONS = ("torch", "transformers", "accelerate", "timm", "hf-lgelu")


def basis_table(records: Sequence[RunRecord]) -> Table:
    """A row per benchmark, one more for its grid, and one more for the networks of the downstream measurements."""
    parts: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        parts.setdefault((record.config["benchmark"], _part(record)), []).append(record)
    order = benchmarks_of(records)
    ordered = sorted(parts.items(), key=lambda item: (_PARTS.index(item[0][1]), order.index(item[0][0])))
    versions = [
        f"{name} {either([record.versions[name] for record in records if name in record.versions])}"
        for name in _VERSIONS
        if any(name in record.versions for record in records)
    ]
    return Table(
        key="basis",
        title="Seeds, epochs, samples, recipes and machines",
        caption="The paper gives optimizer, learning rate, weight decay, t, c and the hardening schedule, and no batch "
        "size, learning-rate schedule, momentum, number of epochs or λ₀ of the uniform start; those are ours. "
        "Epochs are compared with the latest best epoch that it names.",
        header=(
            *("Benchmark", "Unlike the paper", "Runs", "Seeds", "Epochs", "Training samples", "Evaluated on"),
            *("Recipe", "Machine"),
        ),
        rows=tuple(_row(", ".join(filter(None, part)), runs) for part, runs in ordered),
        notes=(f"Versions: {', '.join(versions)}. ± is the sample standard deviation over seeds.",),
        text_columns=9,
        wide_columns=(1, 6, 7, 8),
    )


def _part(record: RunRecord) -> str:
    return "grid" if is_grid(record) else "downstream" if is_downstream(record) else ""


def _row(part: str, runs: Sequence[RunRecord]) -> tuple[Cell | str, ...]:
    unlike = list(dict.fromkeys(text for record in runs for text in differences(record)))
    hours = sum(record.seconds for record in runs) / 3600
    return (
        part,
        Cell("; ".join(unlike), "warning") if unlike else NONE,
        f"{len(runs)}, {hours:.1f} h",
        listed(sorted({record.config["seed"] for record in runs})),
        _same(runs, lambda record: f"{record.last.epoch:g}"),
        _same(runs, lambda record: count(record.data["train_samples"])),
        f"{metric_with_direction(runs[0].metric, runs[0].greater_is_better)} on "
        f"{_same(runs, lambda record: count(record.data['eval_samples']))} rows of "
        f"{_same(runs, lambda record: record.data['eval_split'])}",
        _same(runs, _recipe),
        _same(runs, _machine),
    )


def _same(runs: Sequence[RunRecord], look: Callable[[RunRecord], object]) -> str:
    return either([look(record) for record in runs])


def _recipe(record: RunRecord) -> str:
    config = record.config
    parts = [f"{config['optim']}, learning rate {config['learning_rate']:g}"]
    if "weight_decay" in config:
        parts.append(f"weight decay {config['weight_decay']:g}")
    if "lr_scheduler_type" in config:
        parts.append(f"schedule {config['lr_scheduler_type']}")
    parts.append(f"batch {config['train_batch_size']}")
    parts += ["bf16"] * bool(config.get("bf16"))
    if config.get("pretrained"):
        parts.append(f"fine-tuned from {config['pretrained']}")
    return ", ".join(filter(None, [*parts, model_size(config)]))


def _machine(record: RunRecord) -> str:
    machine = record.hardware
    threads = machine["threads_per_process"]
    where = listed(machine["accelerators"]) or f"{machine['cpu']}, {threads} thread{'s' * (threads > 1)}"
    return where if machine["processes"] == 1 else f"{machine['processes']} × {where}"
