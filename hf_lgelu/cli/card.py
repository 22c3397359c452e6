"""`hf-lgelu card`: the model card of a λ-GELU checkpoint, or of what `harden` made of one."""

from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

from huggingface_hub.constants import REPOCARD_NAME

from hf_lgelu.cli.given_checkpoint import GivenCheckpoint, read_checkpoint
from hf_lgelu.cli.known_facts import known_facts, with_hardness_of
from hf_lgelu.cli.named_places import local
from hf_lgelu.export.hub.card import write_card
from hf_lgelu.export.hub.card_facts import CardFacts
from hf_lgelu.export.hub.conversion_card import original_licence
from hf_lgelu.models.sites import LEARNED_KINDS, SELF_GATE_KINDS, find_relu_sites, find_sites, is_activation


def card(arguments: Namespace) -> Path:
    """Write README.md and the picture of λ into the checkpoint's folder; returns the card's path.

    Raises:
        NotADirectoryError: the checkpoint is no folder here.
        FileExistsError: there is a card, and --overwrite was not given.
        ValueError: nothing is known of λ, neither from the checkpoint nor from facts, or the checkpoint has other
            activations than an export of a λ-GELU network.
    """
    folder = local(arguments.model)
    if folder is None or not folder.is_dir():
        raise NotADirectoryError(f"there is no folder {arguments.model}: a card is written beside a checkpoint")
    if (folder / REPOCARD_NAME).exists() and not arguments.overwrite:
        raise FileExistsError(f"{folder / REPOCARD_NAME} is there already; replace it with --overwrite")
    given = read_checkpoint(arguments.model)
    facts = known_facts(given.name, arguments.facts)
    export = form_of(given, facts)
    if export == "lambda_gelu":
        facts = with_hardness_of(facts, given.model)
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


def form_of(given: GivenCheckpoint, facts: CardFacts) -> str:
    """What became of its λ-gates, as the card's writer knows the forms; ValueError where the modules say none."""
    model = given.model
    smooth = {site.name: site.kind for site in find_sites(model)}
    if set(smooth.values()) & set(LEARNED_KINDS):
        return "lambda_gelu"
    relus = {site.name for site in find_relu_sites(model) if site.kind == "relu"}
    plain = {name for name, kind in smooth.items() if kind in SELF_GATE_KINDS}
    activations = {
        name: type(module).__name__
        for name, module in model.named_modules(remove_duplicate=False)
        if is_activation(module)
    }
    were_gates = facts.hardness.keys() & activations  # a network has activations that never were λ-gates, too
    if facts.hardness and not were_gates:
        raise ValueError(
            f"the facts are of another network: they tell the hardness of {', '.join(list(facts.hardness)[:4])}, and "
            f"{given.name} has no activation of that name"
        )
    if relus and not smooth and were_gates <= relus:
        return "relu"
    if plain and were_gates <= plain:
        return "gelu"
    found = " and ".join(f"{count} {name}" for name, count in Counter(activations.values()).items())
    raise ValueError(
        f"{given.name} has no λ-gate, and its activations ({found or 'no module of it is one'}) are not those that "
        "`hf-lgelu harden` puts in the place of λ-gates. A card is written for a λ-GELU checkpoint, for one with ReLU "
        "in the place of each gate and no smooth gate left, and for one with GELU or SiLU there and λ in the weights; "
        "`hf-lgelu convert` writes the card of a network that it makes a ReLU network of"
    )
