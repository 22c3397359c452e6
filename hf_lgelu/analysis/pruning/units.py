"""Removing hidden units: those that never fire, exactly; or those that APoZ or the weights call least important.

Structure is changed by torch-pruning (extra `[prune]`). Only units between two layers with an activation between
them are candidates; the residual stream is never touched. Fewer units are fewer parameters and operations; that is
all that is promised.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_lgelu.analysis.pruning.prunable import HiddenLayer, Pruner
from hf_lgelu.analysis.pruning.same_outputs import OTHERWISE, change_by_dead_units, require_units_at_zero
from hf_lgelu.analysis.pruning.zeros import RELU, GateZeros, checked_batches, count_zeros
from hf_lgelu.models.config_keys import write_config_changes
from hf_lgelu.models.config_widths import plan_width_changes
from hf_lgelu.models.example_run import Inputs, keeping_buffers
from hf_lgelu.models.loading import forget_checkpoint
from hf_lgelu.models.mlp import MLPConfig
from hf_lgelu.models.own_forward import independent_copy
from hf_lgelu.models.sites import checked_module

CRITERIA: dict[str, str] = {
    "apoz": "share of outputs ≤ 0 on the data, highest first (for ReLU that is APoZ, arXiv:1607.03250)",
    "magnitude": "L1 norm of a unit's incoming weights, lowest first (arXiv:1608.08710)",
}
"""By what `prune_units` chooses."""


@dataclass(frozen=True)
class PrunedModel:
    """A model with fewer hidden units.

    Args:
        model: a new model; the given one is as it was.
        removed: {layer: indices of the units removed, by their numbers in the given model}. Of gated linear units the
            layer is the one before the activation (`gate_proj`); the one that is multiplied loses the same.
        widths: {layer: units left}, for every candidate layer, in the order in which they run.
        parameters_before, parameters: counts.
        config_key: the key of `model.config` that now holds the widths, so that `save_pretrained` and
            `from_pretrained` work; "encoder_ffn_dim, decoder_ffn_dim" where it takes several. None where the config has
            no key for them (layers of different widths in most families): then keep the module itself (torch.save,
            torch.export or ONNX).
        max_change: largest change of an output on the data, of a model in half precision as it is in float32; None
            where that was not asked.
    """

    model: nn.Module
    removed: dict[str, list[int]]
    widths: dict[str, int]
    parameters_before: int
    parameters: int
    config_key: str | None
    max_change: float | None = None

    def __str__(self) -> str:
        lines = [f"{self.parameters_before:,} parameters → {self.parameters:,}"]
        for layer, left in self.widths.items():
            removed = len(self.removed.get(layer, ()))
            lines.append(f"  {layer}: {removed} of {left + removed} units removed")
        if self.max_change is not None:
            lines.append(f"  outputs on these data changed by at most {self.max_change:.3g}")
        where = f"config.{self.config_key} holds the widths" if self.config_key else "no config key holds these widths"
        return "\n".join([*lines, f"  {where}"])


@torch.inference_mode(False)  # in which nothing has gradients, and new weights would be for inference alone
@keeping_buffers
def remove_dead_units(model: nn.Module, data: Inputs | Iterable[Inputs]) -> PrunedModel:
    """A model without the hidden units whose ReLU is 0 on every row of `data`; on these rows it gives the same outputs.

    `model` stays as it is. On other rows such a unit may fire: outputs there can change. One unit of each layer is
    kept.

    Args:
        model: any module tree.
        data: batches, read twice: a list or a DataLoader, no generator; or one batch, a tensor or mapping.

    Raises:
        ImportError: torch-pruning is not installed.
        TypeError: `data` can be read only once.
        ValueError: no rows, or NaN or infinity in them; no hidden layer can be pruned, the gates are smooth, or no unit
            is dead.
        RuntimeError: outputs on `data` differ by more than rounding, or the model does not run without the units.

    Example:
        >>> import torch
        >>> from hf_lgelu import remove_dead_units
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> _ = model[0].bias.data.copy_(torch.tensor([9.0, -9.0, 9.0]))  # the second unit never fires below
        >>> pruned = remove_dead_units(model, torch.rand(16, 2))
        >>> pruned.removed, pruned.model[0].out_features, model[0].out_features
        ({'0': [1]}, 2, 3)
    """
    pruner = Pruner(independent_copy(checked_module(model)), next(checked_batches(data, twice=True)))
    layers = _require_layers(model, pruner)
    hard = [layer for layer in layers if layer.kind == RELU]
    if not hard:
        kinds = ", ".join(sorted({layer.kind for layer in layers}))
        raise ValueError(
            f"{type(model).__name__} has smooth gates ({kinds}): their units never rest at exactly 0 over a range of "
            "inputs, so none is dead. Harden the model and substitute ReLU, or use prune_units"
        )
    zeros = _zeros(model, data, hard)
    chosen = {layer.name: _dead(layer, zeros) for layer in hard}
    if not any(chosen.values()):
        values = max(zeros[gate].values for layer in hard for gate in layer.gates)
        raise ValueError(f"no unit is dead: each fires at least once among {values:,} outputs; use prune_units")
    pruned = _remove(model, pruner, chosen)
    return replace(pruned, max_change=change_by_dead_units(model, pruned.model, pruned.removed, data))


@torch.inference_mode(False)
@keeping_buffers
def prune_units(
    model: nn.Module,
    data: Inputs | Iterable[Inputs],
    *,
    fraction: float | None = None,
    threshold: float | str | None = None,
    criterion: str = "apoz",
) -> PrunedModel:
    """A model without its least important hidden units; outputs change, and fine-tuning is the caller's.

    `model` stays as it is.

    Args:
        model: any module tree.
        data: batches, for "apoz", and example inputs for the trace (one batch is enough for "magnitude"); read twice: a
            list or a DataLoader, no generator; or one batch, a tensor or mapping.
        fraction: of each layer's units, rounded down, in (0, 1).
        threshold: for "apoz", instead of `fraction`: units whose share of outputs ≤ 0 is above this number in [0, 1),
            or above "one-sigma", the layer's mean plus one standard deviation (Network Trimming's rule). Where that
            is every unit of a layer, the one that fires most is kept.
        criterion: a key of CRITERIA.

    Raises:
        ImportError: torch-pruning is not installed.
        TypeError: `data` can be read only once.
        ValueError: an argument is wrong, no rows, or NaN or infinity in them; no hidden layer can be pruned, or no unit
            is chosen.
        RuntimeError: without the units the model does not run, or gives something else on the first batch than the
            given one does with these units at 0.

    Example:
        >>> import torch
        >>> from hf_lgelu import prune_units
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> prune_units(model, torch.randn(16, 2), fraction=0.25, criterion="magnitude").widths
        {'0': 6}
    """
    _check_choice(fraction, threshold, criterion)
    pruner = Pruner(independent_copy(checked_module(model)), next(checked_batches(data, twice=True)))
    layers = _require_layers(model, pruner)
    zeros = _zeros(model, data, layers) if criterion == "apoz" else {}
    chosen = {}
    for layer in layers:
        scores = unit_scores(model, layer, zeros)
        if fraction is not None:
            chosen[layer.name] = _highest(scores, fraction)
        elif threshold is not None:
            chosen[layer.name] = _above(scores, threshold)
    if not any(chosen.values()):
        raise ValueError(
            f"no unit is chosen by fraction={fraction}, threshold={threshold} in layers of "
            f"{', '.join(str(layer.units) for layer in layers)} units"
        )
    pruned = _remove(model, pruner, chosen)
    require_units_at_zero(model, pruned.model, pruned.removed, pruner.layers, next(checked_batches(data)))
    return pruned


def unit_scores(model: nn.Module, layer: HiddenLayer, zeros: Mapping[str, GateZeros]) -> Tensor:
    """(units,) float64, highest for the unit to remove first: off fraction, or minus the weights' L1 norm.

    `zeros` are the model's; empty for the weights.
    """
    if zeros:
        values = sum(zeros[gate].values for gate in layer.gates)
        if not values:
            raise ValueError(
                f"{', '.join(layer.gates)} ran on no row of these data, as an expert does that none is sent to, and "
                "nothing is known of its units; give data that reach it, or criterion='magnitude'"
            )
        return sum(zeros[gate].off for gate in layer.gates).double() / values
    return -sum(_norms(model, name) for name in (layer.name, *layer.partners))


def _norms(model: nn.Module, name: str) -> Tensor:
    """(units,) the L1 norm of each unit's incoming weights, float64."""
    module = model.get_submodule(name)
    weight = module.weight.detach().double().cpu()
    incoming = weight.T if isinstance(module, Conv1D) else weight.flatten(1)
    if not incoming.isfinite().all():
        raise ValueError(f"{name} has weights that are NaN or infinite: there is no order of importance in them")
    return incoming.abs().sum(1)


