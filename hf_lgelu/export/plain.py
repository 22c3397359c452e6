"""A checkpoint without λ-gates: with ReLU for hard gates, or with plain activations and λ in the maps around them."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import Node
from transformers import PreTrainedModel

from hf_lgelu.activation.gates import GATES
from hf_lgelu.comparing.comparison import compare_models
from hf_lgelu.comparing.distance import Distance
from hf_lgelu.export.card import write_export_card
from hf_lgelu.files import whole_folder
from hf_lgelu.graph.maps import COPIES, RESHAPES, AffineOperation, read_affine
from hf_lgelu.graph.recorder import operation_name
from hf_lgelu.graph.recording import Recording
from hf_lgelu.models.checkpoint import save_and_compare
from hf_lgelu.models.config_keys import ConfigChange, plan_config_changes, runtime_warnings
from hf_lgelu.models.copies import changeable_module, independent_copy
from hf_lgelu.models.hardening import MAX_SWAP_ERROR, GateHardness, gates_by_site, softest_gate
from hf_lgelu.models.record import forget_sites
from hf_lgelu.models.surgery import exchange_activations, relu_for
from hf_lgelu.networks.run import Inputs, in_own_forward, random_inputs
from hf_lgelu.networks.sites import LEARNED_KINDS, find_sites
from hf_lgelu.networks.smooth_calls import SmoothCall, find_smooth_calls


@dataclass(frozen=True)
class CheckpointExport:
    """The report of `export_relu` or `export_gelu`.

    `original` is the folder or Hub id of the exported model, if that has one. `activation`, by its name in
    transformers, stands where the λ-gates stood; `gates` were these, by site. `change` is the change of the outputs on
    the example inputs, which `are_random` if none were given. `warnings` name programs that ignore the config's
    activation. After a ReLU export, `smooth_calls` are the smooth operations that are left on these inputs.
    """

    original: str
    activation: str
    gates: dict[str, GateHardness]
    config_changes: tuple[ConfigChange, ...]
    change: Distance
    warnings: tuple[str, ...]
    are_random: bool
    smooth_calls: tuple[SmoothCall, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{len(self.gates)} λ-gates → {self.activation}",
            *([f"  softest gate {softest_gate(self.gates)}"] if self.activation == "relu" else []),
            f"  on {_inputs_in_words(self.are_random)}: {self.change}",
            *(f"  config {change}" for change in self.config_changes),
            *(f"  still smooth: {call}" for call in self.smooth_calls),
            *(f"  warning: {warning}" for warning in self.warnings),
        ]
        return "\n".join(lines)


def _inputs_in_words(are_random: bool) -> str:
    return "random inputs" if are_random else "the example inputs"


@in_own_forward
def export_relu(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    source: str | os.PathLike | None = None,
    inputs: Inputs | None = None,
    max_swap_error: float = MAX_SWAP_ERROR,
    allow_soft: bool = False,
    overwrite: bool = False,
) -> CheckpointExport:
    """Save `model` with ReLU instead of every λ-GELU, as a checkpoint that needs no hf_lgelu.

    `model` stays as it is. The config key of the model's family is rewritten. The folder is loaded again with
    transformers, and its outputs must be those of the substituted model. A model card is written (`write_card`).

    Args:
        model: a transformers model with λ-GELU, also timm's in its wrapper, or this package's MLP, whose class is here.
        folder: the folder to write. It is written whole or not at all.
        source: folder or Hub id whose tokenizer or image processor is copied.
        inputs: example inputs, on which the change of the outputs is measured. None takes random inputs
            (`hf_lgelu.networks.run.random_inputs`). Real inputs say more.
        max_swap_error: the largest κ/λ that is allowed, with κ = 0.16997 for λ-GELU (`swap_error_bound`). The default
            allows λ-GELU from λ = 79.8 on, half the paper's target.
        allow_soft: export soft gates too.
        overwrite: replace a folder that holds a model.

    Raises:
        TypeError: `model` is no transformers model; `substitute_relu` takes any module.
        ValueError: there is no λ-GELU, gates are too soft (the message has the λ of each), no example inputs are known
            for this model, or the model gives NaN on them.
        RuntimeError: `model` is wrapped by PEFT or for distributed training, no config key gives ReLU at these sites
            (UnsupportedConfigError), or the reloaded folder gives other outputs.
        OSError: `folder` is not empty (FileExistsError) or cannot be written. An existing folder stays as it was.

    Example:
        >>> import tempfile
        >>> from hf_lgelu import MLPConfig, MLPForClassification, anneal_hardness, export_relu
        >>> model = MLPForClassification(MLPConfig(num_features=3, hidden_size=4, num_hidden_layers=1))
        >>> anneal_hardness(model, 1.0)  # every λ at 159.577, as after hardening
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_relu(model, f"{folder}/relu")
        >>> report.change.agreement, max(gate.swap_error for gate in report.gates.values()) < 0.0011
        (1.0, True)
    """
    model, gates = _exportable(model)
    inputs, are_random = (random_inputs(model), True) if inputs is None else (inputs, False)
    # Entered before the work, which would be lost if the folder could not be written.
    with whole_folder(folder, overwrite=overwrite) as new:
        # 1. A copy gets ReLU. The keys that say so are proved before the copy changes, by building the model from them.
        relu = independent_copy(model).eval()
        sites = find_sites(relu, LEARNED_KINDS)
        config_changes = exchange_activations(relu, sites, list(map(relu_for, sites)), _by_name("relu")).config_changes
        warnings = runtime_warnings(relu)
        # 2. What that changes is measured, and refused if gates are soft.
        change = compare_models(model, relu, inputs)
        soft = {name: gate for name, gate in gates.items() if not gate.swap_error <= max_swap_error}  # nor NaN
        if soft and not allow_soft:
            words = [f"{name}: λ = {gate.hardness:.4g}, κ/λ = {gate.swap_error:.3g}" for name, gate in soft.items()]
            more = f"; and {len(soft) - 8} more" if len(soft) > 8 else ""
            raise ValueError(
                f"{len(soft)} of {len(gates)} gates are too soft for ReLU: the swap changes a unit by up to "
                f"{max(gate.swap_error for gate in soft.values()):.3g}, and {max_swap_error:.3g} is allowed "
                f"({'; '.join(words[:8])}{more}). On {_inputs_in_words(are_random)}: {change}. Harden the model, keep "
                "its function with export_gelu (hf-lgelu export --to gelu), or give `allow_soft`"
            )
        smooth = tuple(find_smooth_calls(relu, inputs))
        report = CheckpointExport(
            str(model.name_or_path), "relu", gates, config_changes, change, warnings, are_random, smooth
        )
        # 3. The folder is written, and loads as the copy.
        save_and_compare(relu, new, inputs, source)
        write_export_card(report, new)
    return report


@in_own_forward
@torch.no_grad()
def export_gelu(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    source: str | os.PathLike | None = None,
    inputs: Inputs | None = None,
    overwrite: bool = False,
) -> CheckpointExport:
    """Save `model` as a GELU (or SiLU) model of the same function, as a checkpoint that needs no hf_lgelu.

    a(x; λ) = gelu(λx)/λ. So weight and bias of the map before a gate are multiplied by λ, and the weight of the map
    after it is divided by λ. Each gate must stand alone between two maps (linear or convolution) on the inputs, as in a
    transformer's block. `model` stays as it is. The other arguments and errors are those of `export_relu`.

    Args:
        inputs: example inputs that run the whole model. None takes random inputs.

    Raises:
        ValueError: a gate does not stand alone between two maps; the message names each gate with the reason. Or gates
            are of several kinds.
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
    model, gates = _exportable(model)
    kinds = list(dict.fromkeys(gate.row for gate in gates.values()))
    if len(kinds) > 1:
        raise ValueError(f"a GELU export needs gates of one kind, got {', '.join(kinds)}; export_relu takes several")
    gate = GATES[kinds[0]]
    inputs, are_random = (random_inputs(model), True) if inputs is None else (inputs, False)
    with whole_folder(folder, overwrite=overwrite) as new:
        plain = independent_copy(model).eval()
        sites = find_sites(plain, LEARNED_KINDS)
        for site, (before, after) in zip(sites, maps_around(plain, inputs), strict=True):
            hardness = site.module.hardness.cpu().double()  # on the CPU: not every device has float64
            for value, factor in ((before.weight, hardness), (before.bias, hardness), (after.weight, 1 / hardness)):
                if value is not None:
                    value.write(plain, value.read(plain).cpu().double() * factor)
        activation, modules = gate.plain_names[0], [gate.plain_module() for _ in sites]
        config_changes = exchange_activations(plain, sites, modules, _by_name(activation)).config_changes
        change = compare_models(model, plain, inputs)
        if not change.largest_change <= _MOST.get(plain.dtype, 0.1) * change.largest_output:  # nor NaN
            raise RuntimeError(
                f"the GELU model computes something else than the λ-GELU model: {change}; no file is kept"
            )
        warnings = runtime_warnings(plain)
        report = CheckpointExport(
            str(model.name_or_path), activation, gates, config_changes, change, warnings, are_random
        )
        save_and_compare(plain, new, inputs, source)
        write_export_card(report, new)
    return report


