"""Model cards: what a checkpoint is, from the facts of its training, by huggingface_hub."""

import dataclasses
import os
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.constants import REPOCARD_NAME

from hf_lgelu.activation.gates import DEFAULT_GATE, Gate, check_gate
from hf_lgelu.activation.hardness import swap_error_bound
from hf_lgelu.export.hub import loading
from hf_lgelu.export.hub.card_facts import CardData, CardFacts, CardScores
from hf_lgelu.export.hub.card_text import (
    code,
    made_with,
    pipeline_tag,
    plain,
    require_card_names,
    require_no_token,
    shown,
)
from hf_lgelu.export.hub.hardness_figure import draw_hardness
from hf_lgelu.export.hub.hub_id import is_hub_id
from hf_lgelu.export.hub.loading import CheckpointFacts
from hf_lgelu.files import whole_file
from hf_lgelu.formats import percent, score

FIGURE_FILE = "hardness.png"
TEMPLATE = Path(__file__).with_name("model_card_template.md")

_EXPORTS = {
    "relu": "It was trained with {learned}, a {plain} whose gates learn how hard they are, and has ReLU in the place "
    "of each gate, with the weights as they were.",
    "gelu": "It was trained with {learned}, a {plain} whose gates learn how hard they are; λ is folded into the "
    "weights, so that plain {plain} computes the same function.",
    "lambda_gelu": "Its activation is {learned}, a {plain} whose gates learn how hard they are.",
}


def render_card(
    facts: CardFacts, *, export: str = "relu", figure: str | None = None, repo_id: str | None = None
) -> ModelCard:
    """The card of a network that was trained with λ-GELU.

    Args:
        facts: of the network; `hardness` and `checkpoint` must be there.
        export: the form it is in: "relu", "gelu" (λ folded into the weights) or "lambda_gelu".
        figure: path of the picture of λ, relative to the card.
        repo_id: on the Hub, "user/name".

    Raises:
        ValueError: an unknown `export`, facts without hardness or checkpoint, gates that are none, a
            licence or repository that is not named as the Hub names it, or the card would show an access token.
    """
    if not isinstance(facts, CardFacts):
        raise TypeError(f"facts must be CardFacts, got {type(facts).__name__}")
    if export not in _EXPORTS:
        raise ValueError(f"unknown export {export!r}; accepted: {', '.join(_EXPORTS)}")
    if not facts.hardness or facts.checkpoint is None:
        raise ValueError(
            "a card describes a network that was trained with λ-GELU: its facts need hardness (the report of "
            "export_relu, or smallest_by_site) and checkpoint (write_card reads it from the folder)"
        )
    if any("```" in lines for lines in facts.loading_code.values()):
        raise ValueError("loading_code must be Python alone: ``` would end its block on the card")
    require_card_names(repo_id, facts.license)
    where = repo_id or "FOLDER"
    checkpoint = facts.checkpoint
    card = ModelCard.from_template(
        _card_data(facts, checkpoint, export, repo_id),
        template_path=str(TEMPLATE),
        title=plain(_name(facts, export, repo_id)),
        summary=_summary(facts, checkpoint, export),
        results=_results(facts, facts.scores, facts.data, export) if facts.scores and facts.data else "",
        substitution=_substitution(facts, export),
        figure=figure,
        gate_note=_gate_note(facts),
        hardness=_hardness_table(facts),
        recipe=_recipe(facts),
        plain_code=_plain_code(facts, checkpoint, export, where),
        carried_code=loading.with_carried_code(where) if checkpoint.own_code and export != "lambda_gelu" else "",
        lgelu_code=_lgelu_code(facts, checkpoint, export, where),
        input_note=plain(facts.input_note),
        limits=_limits(facts, export),
        licence=f"`{facts.license}`" if facts.license else "None was stated by who made this model: ask before use.",
    )  # fmt: skip
    require_no_token(card)
    return card