def _zeros(model: nn.Module, data: Inputs | Iterable[Inputs], layers: Sequence[HiddenLayer]) -> Mapping[str, GateZeros]:
    return count_zeros(model, data, names={gate for layer in layers for gate in layer.gates})


def _dead(layer: HiddenLayer, zeros: Mapping[str, GateZeros]) -> list[int]:
    dead = set.intersection(*(set(zeros[gate].dead_units) for gate in layer.gates))
    return sorted(dead)[1:] if len(dead) == layer.units else sorted(dead)


def _highest(scores: Tensor, fraction: float) -> list[int]:
    # 0.29 · 100 is 28.999999999999996 in float64 and means 29; one unit stays in any case.
    count = min(math.floor(round(fraction * len(scores), 9)), len(scores) - 1)
    return sorted(scores.argsort(descending=True, stable=True)[:count].tolist())


def _above(scores: Tensor, threshold: float | str) -> list[int]:
    limit = (scores.mean() + scores.std(correction=0)).item() if threshold == "one-sigma" else threshold
    chosen = (scores > limit).nonzero().flatten().tolist()
    if len(chosen) == len(scores):
        chosen.remove(int(scores.argmin()))  # the one to keep is the last to remove
    return chosen


def _remove(model: nn.Module, pruner: Pruner, chosen: Mapping[str, Sequence[int]]) -> PrunedModel:
    try:
        for layer in pruner.layers:
            if chosen.get(layer.name):
                pruner.remove(layer, chosen[layer.name])
    except (RuntimeError, IndexError) as error:
        raise RuntimeError(f"torch-pruning cannot remove units of {layer.name}: {error}. {OTHERWISE}") from error
    forget_checkpoint(pruner.model)
    widths = {layer.name: layer.units - len(chosen.get(layer.name, ())) for layer in pruner.layers}
    for layer in pruner.layers:
        found = pruner.units(layer.name)
        if found != widths[layer.name]:
            raise RuntimeError(
                f"torch-pruning left {found} units in {layer.name}, {widths[layer.name]} were to be left"
            )
    return PrunedModel(
        model=pruner.model,
        removed={name: list(units) for name, units in chosen.items() if units},
        widths=widths,
        parameters_before=sum(parameter.numel() for parameter in model.parameters()),
        parameters=sum(parameter.numel() for parameter in pruner.model.parameters()),
        config_key=_write_widths(pruner.model, [layer.units for layer in pruner.layers], list(widths.values())),
    )


