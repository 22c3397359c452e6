"""How long a run has trained, also before the checkpoint that it goes on from."""

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState


class RunClock(TrainerCallback, ExportableState):
    """Runs from when it is made; every checkpoint keeps what it shows, and a resumed run goes on from there."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._earlier, self._started = seconds, time.perf_counter()

    @property
    def seconds(self) -> float:
        """What it shows."""
        return self._earlier + time.perf_counter() - self._started

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step:
            self._earlier = state.stateful_callbacks[type(self).__name__]["args"]["seconds"]
        state.stateful_callbacks[type(self).__name__] = self.state()  # Trainer saves it only where there is a place

    def state(self) -> dict[str, Any]:
        """For Trainer's checkpoints: the arguments that make such a clock again."""
        return {"args": {"seconds": self.seconds}, "attributes": {}}
