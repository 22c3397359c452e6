"""λ of each layer, before and after training, as one small picture."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

from hf_lgelu.deploy.extras import require

_DOTS_PER_INCH = 120


def draw_hardness(
    path: str | os.PathLike, initial: Mapping[str, float], final: Mapping[str, float], *, final_label: str
) -> Path:
    """Write a PNG with a bar of λ for each site, in the order of the mapping, on a logarithmic axis.

    Args:
        path: of the file, whose folder is made if it is not there.
        initial: {site: λ} before training; may be empty, or lack some.
        final: {site: λ} of the model on the card.
        final_label: what the bars are called in the legend.

    Raises:
        ValueError: `final` is empty.
        ImportError: matplotlib is missing (extra "benchmarks").
    """
    if not final:
        raise ValueError("there is no λ to draw: the model has no λ-GELU")
    figure_class = require("matplotlib.figure", "benchmarks").Figure
    figure = figure_class(figsize=(6, 2.6), layout="constrained")
    axes = figure.add_subplot()
    places = range(1, len(final) + 1)
    axes.bar(places, list(final.values()), color="#4477aa", label=final_label)
    if initial:
        axes.plot(
            places,
            [initial.get(site, math.nan) for site in final],
            "o",
            color="#ee6677",
            markersize=4,
            label="before training",
        )
    axes.set(yscale="log", xlabel="gate, in the order of the network", ylabel="hardness λ")
    axes.set_ylim(0.8, max(final.values()) * 1.6)
    axes.set_xticks(list(places) if len(final) <= 20 else list(places)[:: len(final) // 10])
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The time of writing would make every rendering another file.
    figure.savefig(path, dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return path
