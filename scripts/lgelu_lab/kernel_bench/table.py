"""Rows → Markdown: providers down, sizes across, the median ratio to nn.GELU in the cells."""

from collections.abc import Iterable, Sequence

from lgelu_lab.kernel_bench.cases import SIZES, SWEEP_SIZES
from lgelu_lab.kernel_bench.providers import PROVIDERS, REFERENCE
from lgelu_lab.kernel_bench.results import number_text
from lgelu_lab.kernel_bench.training_steps import ACTIVATIONS, STEP_MODE, STEP_MODELS
from lgelu_lab.report.markup import Table, to_markdown

Cells = dict[str, str]

STEP_LABELS = {
    **{name: PROVIDERS[name].label for name in ("gelu", "lambda_gelu", "relu", "silu")},
    "lambda_gelu_hardened": "λ-GELU, hardened",
}


def markdown_tables(
    rows: Sequence[Cells], modes: Sequence[str], dtypes: Sequence[str], hardness_values: Sequence[float]
) -> str:
    """A table for each device, mode, dtype, number of threads and allocator that has rows of these modes.

    Flat sizes (the sweep) belong to the figure and are left out. Training steps have tables of their own.
    Raises ValueError where no row fits.
    """
    wanted = {"", *map(number_text, hardness_values)}
    kept = [
        row
        for row in rows
        if row["dtype"] in dtypes
        and (row["mode"] == STEP_MODE or (row["mode"] in modes and row["hardness"] in wanted))
        and row["size"] not in SWEEP_SIZES
    ]
    if not kept:
        raise ValueError("no row of these modes, dtypes and hardness values has been measured")
    groups: dict[tuple[str, ...], list[Cells]] = {}
    for row in kept:
        group = tuple(row[name] for name in ("device", "mode", "dtype", "threads", "allocator"))
        groups.setdefault(group, []).append(row)
    return "\n\n".join(to_markdown(_table(group, members)) for group, members in groups.items())


def _table(group: tuple[str, ...], rows: Sequence[Cells]) -> Table:
    device, mode, dtype, threads, allocator = group
    step = mode == STEP_MODE
    memory = ("peak_ratio", "Peak memory") if step else ("saved_bytes_per_element", "Saved bytes per element")
    columns = _in_order((_size_of(row) for row in rows), STEP_MODELS if step else SIZES)
    body = []
    for name, lines in _by_provider(rows, ACTIVATIONS if step else PROVIDERS):
        ratios = {_size_of(row): _decimals(row["ratio_median"]) for row in lines}
        kept = sorted({_decimals(row[memory[0]], 3 if step else 1) for row in lines} - {""}, key=float)
        body.append(
            (name, *(ratios.get(size, "") for size in columns), " to ".join(dict.fromkeys(kept[:1] + kept[-1:])))
        )
    software = sorted({f"torch {row['torch']}, commit {row['commit']}" for row in rows})
    place = f"{threads} thread{'s' * (threads != '1')}, allocator {allocator}" if allocator != "torch" else "GPU"
    what = "Training step" if step else {"both": "Forward and backward"}.get(mode, mode.capitalize())
    return Table(
        key=f"{mode}-{dtype}-{threads}-{allocator}",
        title=f"{what}, {dtype}, {place}",
        caption=f"Median ratio to {PROVIDERS[REFERENCE].label} of the same round. {device}; {'; '.join(software)}.",
        header=("Provider", *columns, memory[1]),
        rows=tuple(body),
        text_columns=1,
    )


def _by_provider(rows: Sequence[Cells], order: Iterable[str]) -> list[tuple[str, list[Cells]]]:
    """[(label with kernel and λ, rows)]; a provider has a line for each λ."""
    lines: dict[tuple[int, float, str], list[Cells]] = {}
    places = {name: place for place, name in enumerate(order)}
    for row in rows:
        label = STEP_LABELS[row["provider"]] if row["mode"] == STEP_MODE else _label(row)
        place = places.get(row["provider"], len(places))
        lines.setdefault((place, float(row["hardness"] or 0), label), []).append(row)
    return [(label, lines[place, hardness, label]) for place, hardness, label in sorted(lines)]


def _label(row: Cells) -> str:
    provider = PROVIDERS.get(row["provider"])
    words = [provider.label if provider else row["provider"]]
    if row["provider"] in ("lambda_gelu", "lambda_gelu_frozen"):
        words.append(f"kernel {row['kernel']} (automatic)")
    if row["hardness"]:
        words.append(f"λ = {row['hardness']}")
    return ", ".join(words)


def _size_of(row: Cells) -> str:
    return f"{row['size']}:{row['memory_format']}" if row["memory_format"] == "channels_last" else row["size"]


def _in_order(sizes: Iterable[str], order: Iterable[str]) -> list[str]:
    found = list(dict.fromkeys(sizes))
    known = [size for size in order if size in found]
    return known + [size for size in found if size not in known]


def _decimals(text: str, count: int = 2) -> str:
    return f"{float(text):.{count}f}" if text else ""
