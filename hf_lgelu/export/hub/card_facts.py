"""What a model card says of a network, as plain facts that whoever trained it fills in."""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from hf_lgelu.export.hub.loading import CheckpointFacts
from hf_lgelu.files import whole_file
from hf_lgelu.models.comparison import OutputChange

CARD_FACTS_FILE = "card_facts.json"


@dataclass(frozen=True)
class CardScores:
    """What an evaluation of the λ-GELU network gave, as it is and with ReLU in the place of each gate.

    Args:
        metric: as `evaluate` spells it, e.g. "accuracy".
        score: of the network as it was trained.
        greater_is_better: False for a loss or a perplexity.
        loss: of the network as it was trained.
        relu_score: with the same weights and ReLU; None where that was not measured.
        relu_loss: the loss of that.
        relu_max_logit_change: by how much ReLU moved a logit at most.
        relu_unchanged_predictions: fraction of the rows whose largest logit stayed where it was.
        epoch: after which this was measured, if after one.
        seed: of the run.
        whole_split: the scores are of all rows of a split of the data set `CardData.hub_id`, as the Hub has it. Only
            then the card's header lists them as a result on that data set.

    Example:
        >>> from hf_lgelu import CardScores
        >>> CardScores("accuracy", 0.91, relu_score=0.90, seed=0).greater_is_better
        True
    """

    metric: str
    score: float
    greater_is_better: bool = True
    loss: float | None = None
    relu_score: float | None = None
    relu_loss: float | None = None
    relu_max_logit_change: float | None = None
    relu_unchanged_predictions: float | None = None
    epoch: float | None = None
    seed: int | None = None
    whole_split: bool = False


@dataclass(frozen=True)
class CardData:
    """On what a network was trained and evaluated.

    Args:
        name: of the data set, for a reader.
        eval_rows: rows (texts, images) of the evaluation.
        eval_split: the split they are of, in words.
        train_rows: rows that training saw.
        hub_id: of the data set, if it was the Hub's own that was read.
        limits: each way in which this is not all of the data, in words.
        remarks: sentences on what else sets it apart from the data set of that name.

    Example:
        >>> from hf_lgelu import CardData
        >>> data = CardData("our letters", eval_rows=500, eval_split="test", limits=("half of the letters",))
        >>> data.hub_id is None  # so that no card takes it for a data set of the Hub
        True
    """

    name: str
    eval_rows: int
    eval_split: str
    train_rows: int | None = None
    hub_id: str | None = None
    limits: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class CardFacts:
    """All that a card can say of a network that was trained with λ-GELU; what is left out, the card leaves out.

    Texts are shown as text: what would be markup is escaped, of a local path the last part is shown, and a card that
    would show an access token is refused.

    Args:
        hardness: {gate: λ} at the end of training, of a gate with several the smallest, which bounds its swap
            (`hf_lgelu.models.profile.smallest_by_site`, or `ReLUExport.hardness`).
        gates: {gate: its name in a config} (`hf_lgelu.models.profile.gate_names`), such as "lambda_silu";
            λ-GELU where it is left out.
        mean_hardness: {gate: mean λ} of the gates with several λ (`hf_lgelu.models.profile.mean_of_several`).
        name: the card's title without its last part, which is the form of the export.
        trained_on: completes the sentence "A network of class X, trained on …".
        hardened: its gates were hardened, not only learned.
        earlier_hardness: {stage: {gate: λ}} before, in the order of time; of several λ the mean (`hardness_profile`).
        scores: of its evaluation.
        data: of its training and evaluation.
        recipe: {what: value} of its training.
        seconds: that training took, evaluation included.
        created: when it ended, ISO 8601.
        versions: {package: version} (`hf_lgelu.environment.package_versions`).
        hardware: of `hf_lgelu.environment.hardware`.
        change: what the export did to the outputs on example inputs (`ReLUExport.change`).
        input_note: how its inputs are prepared, in a sentence.
        limits: sentences for the card's list of limits.
        loading_code: {"relu" or "gelu": Python that loads the model in that form without hf_lgelu, "lambda_gelu":
            that does so with it}, where `from_pretrained` of its class does not.
        license: the Hub's short name of it, e.g. "mit"; None says that none was stated.
        base_model: Hub id of the model that it was fine-tuned from.
        checkpoint: how it is loaded; None reads it from the folder's config.json.

    Example:
        >>> from hf_lgelu import CardData, CardFacts, CardScores
        >>> CardFacts(
        ...     hardness={"act": 160.0}, scores=CardScores("accuracy", 0.91, relu_score=0.91),
        ...     data=CardData("our letters", eval_rows=500, eval_split="test", train_rows=4500),
        ... ).data.limits
        ()
    """

    hardness: Mapping[str, float] = field(default_factory=dict)
    name: str = "model"
    trained_on: str = ""
    hardened: bool = False
    earlier_hardness: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    scores: CardScores | None = None
    data: CardData | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    created: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)
    change: OutputChange | None = None
    input_note: str = ""
    limits: tuple[str, ...] = ()
    loading_code: Mapping[str, str] = field(default_factory=dict)
    license: str | None = None
    base_model: str | None = None
    checkpoint: CheckpointFacts | None = None
    gates: Mapping[str, str] = field(default_factory=dict)
    mean_hardness: Mapping[str, float] = field(default_factory=dict)


