"""The figures of the training runs, one specification each; matplotlib is imported when one is drawn."""

from lgelu_lab.report.drawing import FigureSpec, new_figure, plain, style
from lgelu_lab.report.frames import ReportData, mean_path, of_label
from lgelu_lab.report.run_tables import LEARNED_LABELS, profile_runs

Drawn = "tuple[Figure, str] | None"


def draw_hardness(data: ReportData, benchmark: str) -> Drawn:
    """λ over depth, a line per epoch; a column per init mode as learned."""
    from matplotlib import colormaps

    runs = of_label(profile_runs(data), benchmark)
    found = {label: mean_path(runs[label]) for label in LEARNED_LABELS if label in runs}
    if not found:
        return None
    figure = new_figure(max(5.2, 1.4 + 2.6 * len(found)), 3.9)
    axes = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for axis, (label, path) in zip(axes, found.items(), strict=True):
        for epoch, values in path.iterrows():
            colour = colormaps["viridis"](0.82 * epoch / path.index.max())  # the brightest are lost on white
            axis.plot(range(1, len(values) + 1), list(values), color=colour)
        axis.set_yscale("log")
        style(axis, title=label, x="layer, input to output", y="" if axis is not axes[0] else "hardness λ")
    figure.suptitle(f"{plain(benchmark)}: learned hardness of every layer", fontsize=11.5)
    caption = (
        "λ over depth, mean over the seeds: a line per epoch, from dark (before training) to light (last). λ = 1 is "
        "GELU."
    )
    return figure, caption


FIGURES: dict[str, FigureSpec] = {
    "hardness": FigureSpec("Hardness over depth and epochs, {}", draw_hardness),
}
