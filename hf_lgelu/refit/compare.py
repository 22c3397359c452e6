"""The whole networks beside each other: original, direct swap and refit, on inputs that nothing was fitted on."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_lgelu.models.comparison import floating_outputs
from hf_lgelu.models.example_run import run_example
from hf_lgelu.models.surgery import TemporaryRelu
from hf_lgelu.refit.batches import IGNORED_LABEL, Batch
from hf_lgelu.refit.report import Evaluation, NetChange

_SLICE = 2**21  # numbers that are looked at together, in float64
_NETWORKS = ("original", "direct", "refitted")
_LARGEST = "max_change"  # of which the largest of two batches counts, where of the others it is the sum

Sums = dict[Any, Any]
"""What a batch's numbers are made of, {what: number}, and {(network, what): number} of each network."""


def evaluate_conversion(
    original: nn.Module, converted: nn.Module, substitution: TemporaryRelu, batches: Iterable[Batch]
) -> Evaluation | None:
    """Run the three networks on every batch; None if no process has one.

    Args:
        original: the given model.
        converted: the refitted one.
        substitution: puts ReLU at the original's gates: the direct swap.
        batches: of this process; every process must call.
    """
    found: list[Sums] = []
    for batch in batches:
        reference, is_logits = main_output(original, batch.inputs)
        with substitution.applied():
            direct, _ = main_output(original, batch.inputs)
        outputs = reference, direct, main_output(converted, batch.inputs)[0]
        sums = _sums(outputs, is_logits, _counted(batch, reference), batch, type(original).__name__)
        found = [add_sums(*found, sums)] if found else [sums]
    if PartialState().num_processes > 1:
        found = gather_object(found)
    return _evaluation(functools.reduce(add_sums, found)) if found else None


def main_output(model: nn.Module, inputs: Any) -> tuple[Tensor, bool]:
    """(the logits, or the first tensor of an output that has none; whether they are logits of classes).

    Classes are the last axis: of maps (N, C, H, W) they are moved there, one number a unit (N,) becomes (N, 1).
    Raises ValueError where there is no such tensor, or one number for all units.
    """
    output, is_logits = _as_given(model, inputs)
    if output is None or output.ndim == 0:
        raise ValueError(
            f"{type(model).__name__} gives {'no tensor' if output is None else 'one number for all inputs'}: networks "
            "are compared by an output whose leading axis counts the inputs. Convert the part that gives one"
        )
    if output.ndim == 1:
        return output[:, None], False
    return output.movedim(1, -1) if output.ndim > 3 else output, is_logits and output.shape[-1] > 1


def _as_given(model: nn.Module, inputs: Any) -> tuple[Tensor | None, bool]:
    output = run_example(model, inputs)
    if isinstance(output, Mapping) and "logits" in output:
        config = getattr(model, "config", None)
        regression = getattr(config, "problem_type", None) == "regression" or getattr(config, "num_labels", 2) == 1
        return output["logits"], not regression
    if isinstance(output, Tensor):
        return output, True
    return next(iter(floating_outputs(output)), None), False


def _counted(batch: Batch, output: Tensor) -> Tensor | None:
    """Which predictions are no padding: a mask of the shape of the output's leading axes."""
    for name in ("decoder_attention_mask", "attention_mask"):
        mask = batch.tensors.get(name)
        if mask is not None and mask.shape == output.shape[:-1]:
            return mask.bool().to(output.device)
    return None


