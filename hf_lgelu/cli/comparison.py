"""The comparison of two networks on the inputs that a command's --evaluation names."""

from collections.abc import Sequence

from torch import nn

from hf_lgelu.cli.rows import InputSet
from hf_lgelu.formats import percent, score
from hf_lgelu.models.batches import cut_batches, read_batches
from hf_lgelu.models.sites import SMOOTH_KINDS
from hf_lgelu.models.substitution import TemporaryRelu
from hf_lgelu.refit.compare import evaluate_conversion
from hf_lgelu.refit.report import Evaluation, NetChange


def compare(
    network: nn.Module,
    other: nn.Module,
    inputs: InputSet,
    *,
    batch_size: int | None,
    progress: bool,
    outputs: Sequence[str] | None = None,
) -> Evaluation:
    """The evaluation on all of `inputs` of `network` with ReLU at every smooth gate ("direct") and of `other`
    ("refitted"), each against `network`.

    `outputs` are names of the outputs that count; None are the outputs that the task reads. Raises ValueError for a
    network without a smooth gate or without an output of these names.
    """
    read = inputs.batches("evaluation", progress=progress, **({} if batch_size is None else {"batch_size": batch_size}))
    batches = cut_batches(read_batches(read), batch_size)
    found, _ = evaluate_conversion(network, other, TemporaryRelu(network, kinds=SMOOTH_KINDS), batches, outputs)
    if found is None:
        raise ValueError(f"{inputs.description} holds no rows to evaluate on")
    return found


def in_words(change: NetChange, original: dict[str, float]) -> str:
    """The change of a network against the given one: scores first, where there are labels."""
    parts = [
        f"{name} {score(name, value)}, {score(name, original[name])} as it is" for name, value in change.metrics.items()
    ]
    if change.kl is None:
        parts.append(f"relative error {change.relative_error:.3g}")
    else:
        parts.append(f"KL {change.kl:.3g} nat, {percent(change.agreement)} of the predictions unchanged")
    return "; ".join([*parts, f"largest change {change.max_logit_change:.3g}"])
