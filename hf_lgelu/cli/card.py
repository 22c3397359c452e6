"""`hf-lgelu card`: the model card of a λ-GELU checkpoint, or of what `harden` made of one."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from huggingface_hub.constants import REPOCARD_NAME

from hf_lgelu.cli.given_checkpoint import GivenCheckpoint, read_checkpoint
from hf_lgelu.cli.known_facts import known_facts
from hf_lgelu.cli.named_places import local
from hf_lgelu.export.hub.card import write_card
from hf_lgelu.export.hub.conversion_card import original_licence
from hf_lgelu.models.profile import gate_rows, hardness_profile
from hf_lgelu.models.sites import LEARNED_KINDS, find_sites


def card(arguments: Namespace) -> Path:
    """Write README.md and the picture of λ into the checkpoint's folder; returns the card's path.

    Raises:
        NotADirectoryError: the checkpoint is no folder here.
        FileExistsError: there is a card, and --overwrite was not given.
        ValueError: nothing is known of λ, neither from the checkpoint nor from facts.
    """
    folder = local(arguments.model)
    if folder is None or not folder.is_dir():
        raise NotADirectoryError(f"there is no folder {arguments.model}: a card is written beside a checkpoint")
    if (folder / REPOCARD_NAME).exists() and not arguments.overwrite:
        raise FileExistsError(f"{folder / REPOCARD_NAME} is there already; replace it with --overwrite")
    given = read_checkpoint(arguments.model)
    facts, export = known_facts(given.name, arguments.facts), _form(given)
    if export == "lambda_gelu":
        facts = replace(facts, hardness=hardness_profile(given.model), gates=gate_rows(given.model))
    if not facts.hardness:
        raise ValueError(
            f"{given.name} has no λ-GELU any more, and its card would tell the hardness its gates had: give --facts "
            "of the checkpoint that it was made of (hf_lgelu.save_card_facts)"
        )
    licence = arguments.license or facts.license or original_licence(given.name)
    facts = replace(facts, license=licence, checkpoint=None)
    path = write_card(folder, facts, export=export, repo_id=arguments.repo_id)
    print(f"Model card: {path}")
    return path


def _form(given: GivenCheckpoint) -> str:
    """The name of its activations, as the card's writer knows the forms."""
    kinds = {site.kind for site in find_sites(given.model)}
    if kinds & set(LEARNED_KINDS):
        return "lambda_gelu"
    return "gelu" if kinds & {"gelu", "silu"} else "relu"
