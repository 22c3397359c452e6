"""The hardness of a whole model: reading it as a profile over depth, and setting it."""

from typing import Any

import torch
from accelerate.utils import align_module_device, has_offloaded_params
from torch import Tensor, nn

from hf_lgelu.activation.hardness import (
    DEFAULT_INIT_HARDNESS,
    check_temperature,
    effective_hardness,
    hardness_for_tolerance,
    init_profile,
    raw_from_hardness,
    swap_error_bound,
)
from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.models.example_run import Inputs, forward_hooks, run_example
from hf_lgelu.models.operable import require_unflattened, require_values_here
from hf_lgelu.models.sites import LEARNED_KINDS, find_sites, raw_parameters, require_lambda_gelu

DEFAULT_HIGH_HARDNESS = 2.0
"""λ at the high end of an initial profile."""

MAX_SWAP_ERROR = swap_error_bound(hardness_for_tolerance() / 2)
"""0.00213 per unit of a gate's output: every λ at half the default target or above, from where on a checkpoint
counts as hardened."""


@torch.no_grad()
def hardness_profile(model: nn.Module) -> dict[str, float]:
    """{module name: λ} of every λ-GELU site, in registration order.

    A site with several λ (granularity "channel") shows their mean; `module.hardness` has each.
    Under FSDP2 every rank must call it. Raises ValueError for a model without λ-GELU, and RuntimeError under FSDP1.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    >>> {name: round(value, 4) for name, value in hf_lgelu.hardness_profile(model).items()}
    {'layers.0.activation': 1.05, 'layers.1.activation': 1.05}
    """
    require_lambda_gelu(model)
    if isinstance(model, LambdaGate):
        return {"": known_hardness(model).mean().item()}
    sites = find_sites(model, LEARNED_KINDS)
    gates = {id(site.module): site.module for site in sites}
    by_device: dict[torch.device, dict[int, Tensor]] = {}  # one transfer from each device, not one per site
    for key, gate in gates.items():
        mean = known_hardness(gate).mean()
        by_device.setdefault(mean.device, {})[key] = mean
    values: dict[int, float] = {}
    for means in by_device.values():
        values.update(zip(means, torch.stack(list(means.values())).tolist(), strict=True))
    return {site.name: values[id(site.module)] for site in sites}


@torch.no_grad()
def smallest_hardness(model: nn.Module) -> float:
    """The smallest λ of the model, over all sites and all elements of each."""
    return min(known_hardness(module).min().item() for _, module in require_lambda_gelu(model))


@torch.no_grad()
def smallest_by_site(model: nn.Module) -> dict[str, float]:
    """{module name: its smallest λ} of every λ-gate's site, in registration order."""
    sites = find_sites(model, LEARNED_KINDS)
    return {site.name: known_hardness(site.module).min().item() for site in sites}


def mean_of_several(model: nn.Module) -> dict[str, float]:
    """{module name: mean λ} of the λ-gates' sites that have several λ (granularity "channel").

    Raises ValueError for a model without λ-GELU.
    """
    means = hardness_profile(model)
    sites = find_sites(model, LEARNED_KINDS)
    return {site.name: means[site.name] for site in sites if site.module.raw_hardness.numel() > 1}


def gate_names(model: nn.Module) -> dict[str, str]:
    """{module name: what a config calls its gate, a row of GATES} of every λ-gate's site, in order."""
    return {site.name: site.kind for site in find_sites(model, LEARNED_KINDS)}


def swap_errors(model: nn.Module, smallest: dict[str, float] | None = None) -> dict[str, float]:
    """{module name: κ/λ} of every λ-gate's site, by its smallest λ: the most that ReLU in its place changes a unit.

    `smallest` is `smallest_by_site(model)` where that is known.
    """
    smallest = smallest_by_site(model) if smallest is None else smallest
    return {site.name: swap_error_bound(smallest[site.name], site.kind) for site in find_sites(model, LEARNED_KINDS)}


def softest_gate(hardness: dict[str, float], swap_error: dict[str, float]) -> str:
    """In words, which gate ReLU changes most, and by how much; of {site: its smallest λ} and {site: κ/λ}."""
    # Not by λ alone: a gate of another form is harder at the same λ.
    site = max(swap_error, key=lambda name: (swap_error[name], -hardness[name]))
    return f"{site}: λ = {hardness[site]:.6g}, at most {swap_error[site]:.3g} a unit"


