"""What is known of a checkpoint's training: the facts beside it, or those that the user names."""

from pathlib import Path

from hf_lgelu.cli.named_places import local
from hf_lgelu.export.hub.card_facts import CARD_FACTS_FILE, CardFacts, load_card_facts


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
