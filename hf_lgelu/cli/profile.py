"""`hf-lgelu profile`: the hardness λ of every gate, as text and as a picture."""

from pathlib import Path

from hf_lgelu.cli.arguments import ProfileArguments
from hf_lgelu.cli.checkpoint import read_checkpoint, require_hardness
from hf_lgelu.export.hub.card import draw_hardness
from hf_lgelu.files import whole_file
from hf_lgelu.models.hardening import is_hardened, mean_of_several, smallest_by_site, swap_errors


def profile(arguments: ProfileArguments) -> None:
    """Print λ of each gate with κ/λ, the most that ReLU in its place changes one unit; draw λ where --figure says.

    Of gates with several λ, the mean stands before the smallest. Raises ValueError for a checkpoint without λ-GELU and
    a picture that is no PNG, and what loads and writes.
    """
    if arguments.figure is not None and Path(arguments.figure).suffix.lower() != ".png":
        raise ValueError(f"--figure {arguments.figure}: a PNG is written; give it a name that ends in .png")
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
    if arguments.figure is not None:
        path = Path(arguments.figure)
        with whole_file(path, overwrite=arguments.overwrite) as new:
            draw_hardness(new, {}, hardness, means)
        print(f"Picture: {path}")
