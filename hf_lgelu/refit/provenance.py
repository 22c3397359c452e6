"""From what, with what and when a converted network was made: what its report and card say beside the numbers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Provenance:
    """How a converted network came about.

    Args:
        model: Hub id of the original, or the last part of its folder's path: a card names no local paths.
        model_is_on_hub: whether that is a Hub id.
        calibration: the data set of the calibration inputs, in words.
        samples: inputs taken from it (rows, sequences, images).
        seed: of their choice; nothing else in a conversion is random.
        evaluation: the second set, in words; None without one.
        evaluation_source: Hub id of its data set, if it is on the Hub.
        created: UTC, ISO 8601.
        versions: {package: version}.
        hardware: of `hf_lgelu.environment.hardware`.
    """

    model: str
    model_is_on_hub: bool
    calibration: str
    samples: int
    seed: int
    evaluation: str | None
    evaluation_source: str | None
    created: str
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)
