"""Which gates of a model are exchanged for which target: in its modules and in its config."""

from dataclasses import dataclass
from functools import partial

from torch import nn
from transformers.activations import ACT2FN

from hf_lgelu.models.config_keys import ConfigChange
from hf_lgelu.models.record import plan_gates
from hf_lgelu.models.sites import SMOOTH_KINDS, ActivationSite, check_kinds, computes_same, find_sites
from hf_lgelu.models.surgery import TemporaryRelu, exchange_activations, relu_for
from hf_lgelu.refit.config import SAMPLES_TO_RANK, ConversionConfig, TargetGate
from hf_lgelu.refit.folds import Folds
from hf_lgelu.refit.gate_costs import swap_costs


@dataclass(frozen=True)
class Plan:
    """Which gates of a model become the target: those of the kinds, but for the names in `keep`."""

    kinds: tuple[str, ...]
    keep: tuple[str, ...]
    target: TargetGate
    rewrite_config: bool = True

    def sites(self, model: nn.Module) -> list[ActivationSite]:
        """The gates of a model that are exchanged."""
        return [site for site in find_sites(model, self.kinds) if site.name not in self.keep]

    def plain_swap(self, model: nn.Module) -> TemporaryRelu:
        """A context in which the gates of `model` are the target; no weight changes."""
        make = partial(make_gate, self.target)
        return TemporaryRelu(model, kinds=self.kinds, make=make, include=lambda name: name not in self.keep)

    def carry_out(self, model: nn.Module) -> tuple[ConfigChange, ...]:
        """The config keys rewritten, or the record put there. Changes `model` in place: its gates become the target."""
        sites = self.sites(model)
        gates = [relu_for(site) if self.target.name == "relu" else make_gate(self.target) for site in sites]
        plan = plan_gates if self.rewrite_config else None
        return exchange_activations(model, sites, gates, plan).config_changes


def plan_exchange(model: nn.Module, folds: Folds, config: ConversionConfig) -> Plan:
    """The plan that the options ask for; where `keep` is a number, with the names of the dearest gates.

    A gate that computes the target already stays, too. Raises ValueError where all do.
    """
    kinds, keep = check_kinds(config.kinds or SMOOTH_KINDS), config.keep
    sites, make = find_sites(model, kinds), partial(make_gate, config.gate)
    if isinstance(keep, int) and keep:
        dearest = list(swap_costs(model, folds.some(SAMPLES_TO_RANK), kinds, config.outputs, make=make))[:keep]
        keep = [site.name for site in sites if site.name in dearest]
    done = [site.name for site in sites if site.kind != "prelu" and computes_same(site.module, make())]
    plan = Plan(kinds, tuple(dict.fromkeys([*(keep or ()), *done])), config.gate, config.rewrite_config)
    if len(plan.keep) == len(sites):
        raise ValueError(f"{', '.join(done[:4])}: nothing to convert, computes {config.gate.title} already")
    return plan


def make_gate(target: TargetGate) -> nn.Module:
    """A new module of the target."""
    if target.slope is not None:
        return nn.LeakyReLU(target.slope)
    return nn.ReLU() if target.name == "relu" else ACT2FN[target.name]
