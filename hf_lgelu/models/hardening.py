"""The hardness of a whole model: functions that read λ over depth, set it, anneal it to its target and freeze it.

The callback calls these functions, and any training loop can call them, too.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from hf_lgelu.activation.gates import GATES
from hf_lgelu.activation.hardness import (
    DEFAULT_INIT_HARDNESS,
    DEFAULT_TOLERANCE,
    INIT_MODES,
    LARGEST_HARDNESS,
    check_init_hardness,
    check_temperature,
    effective_hardness,
    hardness_for_tolerance,
    hardness_from_raw,
    raw_from_hardness,
    require_known,
    swap_error_bound,
)
from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.models.copies import require_unflattened, require_values_here
from hf_lgelu.networks.sites import LEARNED_KINDS, find_sites, require_lambda_gelu

HARDENED_FRACTION = 0.5
"""The share of the target from which on a model counts as hardened. In 18 reference runs of the MLPs, no best epoch
that substituted without loss had a smaller λ."""

DEFAULT_HIGH_HARDNESS = 2.0
"""λ at the high end of an initial profile."""

MAX_SWAP_ERROR = swap_error_bound(hardness_for_tolerance() / 2)
"""0.00213 per unit of a gate's output: κ/λ at half the default target, from which on a model counts as hardened."""


@dataclass(frozen=True)
class GateHardness:
    """A λ-gate's row of GATES, its λ, and its λ as it was learned: hardening leaves s as it is.

    >>> from hf_lgelu.models.hardening import GateHardness
    >>> gate = GateHardness("lambda_gelu", hardness=159.577, learned=1.05)
    >>> f"{gate.swap_error:.5f}", gate.is_moved
    ('0.00107', True)
    """

    row: str
    hardness: float
    learned: float

    @property
    def swap_error(self) -> float:
        """κ/λ, the largest change of a unit by ReLU in the gate's place."""
        return swap_error_bound(self.hardness, self.row)

    @property
    def is_moved(self) -> bool:
        """Whether hardening has moved λ away from its learned value."""
        return not math.isclose(self.hardness, self.learned, rel_tol=1e-4)


@torch.no_grad()
def gates_by_site(model: nn.Module) -> dict[str, GateHardness]:
    """{module name: its λ-gate} of every λ-GELU site, in registration order; {} for a model without λ-GELU.

    Under FSDP2 every rank must call it. Raises RuntimeError under FSDP1.
    """
    sites = {site.name: site.module for site in find_sites(model, LEARNED_KINDS)}
    return {
        name: GateHardness(gate.row, *(whole_hardness(gate, learned=learned).item() for learned in (False, True)))
        for name, gate in ({"": model} if isinstance(model, LambdaGate) else sites).items()
    }


def hardness_profile(model: nn.Module) -> dict[str, float]:
    """{module name: λ} of every λ-GELU site, in registration order.

    Under FSDP2 every rank must call it. Raises ValueError for a model without λ-GELU, and RuntimeError under FSDP1.
    """
    require_lambda_gelu(model)
    return {name: gate.hardness for name, gate in gates_by_site(model).items()}


def softest_gate(gates: Mapping[str, GateHardness]) -> str:
    """The gate that ReLU changes most, and its change, in words."""
    # Not only by λ: a gate of another form is harder at the same λ.
    name, gate = max(gates.items(), key=lambda pair: (pair[1].swap_error, -pair[1].hardness))
    return f"{name}: λ = {gate.hardness:.6g}, at most {gate.swap_error:.3g} a unit"


@torch.no_grad()
def initialize_hardness(
    model: nn.Module,
    init_mode: str = "uniform",
    init_hardness: float = DEFAULT_INIT_HARDNESS,
    high_hardness: float = DEFAULT_HIGH_HARDNESS,
    *,
    temperature: float | None = None,
) -> dict[str, float]:
    """Set the initial λ of every site by one of the paper's init modes, and lift any hardening override.

    Changes `model` in place.

    Args:
        model: a model with λ-GELU sites.
        init_mode: "uniform" (every λ = `init_hardness`), "increasing" (linear in λ from `init_hardness` at the
            first site to `high_hardness` at the last) or "decreasing" (the reverse).
        init_hardness: λ₀, above 1.
        high_hardness: the high end of the other two modes; "uniform" has none.
        temperature: t of every site from now on; None keeps each one's own.

    Returns {module name: λ} in the order of registration. No λ changes if a call is refused: for a model without λ-GELU
    or with values that cannot be set, or an argument out of range.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    >>> hf_lgelu.initialize_hardness(model, "increasing", init_hardness=1.0067, high_hardness=2.0)
    {'layers.0.activation': 1.0067, 'layers.1.activation': 2.0}
    """
    require_known("init mode", init_mode, INIT_MODES)
    low, high = check_init_hardness(init_hardness), check_init_hardness(high_hardness)
    if init_mode == "uniform":
        high = low
    elif low > high:
        raise ValueError(
            f"init_hardness must not exceed high_hardness, got init_hardness={low} and high_hardness={high}"
        )
    gates = _gates_in_memory(model)
    first, last = (high, low) if init_mode == "decreasing" else (low, high)
    values = [first + (last - first) * i / max(len(gates) - 1, 1) for i in range(len(gates))]
    given = None if temperature is None else torch.tensor(check_temperature(temperature))  # in float32, like t
    temperatures = [float(module.temperature if given is None else given) for _, module in gates]
    raw = [raw_from_hardness(value, t) for value, t in zip(values, temperatures, strict=True)]
    for (_, module), s, t in zip(gates, raw, temperatures, strict=True):
        torch.nn.init.constant_(module.temperature, t)
        torch.nn.init.constant_(module.raw_hardness, s)
        torch.nn.init.zeros_(module.hardness_override)
    return {name: value for (name, _), value in zip(gates, values, strict=True)}


