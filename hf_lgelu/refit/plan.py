"""Which gates of a model are exchanged for which target: in its modules and in its config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from hf_lgelu.models.config_keys import ConfigChange, UnsupportedConfigError, plan_config_changes
from hf_lgelu.models.exchange import ConfigPlans
from hf_lgelu.models.record import describe_sites, forget_sites, remember_sites
from hf_lgelu.models.sites import SMOOTH_KINDS, ActivationSite, check_kinds, find_sites
from hf_lgelu.models.substitution import TemporaryRelu, put_relu
from hf_lgelu.refit.config import SAMPLES_TO_RANK, ConversionConfig, TargetGate
from hf_lgelu.refit.folds import Folds
from hf_lgelu.refit.gate_costs import swap_costs


@dataclass(frozen=True)
class Plan:
    """Which gates of a model become what.

    Args:
        kinds: rows of SMOOTH_KINDS.
        keep: names of gates that stay.
        target: what the others become.
        rewrite_config: whether the config is to say so.
    """

    kinds: tuple[str, ...]
    keep: tuple[str, ...]
    target: TargetGate
    rewrite_config: bool = True

    def sites(self, model: nn.Module) -> list[ActivationSite]:
        """The gates of a model that are exchanged."""
        return [site for site in find_sites(model, self.kinds) if site.name not in self.keep]

    def direct_swap(self, model: nn.Module) -> TemporaryRelu:
        """A context in which the gates of `model` are the target; no weight changes."""
        make = partial(make_gate, self.target)
        return TemporaryRelu(model, kinds=self.kinds, make=make, include=lambda name: name not in self.keep)

    def carry_out(self, model: nn.Module) -> tuple[ConfigChange, ...]:
        """The config keys rewritten. Changes `model` in place: its gates become the target (`substitute_gates`)."""
        return substitute_gates(
            model, self.target, kinds=self.kinds, rewrite_config=self.rewrite_config, keep=self.keep
        )


def plan_exchange(model: nn.Module, folds: Folds, config: ConversionConfig) -> Plan:
    """The plan that the options ask for; where `keep` is a number, with the names of the dearest gates."""
    kinds, keep = check_kinds(config.kinds or SMOOTH_KINDS), config.keep
    if isinstance(keep, int) and keep:
        costs = swap_costs(
            model, folds.some(SAMPLES_TO_RANK), kinds, config.outputs, make=partial(make_gate, config.gate)
        )
        dearest = list(costs)[:keep]
        keep = [site.name for site in find_sites(model, kinds) if site.name in dearest]
    return Plan(kinds, tuple(keep or ()), config.gate, config.rewrite_config)


def make_gate(target: TargetGate) -> nn.Module:
    """A new module of the target."""
    if target.slope is not None:
        return nn.LeakyReLU(target.slope)
    return nn.ReLU() if target.name == "relu" else ACT2FN[target.name]


def substitute_gates(
    model: nn.Module,
    target: TargetGate,
    *,
    kinds: Sequence[str],
    rewrite_config: bool = True,
    keep: Sequence[str] = (),
) -> tuple[ConfigChange, ...]:
    """Put the target at every gate of the given kinds but those named in `keep`; the config keys that were rewritten.

    Changes `model` in place. Where no key tells the kept gates from the others, the config remembers the kept gates:
    a load rebuilds them where `hf_lgelu` is imported, and is refused elsewhere. Raises ValueError where there
    is no gate to exchange, or one that is kept uses the λ of another, and UnsupportedConfigError where no config key
    puts the target there; if there is one for the other gates, the error says which ones to keep.
    """
    sites = find_sites(model, kinds)
    try:
        if target.name == "relu" and not keep:
            return tuple(put_relu(model, kinds=kinds, rewrite_config=rewrite_config).config_changes)
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
    gates = {site.name: None if site.name in keep else make_gate(target) for site in sites}
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
