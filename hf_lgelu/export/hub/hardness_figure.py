"""λ of each gate before, during and after training, as one small picture."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

from hf_lgelu.files import save_picture

_DOTS_PER_INCH = 120
_STAGES = (("o", "#ee6677"), ("D", "#1b4f7a"))


def draw_hardness(
    path: str | os.PathLike,
    earlier: Mapping[str, Mapping[str, float]],
    final: Mapping[str, float],
    means: Mapping[str, float],
) -> Path:
    """Write a PNG with a bar of λ for each gate, in the order of the mapping, on a logarithmic axis.

    Args:
        path: of the file, whose folder is made if it is not there.
        earlier: {stage: {gate: λ}}, drawn as points over the bars; a stage may be empty, or lack some gates.
        final: {gate: λ} of the model on the card.
        means: {gate: mean λ} of the gates with several λ, drawn in the place of those in `final`.

    Raises:
        ValueError: `final` is empty.
    """
    if not final:
        raise ValueError("there is no λ to draw: the model has no λ-GELU")
    from matplotlib.figure import Figure  # not with the package: it takes half a second

    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.add_subplot()
    places = range(1, len(final) + 1)
    shown = [means.get(gate, value) for gate, value in final.items()]
    axes.bar(places, shown, color="#a9c4de", label="trained")
    for (label, stage), (marker, color) in zip(earlier.items(), _STAGES, strict=False):
        if stage:
            values = [stage.get(gate, math.nan) for gate in final]
            axes.plot(places, values, marker, color=color, markersize=5, label=label)
    height = "mean hardness λ" if means else "hardness λ"
    axes.set(yscale="log", xlabel="gate, in the order of the network", ylabel=height)
    axes.set_ylim(0.8, max(shown) * 1.6)
    axes.set_xticks(list(places) if len(final) <= 20 else list(places)[:: len(final) // 10])
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return save_picture(figure, path, _DOTS_PER_INCH)