def write_card(
    folder: str | os.PathLike,
    facts: CardFacts,
    *,
    export: str = "relu",
    repo_id: str | None = None,
    name: str = REPOCARD_NAME,
    figure: str = FIGURE_FILE,
) -> Path:
    """Write a model's card and its picture of λ into `folder`, and return the card's path.

    Both are complete or not there, and a link in their place is replaced, not followed.

    Args:
        folder: of the model, with its config.json; any folder if `facts.checkpoint` is given.
        facts: of the network. `hardness` must be there.
        export: the form it is in: "relu", "gelu" (λ folded into the weights) or "lambda_gelu".
        repo_id: on the Hub, "user/name".
        name: of the card's file.
        figure: of the picture's file, relative to `folder`.

    Raises:
        ValueError: see `render_card`; or config.json names no class, or λ-gates where `export` says that they are gone.
        FileNotFoundError: no config.json.

    Example:
        >>> import tempfile
        >>> from hf_lgelu import CardFacts, MLPConfig, MLPForClassification, anneal_hardness, export_relu, write_card
        >>> model = MLPForClassification(MLPConfig(num_features=3, hidden_size=4, num_hidden_layers=1))
        >>> anneal_hardness(model, 1.0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_relu(model, f"{folder}/relu")
        ...     facts = CardFacts(report.hardness, name="letters", change=report.change, gates=report.gates)
        ...     write_card(f"{folder}/relu", facts).name
        'README.md'
    """
    folder = Path(folder)
    if isinstance(facts, CardFacts) and facts.checkpoint is None:
        facts = dataclasses.replace(facts, checkpoint=loading.facts_of_folder(folder))
    gates = loading.gates_of_folder(folder)
    if gates and export != "lambda_gelu":
        raise ValueError(
            f"{folder}/config.json says {', '.join(gates)}, and a card of export={export!r} would say that these gates "
            "are gone; give export='lambda_gelu', or the folder that export_relu or export_gelu saved"
        )
    card = render_card(facts, export=export, figure=figure, repo_id=repo_id)
    with whole_file(folder / figure, overwrite=True) as new:
        draw_hardness(new, facts.earlier_hardness, facts.hardness, facts.mean_hardness)
    with whole_file(folder / name, overwrite=True) as new:
        new.write_text(f"{str(card).rstrip()}\n", encoding="utf-8")
    return folder / name


def _card_data(facts: CardFacts, checkpoint: CheckpointFacts, export: str, repo_id: str | None) -> ModelCardData:
    """The YAML header: task, data set, metric and result of the network in that form."""
    hub_id = facts.data.hub_id if facts.data and is_hub_id(facts.data.hub_id) else None
    data = ModelCardData(
        license=facts.license,
        library_name=checkpoint.library,
        pipeline_tag=pipeline_tag(checkpoint.model_class),
        tags=["lambda-gelu", *(["relu", "relufication"] if export == "relu" else [])],
        base_model=facts.base_model if is_hub_id(facts.base_model) else None,
        datasets=[hub_id] if hub_id else None,
    )
    scores = facts.scores
    if scores is None:
        return data
    data.metrics = [scores.metric]
    value = scores.relu_score if export == "relu" else scores.score
    # A ReLU model that was not evaluated has no result, least of all the smooth one's; nor has one that was evaluated
    # on other rows than those of the data set that the Hub has.
    if facts.data is not None and hub_id and scores.whole_split and value is not None:
        data.model_name = _name(facts, export, repo_id)
        data.eval_results = [
            EvalResult(
                task_type=data.pipeline_tag or "other", dataset_type=hub_id, dataset_name=hub_id,
                dataset_split=facts.data.eval_split, metric_type=scores.metric,
                metric_name=scores.metric if scores.epoch is None else f"{scores.metric}, last epoch",
                metric_value=float(score(scores.metric, value)),
            )
        ]  # fmt: skip
    return data


def _name(facts: CardFacts, export: str, repo_id: str | None) -> str:
    return repo_id.rpartition("/")[2] if repo_id else f"{facts.name}-{export.replace('_', '-')}"


