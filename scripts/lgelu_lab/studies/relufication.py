"""Relufication, the rival of hardening: put ReLU in first, then train on."""

import math
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_lgelu import substitute_relu
from hf_lgelu.models.hardening import hardening_progress
from hf_lgelu.networks.sites import find_sites

_KINDS = ("gelu", "silu", "mish")


class RelufyCallback(TrainerCallback):
    """Train e_s = ⌊switch_fraction·T⌋ epochs, or steps, with a smooth gate, then with ReLU in its place, weights kept.

    The switch falls where hardening (Algorithm 1) begins, so the ReLU network trains for as many steps
    as a hardened one takes to the target. A resumed run continues, as with HardeningCallback. The best
    checkpoint is one of the ReLU network.

    Args:
        switch_fraction: share of training with the smooth gate, in [0, 1).
        strategy: "epoch" or "steps", as `hardening_strategy`.
    """

    def __init__(self, switch_fraction: float, strategy: str = "epoch") -> None:
        self.switch_fraction, self.strategy = switch_fraction, strategy

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        args.switch_fraction, args.hardening_strategy = self.switch_fraction, self.strategy
        if not find_sites(model, _KINDS):
            raise ValueError(f"{type(model).__name__} has no activation of kind {', '.join(_KINDS)} to relufy")
        # A run resumed from behind the switch may have no epoch left to begin, and is evaluated and saved all the same.
        if state.global_step:
            self._switch(state, model)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        if find_sites(model, _KINDS):
            self._switch(state, model)

    def _switch(self, state: TrainerState, model: nn.Module) -> None:
        """Put ReLU in where hardening would have begun, and let no epoch of the smooth network count as the best."""
        if not self._is_of_relu(int(state.epoch or 0) + 1, state.global_step + 1, state):
            return
        substitute_relu(model, kinds=_KINDS)
        best = [entry for entry in state.log_history if entry.get("step") == state.best_global_step]
        if best and not self._is_of_relu(math.ceil(best[-1]["epoch"]), best[-1]["step"], state):
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def _is_of_relu(self, epoch: int, step: int, state: TrainerState) -> bool:
        by_step = self.strategy == "steps"
        position, last = (step, state.max_steps) if by_step else (epoch, int(state.num_train_epochs))
        return hardening_progress(max(1, min(position, last)), last, self.switch_fraction) is not None
