"""`hf-lgelu profile`: the hardness λ of every gate."""

from hf_lgelu.cli.arguments import ProfileArguments
from hf_lgelu.cli.checkpoint import read_checkpoint, require_hardness
from hf_lgelu.models.hardening import is_hardened, mean_of_several, smallest_by_site, swap_errors


def profile(arguments: ProfileArguments) -> None:
    """Print λ of each gate, and κ/λ, the most by which ReLU in its place changes a unit.

    For gates with several λ, the mean and the smallest λ are printed. Raises ValueError for a checkpoint without
    λ-GELU, and the errors of loading.
    """
    given = read_checkpoint(arguments.model, **arguments.reading)
    require_hardness(given)
    hardness, means = smallest_by_site(given.model), mean_of_several(given.model)
    errors = swap_errors(given.model, hardness)
    width = max(4, *map(len, hardness))
    titles = ("mean λ", "smallest λ") if means else ("λ",)
    print(f"{'gate':{width}}  {'  '.join(f'{title:>10}' for title in titles)}  {'κ/λ':>8}")
    for gate, value in hardness.items():
        numbers = (means.get(gate, value), value) if means else (value,)
        shown = "  ".join(f"{number:10.4g}" for number in numbers)
        print(f"{gate:{width}}  {shown}  {errors[gate]:8.2g}")
    print(f"hardened: {'yes' if is_hardened(given.model) else 'no'}")