def _summary(facts: CardFacts, checkpoint: CheckpointFacts, export: str) -> str:
    softest, hardest = min(facts.hardness.values()), max(facts.hardness.values())
    span = f"λ = {softest:.4g}" if f"{softest:.4g}" == f"{hardest:.4g}" else f"λ from {softest:.4g} to {hardest:.4g}"
    where = f", trained on {plain(facts.trained_on)}" if facts.trained_on else ""
    span += " (the smallest λ of each gate)" if facts.mean_hardness else ""
    ended = f"Its {len(facts.hardness)} gates ended at {span}{' after hardening' if facts.hardened else ''}."
    learned, unlearned = _gate_labels(facts)
    what = _EXPORTS[export].format(learned=learned, plain=unlearned)
    return f"A network of class {code(checkpoint.model_class)}{where}. {what} {ended}"


def _results(facts: CardFacts, scores: CardScores, data: CardData, export: str) -> str:
    """The scores as trained and with ReLU substituted, and on what they were measured."""
    trained, swapped = ("", " (this model)") if export == "relu" else (" (this model)", "")
    rows = [(f"{_gate_labels(facts)[0]}, as trained{trained}", score(scores.metric, scores.score), scores.loss)]
    if scores.relu_score is not None:
        rows.append((f"ReLU, the same weights{swapped}", score(scores.metric, scores.relu_score), scores.relu_loss))
    when = "" if scores.epoch is None else f" after the last epoch ({scores.epoch:g}), which is the one saved,"
    seed = "" if scores.seed is None else f" One run with seed {scores.seed}."
    lines = [
        f"| network | {plain(scores.metric)} ({'higher' if scores.greater_is_better else 'lower'} is better) | loss |",
        "|---|---|---|",
        *(f"| {name} | {value} | {'–' if loss is None else f'{loss:.4f}'} |" for name, value, loss in rows),
        "",
        f"Measured{when} on {data.eval_rows:,} samples of {plain(shown(data.name))}, split {plain(data.eval_split)}."
        f"{seed}",
    ]
    return "\n".join(lines)


def _substitution(facts: CardFacts, export: str) -> str:
    """What the swap did to the logits of the evaluation, and the export to the outputs on its example inputs."""
    parts = []
    scores = facts.scores
    if scores and scores.relu_max_logit_change is not None and scores.relu_unchanged_predictions is not None:
        parts.append(
            "On the samples of the table above, the largest change of a logit was "
            f"{scores.relu_max_logit_change:.2g}, and {percent(scores.relu_unchanged_predictions)} of the predictions "
            "(the largest logit) stayed the same."
        )
    after = {"relu": "after the swap to ReLU", "gelu": "after λ was folded into the weights"}.get(export)
    if facts.change is not None and after is not None:  # a λ-GELU network has gone through no export
        parts.append(f"On the example inputs of the export, {after}: {facts.change}.")
    return "\n\n".join(parts)


def _row(facts: CardFacts, site: str) -> Gate:
    """Of a λ-gate. Raises ValueError for a name that no gate has."""
    return check_gate(facts.gates.get(site, DEFAULT_GATE))


def _gate_rows(facts: CardFacts) -> list[Gate]:
    """Of its λ-gates, each once."""
    return list({row.name: row for row in (_row(facts, site) for site in facts.hardness)}.values())


def _swap_bound(facts: CardFacts, site: str) -> float:
    """κ/λ of a gate, by its smallest λ."""
    return swap_error_bound(facts.hardness[site], _row(facts, site).name)


def _gate_note(facts: CardFacts) -> str:
    """What its gates are, and what their swap can change."""
    forms = "; ".join(f"{row.formula}: λ = 1 is {row.plain_label}, and λ → ∞ is ReLU" for row in _gate_rows(facts))
    largest = max(_row(facts, site).swap_error for site in facts.hardness)
    note = (
        f"A gate is {forms}. Putting ReLU in its place changes what one unit gives by at most κ/λ, κ = {largest:.5f}."
    )
    if facts.mean_hardness:
        note += " Of a gate with several λ the smallest bounds that."
    return note


