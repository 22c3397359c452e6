"""A plain GELU (or SiLU) checkpoint of a checkpoint with soft λ-gates, which computes the same function.

a(x; λ) = gelu(λx)/λ. So λ-GELU between two maps is GELU between two other maps: weight and bias of the map before are
multiplied by λ, and the weight of the map after is divided by λ. Which maps these are is seen in one forward pass.
"""

import os
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_lgelu.activation.gates import GATES
from hf_lgelu.comparing.comparison import compare_models
from hf_lgelu.export.card import write_card
from hf_lgelu.export.plain import CheckpointExport, reloaded_as, require_exportable
from hf_lgelu.files import whole_folder
from hf_lgelu.models.checkpoint import require_same_model, save_checkpoint
from hf_lgelu.models.config_keys import (
    ConfigChange,
    UnsupportedConfigError,
    combined,
    plan_config_changes,
    runtime_warnings,
    without_guard,
)
from hf_lgelu.models.copies import independent_copy
from hf_lgelu.models.hardening import hardness_profile, swap_errors
from hf_lgelu.models.record import forget_sites
from hf_lgelu.models.surgery import exchange_activations
from hf_lgelu.networks.random_inputs import random_inputs
from hf_lgelu.networks.run import Inputs, forward_hooks, forward_pre_hooks, in_own_forward, run_example
from hf_lgelu.networks.sites import LEARNED_KINDS, find_sites

_MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)
_MOST = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the largest output, by rounding; 0.1 in half precision


def export_gelu(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    processor: Any = None,
    source: str | os.PathLike | None = None,
    inputs: Inputs | None = None,
    overwrite: bool = False,
) -> CheckpointExport:
    """Save `model` as a GELU model of the same function, as a checkpoint that needs no hf_lgelu.

    Each gate must have one λ, and stand alone between two maps (linear or convolution), as in a transformer's block.
    `model` stays as it is. The other arguments and errors are those of `export_relu`.

    Args:
        inputs: example inputs that run the whole model. None takes random inputs.

    Raises:
        ValueError: a gate does not stand alone between two maps; the message names each gate with the reason.
        RuntimeError: no config key gives GELU in its erf form at these sites (UnsupportedConfigError), or the reloaded
            folder computes something else.

    Example:
        >>> import tempfile
        >>> from hf_lgelu import MLPConfig, MLPForClassification, export_gelu
        >>> model = MLPForClassification(MLPConfig(num_features=3, hidden_size=4, num_hidden_layers=1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_gelu(model, f"{folder}/gelu")
        >>> report.change.largest_change < 1e-5 * report.change.largest_output
        True
    """
    model = require_exportable(model, "gelu")
    with whole_folder(folder, overwrite=overwrite) as new:
        report = save_gelu(model, new, processor=processor, source=source, inputs=inputs)
        write_card(model, new, report=report)
    return replace(report, folder=str(folder))


@in_own_forward
@torch.no_grad()
def save_gelu(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    processor: Any = None,
    source: str | os.PathLike | None = None,
    inputs: Inputs | None = None,
) -> CheckpointExport:
    """The report of `export_gelu`, for an existing folder, without a card."""
    inputs = random_inputs(model) if inputs is None else inputs
    plain = independent_copy(model).eval()
    sites = find_sites(plain, LEARNED_KINDS)
    around = _maps_around(plain, {site.module: site.name for site in sites}, inputs)
    for gate, (before, after) in around.items():
        hardness = gate.hardness.cpu().double()  # on the CPU: not every device has float64
        for parameter in (part for part in (before.weight, before.bias) if part is not None):
            parameter.copy_(parameter.cpu().double() * hardness)
        after.weight.copy_(after.weight.cpu().double() / hardness)
    modules = {GATES[site.kind].plain_module(): site.kind for site in sites}
    surgery = exchange_activations(plain, sites, [*modules], partial(_plan_plain, modules))
    change = compare_models(model, plain, inputs)
    if not change.largest_change <= _MOST.get(plain.dtype, 0.1) * change.largest_output:  # nor NaN
        raise RuntimeError(f"the GELU model computes something else than the λ-GELU model: {change}; no file is kept")
    save_checkpoint(plain, folder, processor, source)
    require_same_model(plain, reloaded_as(plain, folder), inputs)
    hardness_of = hardness_profile(model)
    errors, warnings = swap_errors(model, hardness_of), runtime_warnings(plain)
    return CheckpointExport("gelu", str(folder), hardness_of, errors, surgery.config_changes, change, warnings)


