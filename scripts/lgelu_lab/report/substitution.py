"""One evaluation of a run as it is and with ReLU in the gates' place, whatever way ReLU came there."""

from dataclasses import dataclass

from lgelu_lab.report.configurations import is_relufied, smallest_hardness
from lgelu_lab.report.paper import PAPER_TARGET_HARDNESS
from lgelu_lab.studies.records import EpochRecord, RunRecord

EVALUATIONS = {
    "best": "at each run's best epoch as trained (the paper's choice)",
    "best_substituted": "at each run's best epoch with ReLU in place",
    "last": "in the last epoch",
}
"""Which evaluation of each run is looked at."""


@dataclass(frozen=True)
class SubstitutionScores:
    """One evaluation of one run: the score as it is and that of the ReLU network with its weights.

    `early`: the gates were not hard yet, or ReLU not in yet. `is_relu`: the network has no smooth gate.
    """

    epoch: EpochRecord
    as_is: float
    relu: float
    early: bool
    is_relu: bool

    @property
    def change(self) -> float:
        """Score with ReLU minus score as it is; 0 for what is a ReLU network."""
        return self.relu - self.as_is

    @property
    def max_logit_change(self) -> float | None:
        """Largest change of a logit; 0 for what is a ReLU network, None where it was not measured."""
        return 0.0 if self.is_relu else self.epoch.relu_max_logit_change

    @property
    def unchanged_predictions(self) -> float | None:
        """Share of equal predictions; 1 for what is a ReLU network, None where nothing is predicted."""
        return 1.0 if self.is_relu else self.epoch.relu_unchanged_predictions


def evaluation(record: RunRecord, at: str) -> SubstitutionScores | None:
    """The evaluation `at` (a key of EVALUATIONS) of a run; None where it has no score with ReLU.

    A run that swapped ReLU in during training is a ReLU network from then on: its own score is both.
    Raises ValueError for another `at`.
    """
    if at not in EVALUATIONS:
        raise ValueError(f"unknown evaluation {at!r}; accepted: {', '.join(EVALUATIONS)}")
    epoch = _best_after_switch(record) if at == "best_substituted" and is_relufied(record) else getattr(record, at)
    if epoch is None or (epoch.relu_score is None and not is_relufied(record)):
        return None
    is_relu = epoch.relu_score is None
    relu = epoch.score if is_relu else epoch.relu_score
    return SubstitutionScores(epoch, epoch.score, relu, _is_early(record, epoch), is_relu)


def _best_after_switch(record: RunRecord) -> EpochRecord | None:
    after = [epoch for epoch in record.epochs if epoch.relu_score is None]
    sign = 1 if record.greater_is_better else -1
    return max(after, key=lambda epoch: (sign * epoch.score, -epoch.epoch)) if after else None


def _is_early(record: RunRecord, epoch: EpochRecord) -> bool:
    if is_relufied(record):
        return epoch.relu_score is not None
    if not record.config["harden"] or not epoch.hardness:
        return False
    return smallest_hardness(epoch) < record.config.get("target_hardness", PAPER_TARGET_HARDNESS) / 2
