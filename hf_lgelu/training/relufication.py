"""Relufication, the rival of hardening: put ReLU in first, then train on."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_lgelu.models.sites import find_sites, lambda_gelu_modules
from hf_lgelu.models.substitution import require_substitutable, substitute_relu
from hf_lgelu.training.adaptive import noted
from hf_lgelu.training.epoch_count import EpochCount, require_epochs
from hf_lgelu.training.resume import forget_best
from hf_lgelu.training.schedules import DEFAULT_SWITCH_FRACTION, hardening_progress, switch_position

RELUFIED_KINDS = ("gelu", "silu", "mish")

_SWITCHED = "relufication/switched"  # of the log history


class RelufyCallback(TrainerCallback):
    """Train e_s = ⌊switch_fraction·T⌋ epochs with a smooth gate, then with ReLU in its place, weights kept.

    The switch falls where hardening (Algorithm 1) begins, so the ReLU network trains for as many steps
    as a hardened one takes to the target. A resumed run continues, as with HardeningCallback. What could not be
    swapped then is refused when training begins.

    Args:
        switch_fraction: share of training with the smooth gate, in [0, 1).
    """

    def __init__(self, switch_fraction: float = DEFAULT_SWITCH_FRACTION) -> None:
        switch_position(1, switch_fraction)  # raises on a fraction out of range
        self.switch_fraction = switch_fraction
        self._epochs = EpochCount()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        self._epochs.forget()
        if lambda_gelu_modules(model):
            raise ValueError("relufication swaps a plain smooth gate; a model with λ-GELU is hardened instead")
        # A run resumed from after the switch still builds the smooth model: its weights are the same.
        if not find_sites(model, RELUFIED_KINDS):
            raise ValueError(f"{type(model).__name__} has no activation of kind {', '.join(RELUFIED_KINDS)} to relufy")
        require_epochs(state, "so epochs cannot be counted and ReLU would never be put in; give it a length")
        require_substitutable(model, kinds=RELUFIED_KINDS)
        if not noted(state, _SWITCHED):  # an earlier best is of a run that put no ReLU in
            forget_best(state, "its gates were smooth, and the best is looked for among networks of ReLU")
        # A run resumed from behind the switch may have no epoch left to begin, and is evaluated and saved all the same.
        if state.global_step:
            self._epochs.begin(args, state, kwargs.get("train_dataloader"))
            if self._progress(state) is not None:
                substitute_relu(model, kinds=RELUFIED_KINDS)
            self._epochs.forget()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        self._epochs.begin(args, state, kwargs.get("train_dataloader"))
        if self._progress(state) is None:
            return
        if find_sites(model, RELUFIED_KINDS):
            substitute_relu(model, kinds=RELUFIED_KINDS)
        if not noted(state, _SWITCHED):
            state.log_history.append({_SWITCHED: True, "epoch": state.epoch, "step": state.global_step})

    def _progress(self, state: TrainerState) -> float | None:
        """That of hardening, which would have begun where ReLU is put in; None before."""
        return hardening_progress(self._epochs.number(state), int(state.num_train_epochs), self.switch_fraction)
