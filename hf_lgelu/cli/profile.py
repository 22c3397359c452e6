"""`hf-lgelu profile`: the hardness λ of every gate."""

import json
from pathlib import Path

from hf_lgelu.cli.arguments import ProfileArguments
from hf_lgelu.cli.checkpoint import read_checkpoint, require_hardness
from hf_lgelu.models.hardening import is_hardened, learned_hardness, mean_of_several, smallest_by_site, swap_errors


def profile(arguments: ProfileArguments) -> None:
    """Print λ of each gate, and κ/λ, the most by which ReLU in its place changes a unit.

    For gates with several λ, the mean and the smallest λ are printed. Where hardening has moved λ, its learned value is
    printed, too. `--plot` draws λ over the epochs from the checkpoint's trainer_state.json. Raises ValueError for a
    checkpoint without λ-GELU, FileNotFoundError or ValueError for a plot without a history of λ, and the errors of
    loading.
    """
    given = read_checkpoint(arguments.model, **arguments.reading)
    require_hardness(given)
    hardness, means = smallest_by_site(given.model), mean_of_several(given.model)
    errors = swap_errors(given.model, hardness)
    learned = learned_hardness(given.model)
    moved = any(abs(learned[gate] - means.get(gate, value)) > 1e-4 * value for gate, value in hardness.items())
    width = max(4, *map(len, hardness))
    titles = ("mean λ", "smallest λ") if means else ("λ",)
    last = "   learned λ" if moved else ""
    print(f"{'gate':{width}}  {'  '.join(f'{title:>10}' for title in titles)}  {'κ/λ':>8}{last}")
    for gate, value in hardness.items():
        numbers = (means.get(gate, value), value) if means else (value,)
        shown = "  ".join(f"{number:10.4g}" for number in numbers)
        print(f"{gate:{width}}  {shown}  {errors[gate]:8.2g}{f'  {learned[gate]:10.4g}' if moved else ''}")
    print(f"hardened: {'yes' if is_hardened(given.model) else 'no'}")
    if arguments.plot:
        plot_hardness(Path(arguments.model) / "trainer_state.json", arguments.plot)
        print(f"λ over the epochs: {arguments.plot}")


def plot_hardness(state_file: Path, picture: str) -> None:
    """Draw λ of each gate over the epochs, from the history in a checkpoint's trainer_state.json."""
    from matplotlib.figure import Figure  # slow to import, and only a plot needs it

    history = json.loads(state_file.read_text(encoding="utf-8"))["log_history"]
    rows = [row for row in history if "hardness/mean" in row]
    if not rows:
        raise ValueError(f"{state_file} has no λ: train with harden=True or HardeningCallback")
    names = [name for name in rows[0] if name.startswith("hardness/") and name != "hardness/mean"]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in names:
        axes.plot([row["epoch"] for row in rows], [row[name] for row in rows], marker=".", label=name[9:])
    axes.set(xlabel="epoch", ylabel="λ", yscale="log")
    axes.legend(fontsize="small")
    figure.savefig(picture, dpi=150)
