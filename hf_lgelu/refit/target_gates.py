"""What the smooth gates may become: gates that transformers knows by name, so that a plain reload builds them.

The solve behind the gates is the same with other features; the reasons differ. ReLU6 and LeakyReLU are what some
accelerators have, HardSwish is the cheaper twin of SiLU, squared ReLU leaves zeros as ReLU does.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from hf_lgelu.models.config_keys import (
    ConfigChange,
    UnsupportedConfigError,
    plan_config_changes,
)
from hf_lgelu.models.config_plans import ConfigPlans
from hf_lgelu.models.example_run import forward_hooks, run_example
from hf_lgelu.models.rebuild import describe_sites, forget_sites, remember_sites
from hf_lgelu.models.sites import ActivationSite, find_sites
from hf_lgelu.models.surgery import require_whole_hardness, substitute_relu
from hf_lgelu.refit.batches import Batch
from hf_lgelu.refit.processes import each_has


@dataclass(frozen=True)
class TargetGate:
    """A gate by its name in transformers.

    Args:
        name: a key of ACT2FN.
        title: what it is called.
        formula: what it computes.
        can_be_placed: whether slope and kink of each channel can be fitted, and units be added that are always on:
            it must be ReLU up to what is linear, and have no upper end.
        has_zeros: whether it is zero below a kink at 0.
        slope: below 0, of a LeakyReLU that is another than transformers' own.
    """

    name: str
    title: str
    formula: str
    can_be_placed: bool = False
    has_zeros: bool = False
    slope: float | None = None

    def make(self) -> nn.Module:
        """A new one."""
        if self.slope is not None:
            return nn.LeakyReLU(self.slope)
        return nn.ReLU() if self.name == "relu" else ACT2FN[self.name]


TARGETS = {
    gate.name: gate
    for gate in (
        TargetGate("relu", "ReLU", "max(z, 0)", can_be_placed=True, has_zeros=True),
        TargetGate("relu6", "ReLU6", "min(max(z, 0), 6)", has_zeros=True),
        TargetGate("leaky_relu", "LeakyReLU", "max(z, 0) + 0.01·min(z, 0)"),
        TargetGate("hardswish", "HardSwish", "z·min(max(z + 3, 0), 6)/6"),
        TargetGate("relu2", "squared ReLU", "max(z, 0)²", has_zeros=True),
    )
}


FITTED_SLOPE = "leaky_relu:fitted"


def check_target(name: str, fitted: Callable[[], float] = lambda: 0.01) -> TargetGate:
    """The row of TARGETS, or LeakyReLU with another slope: "leaky_relu:0.1", or as `fitted` gives it.

    Raises ValueError where there is none of that name.
    """
    if name in TARGETS:
        return TARGETS[name]
    try:
        kind, _, text = str(name).partition(":")
        slope = fitted() if name == FITTED_SLOPE else float(text)
        if kind == "leaky_relu" and 0 <= slope < 1:
            return TargetGate("leaky_relu", f"LeakyReLU({slope:g})", f"max(z, 0) + {slope:g}·min(z, 0)", slope=slope)
    except ValueError:
        pass
    raise ValueError(
        f"target must be one of {', '.join(TARGETS)}, or leaky_relu:SLOPE with a slope from 0 to below 1 or the word "
        f"fitted, got {name!r}"
    )


@torch.no_grad()
def fit_slope(model: nn.Module, kinds: Sequence[str], keep: Sequence[str], batches: Sequence[Batch]) -> float:
    """The slope below 0 of the LeakyReLU that is nearest to a model's gates, in steps of 0.01, the same everywhere.

    Nearest is the least Σ min ‖φ(z) - a·LeakyReLU(z) - b‖² over a and b of every channel, the last axis of the gates'
    inputs or of maps the second, each gate as a share of its own Σ‖φ(z) - mean‖². With LeakyReLU = max(z, 0) +
    s·min(z, 0) all of it follows from the covariances of max(z, 0), min(z, 0) and φ(z). `batches` are those of this
    process; one without any has no say.
    """
    slopes = torch.linspace(0, 0.99, 100, dtype=torch.float64)
    left = torch.zeros_like(slopes)

    seen: list[Tensor] = []

    def before(module: nn.Module, inputs: tuple) -> None:
        seen.append(inputs[0].detach().clone())  # what works in place leaves its output there

    def see(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        nonlocal left
        z, value = (part.movedim(1, -1) if part.ndim > 3 else part for part in (seen.pop(), output))
        z, value = (part.detach().cpu().double().flatten(0, -2) for part in (z, value))
        parts = torch.stack([z.clamp(min=0), z.clamp(max=0), value])
        parts = parts - parts.mean(1, keepdim=True)
        c = torch.einsum("anc,bnc->abc", parts, parts)
        with_value = c[0, 2] + slopes[:, None] * c[1, 2]
        own = c[0, 0] + slopes[:, None] * (2 * c[0, 1] + slopes[:, None] * c[1, 1])
        explained = (with_value.square() / own.clamp(min=1e-30)).sum(-1)
        left = left + (c[2, 2].sum() - explained) / c[2, 2].sum().clamp(min=1e-30)

    gates = dict.fromkeys(site.module for site in find_sites(model, kinds) if site.name not in keep)
    with ExitStack() as hooks:
        for gate in gates:
            hooks.callback(gate.register_forward_pre_hook(before).remove)
        hooks.enter_context(forward_hooks(list(gates), see))
        for batch in batches:
            run_example(model, batch.inputs)
    return round(float(slopes[sum(each_has(left)).argmin()]), 4)


def substitute_gates(
    model: nn.Module,
    target: TargetGate,
    *,
    kinds: Sequence[str],
    rewrite_config: bool = True,
    keep: Sequence[str] = (),
) -> tuple[ConfigChange, ...]:
    """Put the target at every gate of the given kinds but those named in `keep`; the config keys that were rewritten.

    Changes `model` in place. Where no key tells the kept gates from the others, the config remembers them: plain
    transformers then refuses the checkpoint, and `hf_lgelu.from_pretrained` rebuilds it. Raises ValueError where there
    is no gate to exchange, or one that is kept uses the λ of another, and UnsupportedConfigError where no config key
    puts the target there; if there is one for the other gates, the error says which ones to keep.
    """
    sites = find_sites(model, kinds)
    try:
        if target.name == "relu" and not keep:
            return tuple(substitute_relu(model, kinds=kinds, rewrite_config=rewrite_config).config_changes)
        return _substitute(model, target, sites, rewrite_config, keep)
    except UnsupportedConfigError as error:
        if not set(error.missed) < {site.name for site in sites} - set(keep):  # all, or names inside a part of it
            raise
        keep = [*keep, *error.missed]
        raise UnsupportedConfigError(
            f"{error}; or convert the other gates and leave these as they are: keep={keep} (--keep {','.join(keep)})",
            error.missed,
        ) from error


def _substitute(
    model: nn.Module, target: TargetGate, sites: Sequence[ActivationSite], rewrite_config: bool, keep: Sequence[str]
) -> tuple[ConfigChange, ...]:
    require_whole_hardness(model, [site for site in sites if site.name not in keep])
    gates = {site.name: None if site.name in keep else target.make() for site in sites}
    plans = ConfigPlans.of(model, gates, partial(_plan, target=target)) if rewrite_config else ConfigPlans()
    for site in sites:
        gate = gates[site.name]
        if gate is not None:
            site.put(gate)
    return plans.carry_out()


def _plan(root: PreTrainedModel, planned: Mapping[str, nn.Module | None], target: TargetGate) -> list[ConfigChange]:
    """The config changes for the gates of one model, by name; None stands for one that is kept."""
    gates = {name: gate for name, gate in planned.items() if gate is not None}
    if not gates:
        return []
    kept = [name for name, gate in planned.items() if gate is None]
    if target.slope is None:
        try:
            return plan_config_changes(root, set(gates), target.name) + forget_sites(root.config)
        except UnsupportedConfigError:
            if not kept:
                raise
    plain = plan_config_changes(root, set(planned), target.name)
    others = kept if target.slope is None else list(planned)
    return remember_sites(root, describe_sites(root, gates, plain=others), plain)
