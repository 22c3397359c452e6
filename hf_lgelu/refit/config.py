"""The rungs of a conversion's ladder, and its options.

Nothing here imports torch: the command reads it before any library loads.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Rung:
    """A step of the ladder that a conversion climbs.

    A rung that `takes_steps` of Adam goes on from the nearest network so far, and is not possible in float16. Other
    rungs make all layers anew. A rung is kept if its network is nearer on the held-out samples, by more than
    `standard_errors`. They are 0 where the held-out samples had no part in making the network.
    """

    effort: str  # its word among the options
    takes_steps: bool = False
    standard_errors: float = 0.0
    on_the_card: str = ""


RUNGS = {
    rung.effort: rung
    for rung in (
        Rung("refit"),
        Rung("place", on_the_card="the maps before the gates got the kink and the slope of each ReLU"),
        Rung(
            "distill",
            takes_steps=True,
            # The rung has chosen the nearest of eight looks on these samples, so their mean falls even without any
            # effect. In 4,000 random walks (19 to 256 samples, normal or lognormal steps) it fell in 80 %. It fell by
            # one standard error in 34 to 40 %, and by two in 4 to 8 %.
            standard_errors=2.0,
            on_the_card="then all weights but embedding tables took steps of Adam towards its outputs",
        ),
    )
}
"""In the order in which they are tried; `hf_lgelu.refit.convert` has the class of each."""

EFFORTS = tuple(RUNGS)

FAR_KL = 0.1
"""Nats of mean KL to the original beyond which a result is called far from the original."""


@dataclass(frozen=True, kw_only=True)
class ConversionConfig:
    """The options of a conversion: of `convert_to_relu`, of `hf-lgelu convert`, and in the report.

    Args:
        effort: The last rung that is tried. refit fits the maps after the gates, place also each ReLU's kink and
            slope, distill the whole network. Lower rungs come first; each is kept only if it is nearer on held-out
            samples. Default: refit.
        width: How many times the hidden units each block gets; it implies effort place. New units carry the part that
            is linear in the inputs, or are copies with kinks of their own. 1.25 gives most for its size. The most is
            six times the units, and one more unit for each input. Blocks that cannot take more stay as they are.
            Refused where no block can, or where the config has no key of the width. Default: 1.
        keep: Names of gates that stay smooth. Most configs have one key for all gates: a saved config then names the
            kept gates, `hf_lgelu.from_pretrained` rebuilds them, and any other load is refused. Default: none.
        max_kl: The distance to the original above which the report warns that the result is far: the mean KL in nats,
            of a detector its distance in scores and boxes, else the relative error. Default: 0.1.
        strict: Refuse a result beyond max_kl, and a result that could not be measured. Default: warn in report and
            card.
        kinds: Which gates are exchanged, rows of `hf_lgelu.networks.sites.KINDS`. Default: `SMOOTH_KINDS`; of calls in
            a forward, `CALLED_KINDS`.
        outputs: Names of the model's outputs that count; the farthest decides. A tensor without a name counts as class
            scores: values (a regression) need one, as in {"values": output}. Default: of a model of transformers the
            outputs that its task reads (logits, boxes, embeddings), of others all but losses, states and caches.
        box_channels: Of a detector whose outputs are raw maps (YOLO), how many leading channels of each map are the
            box: 4, 5 for a box and an objectness (YOLOv5, YOLOX), or 64 for distances as distributions. The others are
            class scores, each read by a sigmoid. Default: the outputs are no raw maps.
        max_samples: The most rows, sequences or images of the data to use. Default: all.
        batch_size: Samples computed at once. Default: 1,024 rows of features, 2,048 tokens or 32 images.
        data_collator: Makes a batch of a list of the dataset's items. Default: numbers, tensors and lists of equal
            length become tensors.
        distill_steps: Steps of effort distill, which it implies, of one batch each. With enough samples, more steps
            bring the network nearer. Default: 200, and 600 if the first quarter takes a tenth of the distance away.
        bf16: Compute the steps of effort distill, which it implies, in bfloat16: quicker if the processor or GPU has
            it. The result is judged and saved in the model's own precision. Default: that precision throughout.

    Raises ValueError for impossible values, and for options that do not go together.

    >>> from hf_lgelu import ConversionConfig
    >>> ConversionConfig(width=1.25).rungs
    ('refit', 'place')
    """

    effort: str | None = None
    width: float = 1.0
    keep: Sequence[str] = ()
    max_kl: float | None = FAR_KL
    strict: bool = False
    kinds: Sequence[str] | None = None
    outputs: Sequence[str] | None = None
    box_channels: int | None = None
    max_samples: int | None = None
    batch_size: int | None = None
    data_collator: Callable[[Any], Any] | None = None
    distill_steps: int | None = None
    bf16: bool = False

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in EFFORTS:
            raise ValueError(f"effort must be one of {', '.join(EFFORTS)}, got {self.effort!r}")
        above_0 = ("max_kl", "box_channels", "max_samples", "batch_size", "distill_steps")
        for name, value in ((name, getattr(self, name)) for name in above_0):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be a number above 0, or None, got {value!r}")
        if not 1 <= self.width < math.inf:
            raise ValueError(f"width is a multiple of the present units, finite and at least 1, got {self.width!r}")
        for name in ("distill_steps", "bf16"):
            if getattr(self, name) and "distill" not in self.rungs:
                raise ValueError(f"`{name}` is for `effort` 'distill', got {self.effort!r}")

    @property
    def rungs(self) -> tuple[str, ...]:
        """The rungs to try in turn, given enough samples. An option of "distill" asks for all."""
        takes_steps = self.distill_steps is not None or self.bf16
        highest = self.effort or (EFFORTS[-1] if takes_steps else EFFORTS[0])
        highest = "place" if self.width > 1 and highest == "refit" else highest
        return EFFORTS[: EFFORTS.index(highest) + 1]

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON values, a function by its name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: getattr(value, "__qualname__", None) or _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return list(value) if isinstance(value, Sequence) else type(value).__name__