@torch.no_grad()
def initialize_hardness(
    model: nn.Module,
    init_mode: str = "uniform",
    init_hardness: float = DEFAULT_INIT_HARDNESS,
    high_hardness: float = DEFAULT_HIGH_HARDNESS,
    *,
    temperature: float | None = None,
    inputs: Inputs | None = None,
) -> dict[str, float]:
    """Set the initial λ of every site by one of the paper's init modes, and lift any hardening override.

    Changes `model` in place.

    Args:
        model: has λ-GELU sites.
        init_mode: "uniform" (every λ = `init_hardness`), "increasing" (linear in λ from `init_hardness` at the
            first site to `high_hardness` at the last) or "decreasing" (the reverse).
        init_hardness: λ₀, above 1.
        high_hardness: the high end of the other two modes; "uniform" has none.
        temperature: t of every site from now on; None keeps each one's own.
        inputs: run once to learn in which order the activations are called. Without them the
            order is that of registration, which is the same in nearly every published architecture.

    Returns:
        {module name: λ} in the order used.

    Raises:
        ValueError: no λ-GELU, an unknown mode, a λ or t out of range, a high end for "uniform", or example inputs that
            never reach a site. No λ has then changed.
        RuntimeError: accelerate keeps the values of a gate elsewhere (`device_map`), or FSDP1 has flattened its s.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    >>> hf_lgelu.initialize_hardness(model, "increasing", init_hardness=1.0067, high_hardness=2.0)
    {'layers.0.activation': 1.0067, 'layers.1.activation': 2.0}
    """
    if init_mode == "uniform" and high_hardness != DEFAULT_HIGH_HARDNESS:
        raise ValueError(
            f"high_hardness={high_hardness} is the high end of 'increasing' and 'decreasing', and 'uniform' sets every "
            f"λ to init_hardness, {init_hardness}. Name the mode, or leave high_hardness out"
        )
    owners = _in_execution_order(model, inputs)
    require_values_here(owners)
    require_unflattened(owners)
    values = init_profile(init_mode, len(owners), init_hardness, high_hardness)
    for (_, module), value in zip(owners, values, strict=True):
        if temperature is not None:
            torch.nn.init.constant_(module.temperature, check_temperature(temperature))
        raw_hardness = raw_from_hardness(value, float(module.temperature))
        if raw_parameters(module)[0] is module.raw_hardness:
            torch.nn.init.constant_(module.raw_hardness, raw_hardness)
        else:  # parametrized: assigned, it goes back through the parametrization
            module.raw_hardness = torch.full_like(module.raw_hardness, raw_hardness)
        torch.nn.init.zeros_(module.hardness_override)
    return {name: value for (name, _), value in zip(owners, values, strict=True)}


def _in_execution_order(model: nn.Module, inputs: Inputs | None) -> list[tuple[str, LambdaGate]]:
    owners = require_lambda_gelu(model)
    if inputs is None:
        return owners
    first_call: dict[int, int] = {}

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        first_call.setdefault(id(module), len(first_call))

    with forward_hooks([module for _, module in owners], note):
        run_example(model, inputs)
    silent = [name for name, module in owners if id(module) not in first_call]
    if silent:
        raise ValueError(f"the example inputs never reach {', '.join(silent)}; give inputs that run the whole model")
    return sorted(owners, key=lambda item: first_call[id(item[1])])


def known_hardness(gate: LambdaGate) -> Tensor:
    """Every λ of a gate, also where FSDP2 has sharded it, or accelerate keeps its values elsewhere (`device_map`)."""
    require_unflattened([("", gate)])
    with align_module_device(gate):
        # Each by itself: of FSDP2's, s is a distributed tensor, and the override is none.
        override = whole_tensor(gate.hardness_override)
        s, temperature = (whole_tensor(value).to(override.device) for value in (gate.raw_hardness, gate.temperature))
        return effective_hardness(s, temperature, override)


def has_values(gate: LambdaGate) -> bool:
    """Whether a gate's λ can be read: not of a module on the device "meta" whose values nobody keeps."""
    return has_offloaded_params(gate) or not any(parameter.is_meta for parameter in gate.parameters())


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, or, on every rank, the whole of what FSDP2 has sharded: of (1,) most ranks hold nothing."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
