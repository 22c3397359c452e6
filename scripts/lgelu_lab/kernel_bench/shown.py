"""Rows → Markdown tables and one picture."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas

from lgelu_lab.kernel_bench.measure import SIZES, SWEEP_SIZES
from lgelu_lab.kernel_bench.providers import FLOOR, PROVIDERS, REFERENCE
from lgelu_lab.kernel_bench.results import number_text
from lgelu_lab.kernel_bench.training_steps import ACTIVATIONS, STEP_MODE, STEP_MODELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABELS = {name: provider.label for name, provider in PROVIDERS.items()}
_STEP_LABELS = _LABELS | {"lambda_gelu_hardened": "λ-GELU, hardened"}
_AUTOMATIC = [name for name, provider in PROVIDERS.items() if provider.kernel == "automatic"]

# Okabe and Ito's colours; dashes and marks tell the lines apart where it is printed grey. In the legend's order.
LOOKS = {
    FLOOR: ("#666666", ":|"),
    "relu": ("#E69F00", "-v"),
    "lambda_gelu": ("#0072B2", "-o"),
    REFERENCE: ("#000000", "--s"),
    "lambda_gelu_compiled": ("#56B4E9", "-.D"),
    "lambda_gelu:aten": ("#009E73", "-^"),
    "swish_beta": ("#CC79A7", "--P"),
}


def markdown_tables(
    rows: pandas.DataFrame, modes: Sequence[str], dtypes: Sequence[str], hardness_values: Sequence[float]
) -> str:
    """A table for each device, mode, dtype, number of threads and allocator that has rows of these modes.

    Providers down, sizes across, the median ratio to nn.GELU in the cells. Flat sizes (the sweep) belong to the
    figure and are left out. Training steps have tables of their own. Raises ValueError where no row fits.
    """
    step = rows["mode"] == STEP_MODE
    asked = rows["mode"].isin(modes) & rows["hardness"].isin(["", *map(number_text, hardness_values)])
    kept = rows[rows["dtype"].isin(dtypes) & (step | asked) & ~rows["size"].isin(SWEEP_SIZES)]
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


def draw_figure(
    rows: pandas.DataFrame, path: str | os.PathLike, *, dtype: str, hardness: float, threads: int, allocator: str
) -> None:
    """Write a PNG: time against elements with the copy as the floor, and ratios to nn.GELU size by size.

    Of mode "both". Raises ValueError where there is no such row with a λ, or rows of several devices.
    """
    from matplotlib.figure import Figure

    wanted = {"mode": "both", "dtype": dtype, "threads": str(threads), "allocator": allocator}
    kept = rows[rows["provider"].isin(LOOKS) & rows["hardness"].isin(["", number_text(hardness)])]
    kept = kept[(kept[list(wanted)] == pandas.Series(wanted)).all(axis=1)]
    if not (kept["hardness"] != "").any():  # the title names λ
        what = f"{dtype}, λ = {hardness:g}, {threads} thread(s), {allocator}"
        raise ValueError(f"no row of λ-GELU ({what}) has been measured; see --csv, --dtypes, --hardness and --threads")
    if len(devices := sorted(kept["device"].unique())) > 1:
        raise ValueError(f"the rows are of several devices ({', '.join(devices)}); keep a file for each")
    figure = Figure(figsize=(12.0, 5.6), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    is_swept = kept["size"].isin(SWEEP_SIZES)
    _draw(left, kept[is_swept].set_index("elements"), "milliseconds", joined=True)
    left.set_title("Time of a call (median; bar: 0.2 to 0.8 quantile)", loc="left")
    left.set(xscale="log", yscale="log", xlabel="elements", ylabel="milliseconds")
    named = kept[~is_swept].assign(column=_sizes(kept))
    order = _in_order(named["column"], SIZES)
    _draw(right, named.set_index(named["column"].map(order.index)), "ratio", joined=False)
    right.set_title("Ratio to GELU (median; bar: 0.2 to 0.8 quantile); lower is faster", loc="left")
    right.set_yscale("log", base=2)
    right.yaxis.set_major_formatter("{x:g}")
    right.set_xticks(range(len(order)), [size.replace(":", "\n") for size in order], fontsize=8)
    where = f"{threads} thread{'s' * (threads > 1)}" if allocator != "torch" else "GPU"
    figure.suptitle(f"Forward and backward, {dtype}, λ = {number_text(hardness)}, {devices[0]}, {where}")
    handles, names = (left if is_swept.any() else right).get_legend_handles_labels()
    kernels = " or ".join(sorted(kept.loc[kept["provider"] == "lambda_gelu", "kernel"].unique()))
    labels = [f"λ-GELU (kernel {kernels})" if name == "lambda_gelu" else _LABELS[name] for name in names]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, format="png", dpi=150)


def _draw(axis: "Axes", rows: pandas.DataFrame, what: str, joined: bool) -> None:
    for provider, (colour, look) in LOOKS.items():
        points = rows[rows["provider"] == provider].sort_index()
        middle = points[f"{what}_median"]
        ends = (middle - points[f"{what}_q20"], points[f"{what}_q80"] - middle)
        if len(points):
            axis.errorbar(points.index, middle, ends, fmt=look if joined else look[-1], color=colour, label=provider)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
