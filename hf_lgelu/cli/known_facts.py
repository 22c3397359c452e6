"""What is known of a checkpoint's training: the facts beside it, or those that the user names."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from hf_lgelu.cli.named_places import local
from hf_lgelu.export.hub.card_facts import CARD_FACTS_FILE, CardFacts, load_card_facts
from hf_lgelu.models.profile import gate_names, mean_of_several, smallest_by_site


def known_facts(model: str, named: str | None) -> CardFacts:
    """Of the file or folder `named`, else of the checkpoint's folder, else its name alone.

    Raises FileNotFoundError where nothing is at `named`, ValueError for a file that holds something else.
    """
    if named is not None:
        place = Path(named).expanduser()
        if not place.exists() or (place.is_dir() and not (place / CARD_FACTS_FILE).is_file()):
            raise FileNotFoundError(
                f"there are no facts at {named}: hf_lgelu.save_card_facts writes them, as {CARD_FACTS_FILE} of a folder"
            )
        return load_card_facts(place)
    folder = local(model)
    if folder is not None and (folder / CARD_FACTS_FILE).is_file():
        return load_card_facts(folder)
    return CardFacts(name=model.rpartition("/")[2] if folder is None else folder.resolve().name)


def with_hardness_of(facts: CardFacts, model: nn.Module) -> CardFacts:
    """The facts, with the λ-gates that the model has. Raises ValueError for a model without λ-GELU."""
    means = mean_of_several(model)
    return replace(facts, hardness=smallest_by_site(model), mean_hardness=means, gates=gate_names(model))