def _write_widths(model: nn.Module, old: list[int], new: list[int]) -> str | None:
    """Put the widths into the config if a model built from it then has these shapes; the keys, or None."""
    if not isinstance(model, PreTrainedModel):
        return None
    values: list[Any] = [new[0]] if len(set(new)) == 1 else []
    if isinstance(model.config, MLPConfig):
        values.append(new)
    for width in values:
        changes = plan_width_changes(model, partial(_resized, old=old, new=width))
        if changes:
            write_config_changes(model, changes)
            return ", ".join(".".join(change.path) for change in changes)
    return None


def _resized(value: Any, old: list[int], new: Any) -> Any:
    """What a key is to hold that held one of the old widths, all of them, or None."""
    return new if value is None or value == old or value in old else value


def _check_choice(fraction: float | None, threshold: float | str | None, criterion: str) -> None:
    if criterion not in CRITERIA:
        raise ValueError(f"unknown criterion {criterion!r}; accepted: {', '.join(CRITERIA)}")
    if (fraction is None) == (threshold is None):
        raise ValueError(f"give fraction or threshold, got fraction={fraction}, threshold={threshold}")
    if fraction is not None and not 0 < fraction < 1:
        raise ValueError(f"fraction must lie between 0 and 1, got {fraction}")
    if threshold is not None and criterion != "apoz":
        raise ValueError(f"threshold goes with criterion='apoz', got {criterion!r}; give fraction")
    if isinstance(threshold, str) and threshold != "one-sigma":
        raise ValueError(f"threshold must be a number or 'one-sigma', got {threshold!r}")
    if isinstance(threshold, float | int) and not 0 <= threshold < 1:
        raise ValueError(f"threshold is a share of outputs and must lie in [0, 1), got {threshold}")


def _require_layers(model: nn.Module, pruner: Pruner) -> list[HiddenLayer]:
    if not pruner.layers:
        raise ValueError(
            f"{type(model).__name__} has no hidden layer that can be pruned: none whose units go through an activation "
            "module, with one λ if any, into one other layer and nowhere else"
        )
    return pruner.layers