def _sums(outputs: Sequence[Tensor], is_logits: bool, counted: Tensor | None, batch: Batch, model_class: str) -> Sums:
    """Of one batch, from the outputs of the three networks."""
    rows = [output.reshape(-1, output.shape[-1]) if counted is None else output[counted] for output in outputs]
    classes = rows[0].shape[-1]
    sums: Sums = {"units": len(batch), "rows": len(rows[0]), "logits": len(rows[0]) * is_logits, "square": 0.0}
    sums["total"] = torch.zeros(classes, dtype=torch.float64)
    for reference, *others in zip(*(part.split(max(1, _SLICE // classes)) for part in rows), strict=True):
        reference = _double(reference)
        sums["total"] += reference.sum(0).cpu()
        sums["square"] += reference.square().sum().item()
        for network, other in zip(_NETWORKS[1:], others, strict=True):
            new = {(network, name): value for name, value in change_sums(reference, _double(other)).items()}
            sums |= add_sums({name: sums.get(name, 0) for name in new}, new)
    for network, output in zip(_NETWORKS, outputs, strict=True):
        scores = metric_sums(output, batch.labels, counted, model_class)
        sums |= {(network, name): value for name, value in scores.items()}
    return sums


def change_sums(reference: Tensor, output: Tensor) -> Sums:
    """How far `output` (rows, classes) is from `reference`, both float64, added up over rows."""
    expected, given = F.log_softmax(reference, dim=-1), F.log_softmax(output, dim=-1)
    change = (output - reference).abs()
    return {
        "kl": F.kl_div(given, expected, reduction="sum", log_target=True).item(),
        "unchanged": int((reference.argmax(-1) == output.argmax(-1)).sum()),
        _LARGEST: change.max().item() if change.numel() else 0.0,
        "squared_error": change.square().sum().item(),
    }


def add_sums(one: Sums, other: Sums) -> Sums:
    """Sums over the rows of both."""
    return {
        name: _larger(value, other[name]) if _LARGEST in (name, name[-1]) else value + other[name]
        for name, value in one.items()
    }


def _larger(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)  # max keeps what it has before a NaN


def metric_sums(output: Tensor, labels: Tensor | None, counted: Tensor | None, model_class: str) -> Sums:
    """What the score of one batch is made of; all zero without labels.

    Args:
        output: logits (…, classes); a single column is no choice between classes, and has no score.
        labels: (…) int; −100 does not count. Of a causal language model the tokens themselves, not shifted. Labels of
            another shape or kind are none.
        counted: (…) bool, which predictions are no padding; None for all.
        model_class: name of the model's class.
    """
    sums: Sums = {"correct": 0, "labelled": 0, "loss": 0.0, "predicted": 0}
    if labels is None or labels.is_floating_point() or labels.shape != output.shape[:-1] or output.shape[-1] < 2:
        return sums
    labels = labels.to(output.device)
    if counted is not None:
        labels = labels.masked_fill(~counted, IGNORED_LABEL)
    if model_class not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        valid = labels != IGNORED_LABEL
        return sums | {"correct": int((output.argmax(-1) == labels)[valid].sum()), "labelled": int(valid.sum())}
    for logits, tokens in zip(output, labels, strict=True):  # a sequence at a time: vocabularies are large
        following = tokens[1:]
        valid = int((following != IGNORED_LABEL).sum())
        if valid:
            summed = F.cross_entropy(logits[:-1].float(), following, ignore_index=IGNORED_LABEL, reduction="none")
            sums["loss"] += summed.sum(dtype=torch.float64 if summed.device.type != "mps" else None).item()
            sums["predicted"] += valid
    return sums


def metric_values(sums: Sums) -> dict[str, float]:
    """{"accuracy": …} or {"perplexity": …}, empty without labels."""
    found = {}
    if sums["labelled"]:
        found["accuracy"] = sums["correct"] / sums["labelled"]
    if sums["predicted"]:
        found["perplexity"] = math.exp(min(sums["loss"] / sums["predicted"], 700.0))
    return found


def _evaluation(sums: Sums) -> Evaluation:
    rows = sums["rows"]
    spread = sums["square"] - (sums["total"].square().sum() / rows).item()
    each = {network: {key[1]: sums[key] for key in sums if key[0] == network} for network in _NETWORKS}
    changes = (
        NetChange(
            change["kl"] / rows if sums["logits"] else None,
            change["unchanged"] / rows,
            change[_LARGEST],
            change["squared_error"] / spread if spread > 0 else float(change["squared_error"] > 0),
            metric_values(change),
        )
        for change in (each["direct"], each["refitted"])
    )
    return Evaluation(rows, sums["units"], metric_values(each["original"]), *changes)


def _double(rows: Tensor) -> Tensor:
    return (rows.cpu() if rows.device.type == "mps" else rows).double()
