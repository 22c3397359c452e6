"""How long a run has trained, also before the checkpoint that it goes on from."""

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState


class RunClock(TrainerCallback, ExportableState):
    """Runs from when it is made; every checkpoint keeps what it shows, and a resumed run goes on from there.

    `since_step` is the step from which it counts: 0, or where a run went on from a checkpoint that kept no time.
    """

    def __init__(self, seconds: float = 0.0, since_step: int = 0) -> None:
        self.since_step = since_step
        self._earlier, self._started = seconds, time.perf_counter()

    @property
    def seconds(self) -> float:
        """What it shows."""
        return self._earlier + time.perf_counter() - self._started

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step:
            kept = state.stateful_callbacks.get(type(self).__name__)
            kept = kept["args"] if kept else {"seconds": 0.0, "since_step": state.global_step}
            self._earlier, self.since_step = kept["seconds"], kept["since_step"]
        state.stateful_callbacks[type(self).__name__] = self.state()  # Trainer saves it only where there is a place

    def state(self) -> dict[str, Any]:
        """For Trainer's checkpoints: the arguments that make such a clock again."""
        return {"args": {"seconds": self.seconds, "since_step": self.since_step}, "attributes": {}}
