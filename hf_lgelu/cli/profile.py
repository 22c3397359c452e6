"""`hf-lgelu profile`: the hardness λ of every gate."""

import json
from collections.abc import Mapping
from pathlib import Path

from hf_lgelu.cli.arguments import ProfileArguments
from hf_lgelu.cli.checkpoint import read_checkpoint
from hf_lgelu.cli.command import say
from hf_lgelu.files import save_picture
from hf_lgelu.models.hardening import gates_by_site, is_hardened
from hf_lgelu.networks.sites import require_lambda_gelu


def profile(arguments: ProfileArguments) -> None:
    """Print λ of each gate, and κ/λ, the most by which ReLU in its place changes a unit.

    Where hardening has moved λ, its learned value is printed, too. `--plot` draws λ over the epochs from the
    checkpoint's trainer_state.json. Raises ValueError for a checkpoint without λ-GELU, FileNotFoundError or ValueError
    for a plot without a history of λ, and the errors of loading.
    """
    history = Path(arguments.model) / "trainer_state.json"
    if arguments.plot and not history.is_file():
        raise ValueError(f"--plot needs a checkpoint of Trainer, as runs/checkpoint-104: there is no {history}")
    checkpoint = read_checkpoint(arguments.model, **arguments.reading)
    require_lambda_gelu(checkpoint.model)
    gates = gates_by_site(checkpoint.model)
    moved, width = any(gate.is_moved for gate in gates.values()), max(4, *map(len, gates))
    say(f"{'gate':{width}}  {'λ':>10}  {'κ/λ':>8}{'   learned λ' if moved else ''}")
    for name, gate in gates.items():
        learned = f"  {gate.learned:10.4g}" if moved else ""
        say(f"{name:{width}}  {gate.hardness:10.4g}  {gate.swap_error:8.2g}{learned}")
    say(f"hardened: {'yes' if is_hardened(checkpoint.model) else 'no'}")
    if arguments.plot:
        plot_hardness(history, {name: gate.hardness for name, gate in gates.items()}, arguments.plot)
        say(f"λ over the epochs: {arguments.plot}")


def plot_hardness(state_file: Path, hardness: Mapping[str, float], picture: str) -> None:
    """Draw λ of each gate over the epochs: the history in a checkpoint's trainer_state.json, and its present λ."""
    from matplotlib.figure import Figure  # slow to import, and only a plot needs it

    state = json.loads(state_file.read_text(encoding="utf-8"))
    rows = [row for row in state["log_history"] if "hardness/mean" in row]
    if not rows:
        raise ValueError(
            f"{state_file} has λ of no epoch: train with harden=True or HardeningCallback, and give a checkpoint from "
            "after the first epoch"
        )
    # Trainer saves the last step before its epoch ends, and with it the history.
    rows.append({"epoch": state["epoch"], **{f"hardness/{gate}": value for gate, value in hardness.items()}})
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for gate in hardness:
        axes.plot([row["epoch"] for row in rows], [row[f"hardness/{gate}"] for row in rows], marker=".", label=gate)
    axes.set(xlabel="epoch", ylabel="λ", yscale="log")
    axes.legend(fontsize="small")
    save_picture(figure, picture, 150)
