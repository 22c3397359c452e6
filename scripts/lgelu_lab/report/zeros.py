"""The figure and the critical sparsities of the skip curves, from their rows."""

from pathlib import Path

import pandas as pd

from lgelu_lab.report.drawing import new_figure, save, style

KEPT = 0.99
"""The share of its own score that a network keeps at its critical sparsity (arXiv:2509.00454)."""

_RULES = {"gate": "by |gate|", "product": "by product", "shift": "shifted"}
_COLOURS = {
    ("original", "gate"): "#000000", ("original", "product"): "#666666", ("refit", "gate"): "#D55E00",
    ("refit", "shift"): "#E69F00", ("place:1", "gate"): "#009E73", ("width:1.25", "gate"): "#0072B2",
}  # fmt: skip
_MARKERS = {"smooth": "s", "cut": "v", "shift": "^", "place": "o", "distill": "D"}


def read_curves(path: str | Path) -> pd.DataFrame:
    """The rows of a CSV of skip_curve.py."""
    return pd.read_csv(path, keep_default_na=False, na_values={name: "" for name in ("live", "read", "score", "kl")})


def critical_sparsities(rows: pd.DataFrame) -> pd.DataFrame:
    """By network, made and rule: `sparsity`, the largest share of zeros that keeps 99 % of the network's own score.

    It lies on the line between the measured shares; of perplexity, 99 % is 1/0.99 of it.
    """
    found = []
    for (network, made, rule), curve in rows[rows.asked != ""].groupby(["network", "made", "rule"]):
        whole = rows[(rows.network == network) & (rows.made == made) & (rows.asked == "")].iloc[0]
        is_loss = whole.metric == "perplexity"
        points = [(1 - whole.live, 1.0)]
        points += [(1 - row.live, whole.score / row.score if is_loss else row.score / whole.score)
                   for row in curve.sort_values("live", ascending=False).itertuples()]  # fmt: skip
        place = next((index for index, (_, kept) in enumerate(points) if kept < KEPT), len(points))
        (zeros, kept), (more, less) = points[place - 1], points[min(place, len(points) - 1)]
        sparsity = zeros if place == len(points) else zeros + (more - zeros) * (kept - KEPT) / (kept - less)
        found.append((network, made, rule, round(sparsity, 4)))
    return pd.DataFrame(found, columns=["network", "made", "rule", "sparsity"])


def draw_curves(rows: pd.DataFrame, path: Path) -> Path:
    """A picture of score against weights read, a panel for each network."""
    networks = list(dict.fromkeys(rows.network))
    figure = new_figure(5.2 * len(networks), 4.4)
    for axis, network in zip(figure.subplots(1, len(networks), squeeze=False)[0], networks, strict=True):
        own = rows[rows.network == network]
        for (made, rule), colour in _COLOURS.items():
            curve = own[(own.made == made) & ((own.rule == rule) | (own.asked == ""))].sort_values("read")
            if len(curve) > 1:
                label = f"{made.removesuffix(':1')}, {_RULES[rule]}"
                axis.plot(curve["read"], curve.score, "o-", markersize=3.5, color=colour, label=label)
        for row in own[own.asked == ""].itertuples():
            form, _, number = row.made.partition(":")
            if form in _MARKERS and number != "1":
                label = row.made.replace("place:", "live=")
                axis.plot(row.read, row.score, _MARKERS[form], color="#882255", markersize=8, label=label)
        metric = own.metric.iloc[0]
        if metric == "perplexity":
            axis.set_yscale("log")
            axis.set_ylim(own.score.min() * 0.95, min(own.score.max(), own.score.min() * 10))
        style(axis, title=network, x="weights of a block that one token reads", y=metric.replace("_", " "))
        axis.legend(fontsize=7, frameon=False)
    return save(figure, path)
