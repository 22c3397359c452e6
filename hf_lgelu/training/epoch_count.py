"""Which epoch a callback's trainer is in."""

import sys
from typing import Any

from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import has_length


class EpochCount:
    """The number of the epoch that a trainer is in, or is about to begin: from 1 to T.

    Counted, since `state.epoch` is a share of the steps that an epoch was to have. One that ends early (a loader with
    fewer batches than its length says, `control.should_epoch_stop`) leaves a fraction there, and the next epoch would
    pass for the same. A run that is resumed with fewer steps in an epoch goes on further along, as Trainer counts.
    """

    def __init__(self) -> None:
        self._begun: int | None = None

    def forget(self) -> None:
        """Before a training and after it: the state says where it is."""
        self._begun = None

    def begin(self, args: TrainingArguments, state: TrainerState, train_dataloader: Any = None) -> None:
        """An epoch begins; the first may be one that a resumed run goes on with."""
        if self._begun is not None:
            self._begun = max(self._begun + 1, _of(state))
            return
        self._begun = _of(state)
        if has_length(train_dataloader):
            steps = -(-len(train_dataloader) // args.gradient_accumulation_steps)
            self._begun = max(self._begun, state.global_step // max(steps, 1) + 1)

    def number(self, state: TrainerState) -> int:
        """The epoch's, from 1 on."""
        return min(_of(state) if self._begun is None else self._begun, int(state.num_train_epochs))


def require_epochs(state: TrainerState, consequence: str) -> None:
    """Raise ValueError where the data has no length and Trainer counts steps alone; `consequence` and what to do."""
    if state.num_train_epochs >= sys.maxsize:
        raise ValueError(f"the training data has no length, {consequence}")


def _of(state: TrainerState) -> int:
    return int(state.epoch or 0) + 1  # in the middle of an epoch, as after a resume, it has a fraction
