"""What hardening measures on its way, on every process alike, and keeps where checkpoints keep it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import TrainerState

from hf_lgelu.models.comparison import kl_terms
from hf_lgelu.models.example_run import NOT_TAKEN, Inputs, buffers_kept, run_example
from hf_lgelu.models.outputs import IGNORED_LABEL, are_class_scores, labels_of_predictions, task_outputs
from hf_lgelu.models.profile import known_hardness
from hf_lgelu.models.sites import require_lambda_gelu
from hf_lgelu.training.layer_targets import layer_targets

DEFAULT_RATE_TOLERANCE = 0.01
"""Nats by which a prediction may change on average when λ moves."""

_HALVINGS = 10

Decision = TypeVar("Decision")


def decided_once(state: TrainerState, key: str, epoch: int, decide: Callable[[], Decision]) -> Decision:
    """What was decided when epoch number `epoch` first began, as JSON keeps it: found in the log history or put there.

    A run resumed in the middle of an epoch begins it twice, and must not decide by what it has learned since. All
    processes call `decide`, which may run a sharded network, and all take what the first one found.
    """
    for note in noted(state, key):
        if note["epoch"] == epoch - 1.0:
            return note[key]
    (decision,) = broadcast_object_list([decide()])
    state.log_history.append({key: decision, "epoch": epoch - 1.0, "step": state.global_step})
    return decision


def noted(state: TrainerState, key: str) -> list[dict[str, Any]]:
    """The entries of the log history that hold decisions under this key, in their order."""
    return [entry for entry in state.log_history if key in entry]


def measured_targets(model: nn.Module, data: Iterable[Inputs], tolerance: float) -> dict[str, Any]:
    """`layer_targets` as JSON keeps them, but nowhere below λ: a gate that is harder already stays so."""
    targets = {}
    hardness = {name: known_hardness(module).double().cpu() for name, module in require_lambda_gelu(model)}
    for name, target in layer_targets(model, data, tolerance=tolerance).items():
        harder = torch.maximum(hardness[name], torch.as_tensor(target, dtype=torch.float64))
        targets[name] = harder.item() if harder.numel() == 1 else harder.tolist()
    return targets


def largest_move(gap: Callable[[float], float], start: float, bound: float) -> float:
    """The largest progress p from `start` to 1 with gap(p) ≤ bound, by halving: 1, or to 1/1024 of 1 − start below it.

    `gap` grows from gap(start) = 0.
    """
    if gap(1.0) <= bound:
        return 1.0
    low, high = start, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if gap(middle) <= bound else (low, middle)
    return low


@torch.no_grad()
def mean_divergence(
    model: nn.Module, data: Iterable[Inputs], before: Callable[[], None], after: Callable[[], None]
) -> float:
    """Mean KL(p ‖ q) of a prediction in nats, p of the network as `before()` sets it and q as `after()` does.

    A prediction is a softmax over the last axis of the logits; where its label is −100, there is none. Raises
    ValueError where there is none at all.
    """
    total, count = 0.0, 0
    for batch in data:
        before()
        reference = _scores(model, batch)
        after()
        divergence = kl_terms(reference, _scores(model, batch)).sum(-1)
        counted = _counted(model, batch, divergence)
        total += divergence[counted].sum().item()
        count += int(counted.sum())
    if not count:
        raise ValueError("rate='tolerance' has no prediction to measure on: the data is empty, or all labels are -100")
    return total / count


def require_measurable(model: nn.Module, batch: Inputs, *, classes: bool) -> None:
    """Raise ValueError where nothing can be measured on a batch: the model does not take it, or gives no `classes`."""
    try:
        with buffers_kept(model):
            output = run_example(model, batch)
    except NOT_TAKEN as error:
        raise ValueError(
            f"{type(model).__name__} does not take a batch as hardening measures on it, model(**batch): {error}. Give "
            "HardeningCallback(data=...) batches that it takes, or a target_hardness and rate='schedule'"
        ) from error
    if classes:
        _scores_in(output)


def _scores(model: nn.Module, batch: Inputs) -> Tensor:
    return _scores_in(run_example(model, batch))


def _scores_in(output: Any) -> Tensor:
    name, scores = next(iter(task_outputs(output).items()), ("", torch.empty(0)))
    if not are_class_scores(name) or scores.ndim < 2 or scores.shape[-1] < 2:
        raise ValueError(
            f"rate='tolerance' compares predictions of classes, and the model's first output, {name or 'a tensor'} of "
            f"shape {tuple(scores.shape)}, holds none; harden with rate='schedule'"
        )
    return scores.double()


def _counted(model: nn.Module, batch: Inputs, divergence: Tensor) -> Tensor:
    labels = labels_of_predictions(batch.get("labels") if isinstance(batch, Mapping) else None, model)
    if isinstance(labels, Tensor) and labels.shape == divergence.shape and not labels.is_floating_point():
        return labels.to(divergence.device) != IGNORED_LABEL
    return torch.ones_like(divergence, dtype=torch.bool)