def _maps_around(model: nn.Module, gates: dict[Any, str], inputs: Inputs) -> dict[Any, tuple[Any, Any]]:
    """{gate: (the map before, the map after)}. Raises ValueError with the reason for each gate that has none.

    `gates` is {gate: name of its site}. A map counts if its parameters belong to no other module.
    """
    owners = [module for _, module in model.named_modules(remove_duplicate=False)]
    uses = Counter(id(value) for owner in owners for value in owner._parameters.values() if value is not None)
    maps = {
        owner for owner in owners
        if type(owner) in _MAPS and all(uses[id(owner._parameters.get(name))] < 2 for name in ("weight", "bias"))
    }  # fmt: skip
    reads = _Reads([*gates, *maps])
    with reads, forward_pre_hooks(reads.modules, reads.begin), forward_hooks(reads.modules, reads.end):
        reads.note(run_example(model, inputs), "the output")
    around, reasons = {}, []
    for gate, name in gates.items():
        before, after = reads.makers(gate), reads.readers(gate)
        if len(before) != 1 or not before <= maps:
            reason = "it did not run, or its input is not the output of one map with weights of its own"
        elif reads.readers(*before) != {gate}:
            reason = "the map before it is also read elsewhere"
        elif len(after) != 1 or not after <= maps:
            reason = "its output does not go into one map with weights of its own, and nowhere else"
        elif reads.makers(*after) != {gate}:
            reason = "the map after it also reads something else, or is read elsewhere"
        else:
            around[gate] = (*before, *after)
            continue
        reasons.append(f"\n  {name}: {reason}")
    if reasons:
        raise ValueError(
            f"{type(model).__name__} cannot become a plain GELU model of the same function: {len(reasons)} of its "
            f"gates do not stand alone between two maps:{''.join(reasons)}\nKeep λ-GELU (save_pretrained), or, once "
            "its gates are hard, make a ReLU model of it with export_relu"
        )
    return around


class _Reads(TorchDispatchMode):
    """Who reads whose output in one forward pass, by the identity of tensors.

    Between the modules, each operation counts as a reader. Where another than a module reads its weights, this counts
    as a reader and as a maker of its input.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.modules = modules
        self._pairs: set[tuple[Any, Any]] = set()  # (maker, reader)
        self._made: dict[int, tuple[Tensor, nn.Module]] = {}  # with the tensor, so that no other gets its id
        self._owner = {id(value): module for module in modules for value in module.parameters()}
        self._running: list[nn.Module] = []

    def makers(self, module: nn.Module) -> set[Any]:
        return {maker for maker, reader in self._pairs if reader is module}

    def readers(self, module: nn.Module) -> set[Any]:
        return {reader for maker, reader in self._pairs if maker is module}

    def begin(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        _, maker = self._made.get(id(given[0]), (None, "an operation"))
        self._pairs.add((maker, module))
        self._running.append(module)

    def end(self, module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        self._running.pop()
        self._made[id(output)] = output, module

    def note(self, values: Any, reader: str) -> None:
        for value in tree_leaves(values):
            if id(value) in self._made:
                self._pairs.add((self._made[id(value)][1], reader))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        running = self._running[-1] if self._running else None
        if running is None:
            self.note((args, kwargs), str(func))
        for value in tree_leaves((args, kwargs)):
            owner = self._owner.get(id(value), running)
            if owner is not running:
                self._pairs |= {(owner, str(func)), (str(func), owner)}
        return func(*args, **(kwargs or {}))


def _plan_plain(
    kinds: dict[nn.Module, str], root: PreTrainedModel, planned: dict[str, nn.Module]
) -> list[ConfigChange]:
    """The config changes that make the planned sites plain; raises UnsupportedConfigError if no key does."""
    changes: list[ConfigChange] = []
    for kind in dict.fromkeys(kinds[module] for module in planned.values()):
        names = {name for name, module in planned.items() if kinds[module] == kind}
        usual, *others = GATES[kind].plain_names
        try:
            changes += plan_config_changes(root, names, usual)
        except UnsupportedConfigError:
            if not others:
                raise
            changes += plan_config_changes(root, names, others[0])
    lifted = without_guard(root.config)
    return combined(root.config, lifted, [each for each in changes if each not in lifted]) + forget_sites(root.config)
