"""The exchange of activations, whatever takes their place: the sites, the changes of configs, the doing, the report.

The changes of configs are planned first, and made once the modules are exchanged: planning may refuse, and the model
is unchanged then.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from torch import nn
from transformers import PreTrainedModel

from hf_lgelu.models.config_keys import ConfigChange, pretrained_roots, write_config_changes
from hf_lgelu.models.hardening import softest_gate
from hf_lgelu.models.loading import forget_checkpoint
from hf_lgelu.models.optimizer_groups import OptimizerChange
from hf_lgelu.models.sites import KINDS, ActivationSite, find_sites, sites_in_words, uncompiled_name
from hf_lgelu.registry import refuse_guarded

Content = TypeVar("Content")


@dataclass(frozen=True)
class ReplacedSite:
    """One activation that surgery exchanged."""

    name: str
    old: str
    new: str


@dataclass(frozen=True)
class SurgeryReport:
    """The sites that surgery exchanged and the config keys that it rewrote.

    >>> import hf_lgelu
    >>> from torch import nn
    >>> report = hf_lgelu.replace_activations(nn.Sequential(nn.Linear(4, 8), nn.GELU()))
    >>> print(report)
    1 activations replaced
      1: GELU → LambdaGELU
    >>> len(report), report.sites[0].name, report.config_changes
    (1, '1', ())
    """

    sites: tuple[ReplacedSite, ...]
    config_changes: tuple[ConfigChange, ...] = ()
    hardness: dict[str, float] = field(default_factory=dict)
    """{site: its smallest λ} of the λ-gates that ReLU has replaced, and ..."""
    swap_error: dict[str, float] = field(default_factory=dict)
    """... {site: κ/λ}, the most that one unit of each has changed."""

    def __len__(self) -> int:
        return len(self.sites)

    def __str__(self) -> str:
        lines = [f"{len(self.sites)} activations replaced"]
        lines += [f"  {site.name}: {site.old} → {site.new}" for site in self.sites]
        lines += [f"  config {change}" for change in self.config_changes]
        if self.swap_error:
            lines.append(f"  softest gate {softest_gate(self.hardness, self.swap_error)}")
        return "\n".join(lines)


def found_sites(
    model: nn.Module, kinds: Sequence[str], include: Callable[[str], bool] | None = None, *, swap: bool = False
) -> list[ActivationSite]:
    """The activations of these kinds whose names `include` accepts, or a ValueError that names the model's others.

    Raises RuntimeError for a model with gates that its config could not build (`refuse_guarded`).
    """
    refuse_guarded(model)
    sites = [site for site in find_sites(model, kinds) if include is None or include(site.name)]
    if not sites:
        raise ValueError(
            f"{type(model).__name__} has no activation module of kind {', '.join(kinds)}"
            + (" that `include` accepts" if include else "")
            + f"; it has {_what_there_is(model, kinds, swap)}. Calls of functions (F.gelu in a forward) are exchanged "
            "by convert_to_relu alone; hf_lgelu.find_smooth_calls(model, inputs) names the lines; write modules there"
        )
    return sites


def _what_there_is(model: nn.Module, kinds: Sequence[str], swap: bool) -> str:
    there = find_sites(model, KINDS)
    others = tuple(dict.fromkeys(site.kind for site in there if site.kind not in kinds))
    if not there:
        relu = "ReLU already, and " if any(isinstance(module, nn.ReLU) for module in model.modules()) else ""
        return f"{relu}no smooth activation module at all"
    named = sites_in_words(model, KINDS)
    if swap:  # which loses what the network has learned to rely on
        return f"{named}. convert_to_relu(model, data) makes ReLU of these; kinds={others!r} swaps them as is"
    return f"{named}{f' (kinds={others!r} takes them)' if others else ''}"


ConfigPlans: TypeAlias = list[tuple[PreTrainedModel, list[ConfigChange]]]
"""The planned changes of the configs in one model, by the models that own these configs."""


def plan_configs(
    model: nn.Module,
    at_sites: Mapping[str, Content],
    plan: Callable[[PreTrainedModel, dict[str, Content]], list[ConfigChange]] | None,
) -> ConfigPlans:
    """The changes that `plan` gives for each model that owns a config and has one of the sites; without `plan` none.

    `plan` takes that model, and the content at its sites by their names in it.
    """
    plans: ConfigPlans = []
    if plan is None:
        return plans
    for name, root in pretrained_roots(model):
        prefix = f"{name}." if name else ""
        inside = {
            uncompiled_name(site.removeprefix(prefix)): content
            for site, content in at_sites.items()
            if site.startswith(prefix)
        }
        if inside:
            plans.append((root, plan(root, inside)))
    return plans


def write_configs(plans: ConfigPlans) -> tuple[ConfigChange, ...]:
    """The planned changes, made in the configs."""
    for root, changes in plans:
        write_config_changes(root, changes)
    return tuple(change for _, changes in plans for change in changes)


def exchange_activations(
    model: nn.Module,
    sites: Sequence[ActivationSite],
    modules: Sequence[nn.Module],
    plan: Callable[[PreTrainedModel, dict[str, nn.Module]], list[ConfigChange]] | None,
    change: OptimizerChange | None = None,
) -> SurgeryReport:
    """Put the modules in, write the configs, and have the optimizer take up new parameters and drop those gone.

    `plan` says what changes in the configs (`plan_configs`). It may refuse, and the model is unchanged then.
    """
    plans = plan_configs(model, dict(zip((site.name for site in sites), modules, strict=True)), plan)
    before = {id(parameter): parameter for parameter in model.parameters()}
    replaced = put_modules(sites, modules)
    forget_checkpoint(model)
    if change is not None:
        after = {id(parameter): parameter for parameter in model.parameters()}
        change.carry_out(
            [parameter for key, parameter in before.items() if key not in after],
            [parameter for key, parameter in after.items() if key not in before],
        )
    return SurgeryReport(replaced, write_configs(plans))


def put_modules(sites: Sequence[ActivationSite], modules: Sequence[nn.Module]) -> tuple[ReplacedSite, ...]:
    """What was put where: each module at its site."""
    for site, module in zip(sites, modules, strict=True):
        site.put(module)
    return tuple(ReplacedSite(site.name, site.module._get_name(), type(module).__name__)
                 for site, module in zip(sites, modules, strict=True))  # fmt: skip