_NESTED = {"scores": CardScores, "data": CardData, "change": OutputChange, "checkpoint": CheckpointFacts}


def save_card_facts(facts: CardFacts, folder: str | os.PathLike) -> Path:
    """Write the facts beside a checkpoint, as card_facts.json, for the card of its export; returns the file's path.

    Example:
        >>> import tempfile
        >>> from hf_lgelu import CardFacts, load_card_facts, save_card_facts
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save_card_facts(CardFacts({"act": 160.0}), folder)
        ...     load_card_facts(folder).hardness
        {'act': 160.0}
    """
    path = Path(folder) / CARD_FACTS_FILE
    text = json.dumps(dataclasses.asdict(facts), indent=1, ensure_ascii=False, allow_nan=False)
    with whole_file(path, overwrite=True) as new:
        new.write_text(f"{text}\n", encoding="utf-8")
    return path


def load_card_facts(folder: str | os.PathLike) -> CardFacts:
    """The facts that `save_card_facts` wrote, from its folder or the file itself.

    Raises FileNotFoundError, and ValueError for a file that holds something else; it names the field.

    Example:
        >>> import tempfile
        >>> from hf_lgelu import CardFacts, load_card_facts, save_card_facts
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     load_card_facts(save_card_facts(CardFacts({"act": 160.0}, name="letters"), folder)).name
        'letters'
    """
    path = Path(folder)
    path = path / CARD_FACTS_FILE if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path} holds no facts of a card: {error}") from error
    return _built(CardFacts, raw, str(path))


def _built(kind: type, raw: Any, where: str) -> Any:
    """A dataclass from its JSON, field by field."""
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}
    if not isinstance(raw, dict) or raw.keys() - fields.keys():
        known = ", ".join(fields)
        raise ValueError(f"{where} must be an object with the keys {known}, and is {str(raw)[:200]!r}")
    values = {}
    for name, value in raw.items():
        if value is not None and kind is CardFacts and name in _NESTED:
            values[name] = _built(_NESTED[name], value, f"{where}: {name}")
            continue
        values[name] = tuple(value) if isinstance(value, list) else value
        if not _fits(values[name], fields[name].type):
            raise ValueError(f"{where}: {name} must be {fields[name].type}, and is {str(value)[:100]!r}")
    missing = [
        name
        for name, entry in fields.items()
        if name not in values and entry.default is entry.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    return kind(**values)


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a JSON value is of the annotated type, at any depth."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True
    if origin is UnionType:
        return any(_fits(value, kind) for kind in inner)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, inner[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(item, inner[1]) for item in value.values())
    if annotation is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return isinstance(value, annotation) and (annotation is bool or not isinstance(value, bool))