def _gate_labels(facts: CardFacts) -> tuple[str, str]:
    """The names of its λ-gates, and of what they are at λ = 1."""
    rows = _gate_rows(facts)
    return " and ".join(row.label for row in rows), " or ".join(row.plain_label for row in rows)


def _hardness_table(facts: CardFacts) -> str:
    """λ of every gate, at the earlier stages and at the end, and the bound of the swap."""
    stages = {label: stage for label, stage in facts.earlier_hardness.items() if stage}
    means = facts.mean_hardness
    final = ("mean λ", "smallest λ") if means else ("λ",)
    titles = ("gate", *(f"{final[0]} {plain(label)}" for label in stages), *final, "κ/λ")
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for site, value in facts.hardness.items():
        before = [f"{stage[site]:.4f}" if site in stage else "–" for stage in stages.values()]
        mean = [f"{means.get(site, value):.4g}"] if means else []
        cells = (code(site or "model"), *before, *mean, f"{value:.4g}", f"{_swap_bound(facts, site):.2g}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _recipe(facts: CardFacts) -> str:
    """How the network was trained, on how much of the data, on what, with which versions."""
    rows = [f"| {plain(label)} | {plain(shown(value))} |" for label, value in facts.recipe.items()]
    parts = ["\n".join(["| | |", "|---|---|", *rows])] if rows else []
    if facts.data is not None and facts.data.train_rows is not None:
        parts.append(_data_note(facts.data))
    if facts.seconds is not None or facts.hardware or facts.versions:
        parts.append(_provenance(facts))
    return "\n\n".join(parts)


def _data_note(data: CardData) -> str:
    """How much of the data set the training and its evaluation saw."""
    text = f"Trained on {data.train_rows:,} samples of {plain(shown(data.name))}, evaluated on {data.eval_rows:,}"
    if data.limits:
        text += f". This is not all of the data: {'; '.join(plain(limit) for limit in data.limits)}."
    else:
        text += "." if data.remarks else "; no limit was set on either."
    return " ".join([text, *(plain(remark) for remark in data.remarks)])


def _provenance(facts: CardFacts) -> str:
    """When, where and with what the network was trained."""
    parts = [] if facts.seconds is None else [f"took {facts.seconds:,.0f} s, evaluation included,"]
    parts += [] if facts.created is None else [f"ended on {plain(facts.created[:10])}"]
    start = f"The run {' and '.join(parts)}".rstrip(",") if parts else "Made"
    with_what = made_with(facts.hardware, facts.versions)
    return f"{start}{', ' if facts.hardware else '. '}{with_what}" if with_what else f"{start}."


def _plain_code(facts: CardFacts, checkpoint: CheckpointFacts, export: str, where: str) -> str:
    if export == "lambda_gelu":
        return ""
    return facts.loading_code.get(export, "").strip() or loading.without_hf_lgelu(
        checkpoint, where, activation=export, gate=_gate_rows(facts)[0].name
    )


def _lgelu_code(facts: CardFacts, checkpoint: CheckpointFacts, export: str, where: str) -> str:
    """ "" for what says how it is loaded without, as `from_pretrained` then needs more than this package."""
    own = facts.loading_code.get(export, "").strip()
    if own:
        return own if export == "lambda_gelu" else ""
    return loading.with_hf_lgelu(checkpoint.model_class, where)


def _limits(facts: CardFacts, export: str) -> str:
    lines = [plain(limit) for limit in facts.limits]
    if export == "relu":
        lines.append("Only the gates are ReLU: softmax, normalization and other parts are what they were.")
        lines.append("Zeros of ReLU are no speed-up by themselves; none is claimed.")
    else:
        lines.append("The gates are smooth: what needs a piecewise linear network does not apply to this one.")
    if facts.data is None:
        lines.append("There is no record of its training: what it was trained on is not known here.")
    return "\n".join(f"- {line}" for line in lines)
