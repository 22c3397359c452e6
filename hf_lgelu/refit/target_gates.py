"""What the smooth gates may become: gates that transformers knows by name, so that a plain reload builds them.

The solve behind the gates is the same with other features; the reasons differ. ReLU6 and LeakyReLU are what some
accelerators have, HardSwish is the cheaper twin of SiLU, squared ReLU leaves zeros as ReLU does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from hf_lgelu.models.config_keys import (
    ConfigChange,
    UnsupportedConfigError,
    plan_config_changes,
    pretrained_roots,
    write_config_changes,
)
from hf_lgelu.models.rebuild import describe_sites, forget_sites, remember_sites
from hf_lgelu.models.sites import find_sites, uncompiled_name
from hf_lgelu.models.surgery import substitute_relu


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
    """

    name: str
    title: str
    formula: str
    can_be_placed: bool = False
    has_zeros: bool = False

    def make(self) -> nn.Module:
        """A new one."""
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


def check_target(name: str) -> TargetGate:
    """The row of TARGETS. Raises ValueError where there is none of that name."""
    if name not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]


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
    is no gate to exchange, and UnsupportedConfigError where no config key puts the target there.
    """
    if target.name == "relu" and not keep:
        return tuple(substitute_relu(model, kinds=kinds, rewrite_config=rewrite_config).config_changes)
    sites = find_sites(model, kinds)
    gates = {site.name: target.make() for site in sites if site.name not in keep}
    planned = []
    for name, root in pretrained_roots(model) if rewrite_config else []:
        prefix = f"{name}." if name else ""
        inside = {uncompiled_name(site.removeprefix(prefix)): gates.get(site) for site in (s.name for s in sites)
                  if site.startswith(prefix)}  # fmt: skip
        if any(inside.values()):
            planned.append((root, _plan(root, inside, target)))
    for site in sites:
        if site.name in gates:
            site.put(gates[site.name])
    for root, changes in planned:
        write_config_changes(root, changes)
    return tuple(change for _, changes in planned for change in changes)


def _plan(root: PreTrainedModel, planned: Mapping[str, nn.Module | None], target: TargetGate) -> list[ConfigChange]:
    """The config changes for the gates of one model, by name; None stands for one that is kept."""
    gates = {name: gate for name, gate in planned.items() if gate is not None}
    kept = [name for name, gate in planned.items() if gate is None]
    try:
        return plan_config_changes(root, set(gates), target.name) + forget_sites(root.config)
    except UnsupportedConfigError:
        if not kept:
            raise
    plain = plan_config_changes(root, set(planned), target.name)
    return remember_sites(root, describe_sites(root, gates, plain=kept), plain)