def _by_name(activation: str) -> Callable[[PreTrainedModel, Iterable[str]], list[ConfigChange]]:
    """The plan of a config that says this activation at the sites, and needs no record (`exchange_activations`)."""
    return lambda root, names: plan_config_changes(root, {*names}, activation) + forget_sites(root.config)


_MOST = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the largest output, by rounding; 0.1 in half precision
_MOVES = COPIES | RESHAPES | {"permute", "transpose"}  # they may stand between: all units of a gate have one λ


def maps_around(model: nn.Module, inputs: Inputs) -> list[tuple[AffineOperation, AffineOperation]]:
    """[(the map before, the map after)] of each λ-gate. Raises ValueError with the reason for gates without these."""
    sites = find_sites(model, LEARNED_KINDS)
    recording = Recording(model, sites, inputs)

    def map_at(node: Node) -> AffineOperation | None:
        """The map of this operation, if nothing else reads its weights."""
        found = read_affine(node, recording) if node.op == "call_function" else None
        return found if found and found.mixes and recording.are_used_once(*found.parameters) else None

    around, reasons = [], []
    for number, site in enumerate(sites):
        calls = recording.calls.get(number, [])
        if len(calls) != 1:
            reasons.append(f"\n  {site.name}: it runs {len(calls)} times")
            continue
        made, value = calls[0].args[0], calls[0]
        while len(made.users) == 1 and operation_name(made) in _MOVES:
            made = made.args[0]
        while len(value.users) == 1 and operation_name(next(iter(value.users))) in _MOVES:
            (value,) = value.users
        before = map_at(made) if len(made.users) == 1 else None
        after = map_at(next(iter(value.users))) if len(value.users) == 1 else None
        if before is None:
            reasons.append(f"\n  {site.name}: its input is not the output of one map with weights of its own")
        elif after is None or after.data is not value:
            reasons.append(f"\n  {site.name}: its output does not go into one map alone, with weights of its own")
        else:
            around.append((before, after))
    if reasons:
        raise ValueError(
            f"{type(model).__name__} cannot become a plain GELU model of the same function: {len(reasons)} of its "
            f"gates do not stand alone between two maps:{''.join(reasons)}\nKeep λ-GELU (save_pretrained), or, once "
            "its gates are hard, make a ReLU model of it with export_relu"
        )
    return around


def _exportable(model: nn.Module) -> tuple[PreTrainedModel, dict[str, GateHardness]]:
    """(the model, not compiled; its λ-gates). Raises the errors of `export_relu` for one that cannot be exported."""
    model = changeable_module(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"an export saves transformers models, got {type(model).__name__}; substitute_relu(model) changes any "
            "module in memory"
        )
    gates = gates_by_site(model)
    if not gates:
        advice = "it has no smooth gate that could be exchanged"
        if smooth := sorted({site.kind for site in find_sites(model)}):
            made = "convert_to_relu(model, data) (hf-lgelu convert) converts these without training"
            advice = f"its gates are {', '.join(smooth)}; {made}"
        raise ValueError(f"{type(model).__name__} has no λ-GELU that an export could replace; {advice}")
    return model, gates