def _gates_in_memory(model: nn.Module) -> list[tuple[str, LambdaGate]]:
    """Every λ-gate. Raises an error if there is none, or if accelerate or FSDP1 keeps values of one elsewhere."""
    gates = require_lambda_gelu(model)
    require_values_here(gates)
    require_unflattened(gates)
    return gates


def whole_hardness(gate: LambdaGate, *, learned: bool = False) -> Tensor:
    """λ of a gate, of shape (1,), also where FSDP2 has sharded the gate or accelerate keeps its values elsewhere.

    With `learned`, λ follows only from s, as if hardening had not begun.
    """
    require_unflattened([("", gate)])
    with align_module_device(gate):
        # Each by itself: under FSDP2, s is a distributed tensor, and the override is not.
        override = whole_tensor(gate.hardness_override)
        s, temperature = (whole_tensor(value).to(override.device) for value in (gate.raw_hardness, gate.temperature))
        return hardness_from_raw(s, temperature) if learned else effective_hardness(s, temperature, override)


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor, whole on every rank. FSDP2 shards it, and most ranks hold nothing of a shape (1,)."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


DEFAULT_SWITCH_FRACTION = 0.25
"""The paper's share of training in which λ is still learned."""

SCHEDULES: dict[str, Callable[[Any, Any, float], Any]] = {
    # Equal steps in λ: the paper's Algorithm 1.
    "linear": lambda start, target, progress: start + (target - start) * progress,
    # Equal factors of λ: the gate's width shrinks evenly in the logarithm.
    "geometric": lambda start, target, progress: start * (target / start) ** progress,
}
"""The shapes of the way from λ(e_s) to the target, one row each: (start, target, progress) → λ."""


def _require(name: str, value: float, is_inside: bool, interval: str) -> None:
    if not is_inside:
        raise ValueError(f"{name} must lie in {interval}, got {value!r}")


def scheduled_hardness(schedule: str, start: Any, target: float, progress: float) -> Any:
    """λ at `progress` ∈ [0, 1] of the way from `start` to `target`; at 1 it is `target` exactly."""
    require_known("schedule", schedule, SCHEDULES)
    _require("progress", progress, 0 <= progress <= 1, "[0, 1]")
    if progress == 1:
        return start * 0 + target  # in the shape and dtype of `start`
    return SCHEDULES[schedule](start, target, float(progress))


def switch_position(total: int, switch_fraction: float) -> int:
    """e_s = ⌊switch_fraction·T⌋: the last epoch (or step) in which λ is learned."""
    _require("switch_fraction", switch_fraction, 0 <= switch_fraction < 1, "[0, 1)")
    # 0.29 · 100 is 28.999999999999996 in floating point and means 29.
    switch = math.floor(switch_fraction * total * (1 + 1e-12))
    return min(switch, total - 1)  # the last epoch is always at the target


def hardening_progress(position: int, total: int, switch_fraction: float = DEFAULT_SWITCH_FRACTION) -> float | None:
    """(e − e_s)/(T − e_s) for the epoch (or step) number e = `position`, counted from 1 to T = `total`.

    None up to e_s, while λ is learned; 1 at e = T. The paper's Algorithm 1.
    Raises ValueError for a position outside training or a fraction outside [0, 1).

    >>> import hf_lgelu
    >>> from hf_lgelu.models.hardening import hardening_progress
    >>> [hardening_progress(epoch, 8) for epoch in range(1, 9)]
    [None, None, 0.16666666666666666, 0.3333333333333333, 0.5, 0.6666666666666666, 0.8333333333333334, 1.0]
    """
    _require("position", position, 1 <= position <= total, f"[1, {total}]")
    switch = switch_position(total, switch_fraction)
    return None if position <= switch else (position - switch) / (total - switch)


