"""Rows → Markdown tables and one picture."""

from collections.abc import Sequence

import pandas

from lgelu_lab.kernel_bench.measure import SIZES
from lgelu_lab.kernel_bench.providers import PROVIDERS, REFERENCE
from lgelu_lab.kernel_bench.results import number_text
from lgelu_lab.kernel_bench.training_steps import ACTIVATIONS, STEP_MODE, STEP_MODELS

_LABELS = {name: provider.label for name, provider in PROVIDERS.items()}
_STEP_LABELS = _LABELS | {"lambda_gelu_hardened": "λ-GELU, hardened"}
_AUTOMATIC = [name for name, provider in PROVIDERS.items() if provider.kernel == "automatic"]


def markdown_tables(
    rows: pandas.DataFrame,
    modes: Sequence[str],
    dtypes: Sequence[str],
    hardness_values: Sequence[float],
    sizes: Sequence[str] = SIZES,
) -> str:
    """A table for each device, mode, dtype, number of threads and allocator that has rows of these modes.

    Providers down, `sizes` across, the median ratio to nn.GELU in the cells. Training steps have tables of their own.

    Raises ValueError where no row fits.
    """
    step = rows["mode"] == STEP_MODE
    asked = rows["mode"].isin(modes) & rows["hardness"].isin(["", *map(number_text, hardness_values)])
    kept = rows[rows["dtype"].isin(dtypes) & (step | asked & _sizes(rows).isin(sizes))]
    if kept.empty:
        raise ValueError("no row of these modes, dtypes and hardness values has been measured")
    groups = kept.groupby(["device", "mode", "dtype", "threads", "allocator"], sort=False)
    return "\n\n".join(_table(*group, members) for group, members in groups)


def _table(device: str, mode: str, dtype: str, threads: str, allocator: str, rows: pandas.DataFrame) -> str:
    is_step = mode == STEP_MODE
    memory, title, digits = (
        ("peak_ratio", "Peak memory", 3) if is_step else ("saved_bytes_per_element", "Saved bytes per element", 1)
    )
    order = list(ACTIVATIONS if is_step else PROVIDERS)
    rows = rows.assign(
        column=_sizes(rows),
        place=rows["provider"].map(lambda name: order.index(name) if name in order else len(order)),
        λ=pandas.to_numeric(rows["hardness"]).fillna(0),
        Provider=rows["provider"].map(_STEP_LABELS) if is_step else rows.apply(_label, axis=1),
    )
    lines = rows.groupby(["place", "λ", "Provider"])
    cells = rows.pivot(index=["place", "λ", "Provider"], columns="column", values="ratio_median")
    cells = cells[_in_order(rows["column"], list(STEP_MODELS) if is_step else SIZES)]
    cells = cells.map(lambda ratio: f"{ratio:.2f}" if ratio == ratio else "")
    cells[title] = lines[memory].agg(["min", "max"]).apply(lambda ends: _range(ends, digits), axis=1)
    software = sorted(("torch " + rows["torch"] + ", commit " + rows["commit"]).unique())
    place = f"{threads} thread{'s' * (threads != '1')}, allocator {allocator}" if allocator != "torch" else "GPU"
    what = "Training step" if is_step else {"both": "Forward and backward"}.get(mode, mode.capitalize())
    head = f"**{what}, {dtype}, {place}**\n\nMedian ratio to {_LABELS[REFERENCE]} of the same round. {device}; "
    return head + "; ".join(software) + ".\n\n" + _markdown(cells.droplevel(["place", "λ"]).reset_index())


def _markdown(cells: pandas.DataFrame) -> str:
    lines = [list(cells.columns), ["---", *["---:"] * (cells.shape[1] - 1)], *cells.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _range(ends: pandas.Series, digits: int) -> str:
    return " to ".join(dict.fromkeys(f"{end:.{digits}f}" for end in ends.dropna()))


def _label(row: pandas.Series) -> str:
    words = [_LABELS.get(row["provider"], row["provider"])]
    words += [f"kernel {row['kernel']} (automatic)"] if row["provider"] in _AUTOMATIC else []
    words += [f"λ = {row['hardness']}"] if row["hardness"] else []
    return ", ".join(words)


def _sizes(rows: pandas.DataFrame) -> pandas.Series:
    return rows["size"] + rows["memory_format"].map(lambda name: ":channels_last" if name == "channels_last" else "")


def _in_order(found: pandas.Series, known: Sequence[str]) -> list[str]:
    return sorted(found.unique(), key=lambda size: list(known).index(size) if size in known else len(known))
