"""Which epoch it is, for rows that draw their augmentation by the epoch."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class AugmentationCallback(TrainerCallback):
    """Tells rows that augment which epoch it is; the draws of an epoch are then the same after a resume."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.rows.set_epoch(int(state.epoch or 0), args.seed)
