"""What is known of a checkpoint's training: the facts beside it, or those that the user names."""

from pathlib import Path

from torch import nn

from hf_lgelu.activation.gates import DEFAULT_GATE, GATES
from hf_lgelu.cli.named_places import local
from hf_lgelu.export.hub.card_facts import CARD_FACTS_FILE, CardFacts, load_card_facts
from hf_lgelu.models.sites import LEARNED_KINDS, find_sites


def known_facts(model: str, named: str | None) -> CardFacts:
    """Of the file or folder `named`, else of the checkpoint's folder, else none.

    Raises FileNotFoundError where nothing is at `named`, ValueError for a file that holds something else.
    """
    if named is not None:
        return load_card_facts(Path(named).expanduser())
    folder = local(model)
    if folder is not None and (folder / CARD_FACTS_FILE).is_file():
        return load_card_facts(folder)
    return CardFacts()


def gate_of(model: nn.Module) -> str:
    """The row of GATES that the model's gates are; of several, the one whose swap moves a unit most."""
    kinds = {site.kind for site in find_sites(model, LEARNED_KINDS)}
    return max(kinds, key=lambda kind: GATES[kind].swap_error, default=DEFAULT_GATE)