@torch.no_grad()
def anneal_hardness(
    model: nn.Module,
    progress: float,
    *,
    target_hardness: float | Mapping[str, float] | None = None,
    schedule: str = "linear",
) -> None:
    """Set every λ to its place on the way from λ(s) to the target; s keeps the value that it has learned.

    Changes `model` in place: λ goes into each gate's buffer `hardness_override`. λ(e) follows from s, `progress` and
    the schedule, so a resumed run needs nothing else. From the first call on, λ no longer follows s, and the gradient
    of s is exactly 0. Call `freeze_hardness` before each optimizer step.

    Args:
        model: an unwrapped model with λ-GELU sites.
        progress: (e − e_s)/(T − e_s) ∈ [0, 1], see `hardening_progress`.
        target_hardness: λ at progress 1: one for all, or a mapping from rows of GATES or names of modules. By default
            it is each gate's `hardness_for_tolerance()`, 159.577 for λ-GELU.
        schedule: a row of SCHEDULES.

    No λ moves if the call is refused, as in `initialize_hardness`.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    >>> hf_lgelu.anneal_hardness(model, 0.5, target_hardness=101.05)
    >>> [round(value, 2) for value in hf_lgelu.hardness_profile(model).values()]
    [51.05, 51.05]
    """
    target_of = target_of_each(model, target_hardnesses(target_hardness))
    annealed = []
    for _, gate in _gates_in_memory(model):
        # FSDP2 may keep s on another device than buffers (CPU offload).
        s, temperature = (
            whole_tensor(value).to(gate.hardness_override.device).double()
            for value in (gate.raw_hardness, gate.temperature)
        )
        start = hardness_from_raw(s, temperature)  # s stands still, so the way begins at the same λ each time
        annealed.append((gate, scheduled_hardness(schedule, start, target_of[id(gate)], progress)))
    for gate, hardness in annealed:
        gate.hardness_override.copy_(hardness)


def freeze_hardness(model: nn.Module) -> None:
    """Keep the optimizer from moving any s. Call this between backward and the optimizer step.

    Changes `model` in place (the gradients of s). A gradient of exactly 0 is not enough, since momentum would go on
    moving s. Without a gradient an optimizer skips a parameter. `requires_grad` stays True, because DDP's reducer waits
    for s.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    >>> optimizer = torch.optim.AdamW(hf_lgelu.hardness_parameter_groups(model, learning_rate=1e-3))
    >>> hf_lgelu.anneal_hardness(model, 1.0)
    >>> model(torch.ones(2, 4)).logits.sum().backward()
    >>> hf_lgelu.freeze_hardness(model)
    >>> optimizer.step()  # moves only the weights
    >>> print(model.layers[0].activation.raw_hardness.grad)
    None
    """
    for _, module in require_lambda_gelu(model):
        for parameter in module.parameters():  # s, or the parameters of its parametrization
            parameter.grad = None


@torch.no_grad()
def release_hardness(model: nn.Module) -> None:
    """Let λ follow s again. Changes `model` in place; no λ moves if the call is refused."""
    for _, module in _gates_in_memory(model):
        module.hardness_override.zero_()  # 0: λ follows s


def is_hardened(model: nn.Module, target_hardness: float | Mapping[str, float] | None = None) -> bool:
    """Whether every λ has reached half of its target: then a substitution costs next to nothing."""
    return smallest_soft_hardness(model, target_hardness) is None


@torch.no_grad()
def smallest_soft_hardness(
    model: nn.Module, target_hardness: float | Mapping[str, float] | None = None
) -> float | None:
    """The smallest λ below half of its target; None if none is below."""
    target_of = target_of_each(model, target_hardnesses(target_hardness))
    soft = []
    for _, module in require_lambda_gelu(model):
        hardness = whole_hardness(module)
        if not hardness >= HARDENED_FRACTION * target_of[id(module)]:  # NaN is soft
            soft.append(hardness.item())
    return min(soft, default=None)


def target_of_each(model: nn.Module, targets: Mapping[str, float]) -> dict[int, float]:
    """{id of a λ-gate: its target}; a target by name comes before a target by row of GATES."""
    modules = dict(require_lambda_gelu(model))
    if unknown := sorted(targets.keys() - modules.keys() - GATES.keys()):
        raise ValueError(
            f"target_hardness names {', '.join(unknown)}, which is no row of GATES and no λ-gate of "
            f"{type(model).__name__}; it has {', '.join(modules)}"
        )
    return {id(module): targets[name if name in targets else module.row] for name, module in modules.items()}


def target_hardnesses(
    target_hardness: float | Mapping[str, float] | None = None, tolerance: float | None = None
) -> dict[str, float]:
    """{row of GATES, or name of a gate: its target}: the given targets, or each row's target for the tolerance.

    Raises ValueError if both are given or a number is out of range.
    """
    if target_hardness is not None and tolerance is not None:
        raise ValueError(
            f"give target_hardness or tolerance, not both (got {target_hardness} and {tolerance}): "
            "the tolerance ε stands for a target, 2/(ε√(2π)) for λ-GELU"
        )
    given: Mapping[str, float] = {}
    if target_hardness is not None:
        given = target_hardness if isinstance(target_hardness, Mapping) else dict.fromkeys(GATES, target_hardness)
    for end in given.values():
        if not 1 < end <= LARGEST_HARDNESS:
            raise ValueError(
                f"target_hardness must be a finite number > 1 within float32's range, got {end!r}; "
                "hardness_for_tolerance(tolerance) gives it"
            )
    by_tolerance = {
        name: hardness_for_tolerance(DEFAULT_TOLERANCE if tolerance is None else tolerance, name) for name in GATES
    }
    return by_tolerance | {name: float(end) for name, end in given.items()}
