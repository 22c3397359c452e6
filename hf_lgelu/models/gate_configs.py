"""What surgery writes into configs, so that a saved model comes back with the activations that it has.

It is planned for every model that owns a config, and made once the modules are exchanged. Planning may refuse, so
all of it comes before the first module is touched.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from hf_lgelu.activation.gates import DEFAULT_GATE
from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.models.config_keys import (
    ConfigChange,
    UnsupportedConfigError,
    apply_changes,
    built_as_one,
    built_otherwise,
    combined,
    configs_in,
    plan_config_changes,
    pretrained_roots,
    says_other_activations,
    write_config_changes,
)
from hf_lgelu.models.site_record import (
    describe_sites,
    forget_sites,
    recorded_models,
    recorded_plain_sites,
    remember_sites,
    without_guard,
)
from hf_lgelu.models.sites import ActivationSite, uncompiled_name

Content = TypeVar("Content")


class ConfigPlans:
    """What is to change in the configs of one model; nothing, unless `plan` made it."""

    def __init__(self) -> None:
        self._plans: list[tuple[PreTrainedModel, list[ConfigChange]]] = []

    @classmethod
    def of(
        cls,
        model: nn.Module,
        at_sites: Mapping[str, Content],
        plan: Callable[[PreTrainedModel, dict[str, Content]], list[ConfigChange]],
    ) -> "ConfigPlans":
        """What `plan` makes of each model that owns a config, and of what is at the sites in it by their names there.

        A model without any of the sites is not asked.
        """
        plans = cls()
        for name, root in pretrained_roots(model):
            inside = _inside(name, at_sites)
            if inside:
                plans._plans.append((root, plan(root, inside)))
        return plans

    def carry_out(self) -> tuple[ConfigChange, ...]:
        """Write the changes into the configs."""
        for root, changes in self._plans:
            write_config_changes(root, changes)
        return tuple(change for _, changes in self._plans for change in changes)


def _inside(root_name: str, at_sites: Mapping[str, Content]) -> dict[str, Content]:
    prefix = f"{root_name}." if root_name else ""
    return {
        uncompiled_name(name.removeprefix(prefix)): content
        for name, content in at_sites.items()
        if name.startswith(prefix)
    }


def config_plans(
    model: nn.Module,
    sites: Iterable[ActivationSite],
    modules: Iterable[nn.Module],
    plan: Callable[[PreTrainedModel, dict[str, nn.Module]], list[ConfigChange]],
) -> ConfigPlans:
    """What `plan` says for each model in a tree of the modules that its sites are to have."""
    names = (site.name for site in sites)
    return ConfigPlans.of(model, dict(zip(names, modules, strict=True)), plan)


def plan_gates(root: PreTrainedModel, planned: dict[str, nn.Module]) -> list[ConfigChange]:
    """The changes that say λ-gates: by the activation key where that can say them all, else by a record."""
    plain = without_guard(root.config)
    others = built_otherwise(root, apply_changes(root.config, plain))
    record = describe_sites(root, planned, dict.fromkeys([*recorded_plain_sites(root.config), *others]))
    kinds = {entry.get("gate", DEFAULT_GATE) for entry in record}
    if len(kinds) == 1 and all(entry.get("raw_shape") == [1] for entry in record):
        try:
            names = {entry["site"] for entry in record}
            changes = plan_config_changes(root, names, kinds.pop(), apply_changes(root.config, plain))
            changes = combined(root.config, plain, changes)
            if not _share_a_gate(root, planned, changes, names):
                return changes + forget_sites(root.config)
        except UnsupportedConfigError:
            pass  # then the config remembers the sites themselves
    return remember_sites(root, record)


def _share_a_gate(
    root: PreTrainedModel, planned: dict[str, nn.Module], changes: list[ConfigChange], names: set[str]
) -> bool:
    """Whether the config would build one gate where there are several, each with its λ."""
    there = {uncompiled_name(name): module for name, module in root.named_modules(remove_duplicate=False)} | planned
    groups = built_as_one(root, apply_changes(root.config, changes), names)
    return any(len({id(there[name]) for name in group}) > 1 for group in groups)


def plan_relu(root: PreTrainedModel, planned: dict[str, nn.Module]) -> list[ConfigChange]:
    """The changes that say ReLU. Raises UnsupportedConfigError where no key does."""
    try:
        return plan_config_changes(root, set(planned), "relu") + forget_sites(root.config)
    except UnsupportedConfigError as error:
        raise UnsupportedConfigError(
            f"{error}. Saved and loaded, the model would come back with other activations. To substitute in memory "
            "only, pass rewrite_config=False",
            error.missed,
        ) from error


def require_whole_config(model: PreTrainedModel) -> None:
    """Refuse to save a model of which a part had its activations exchanged by itself: its own config does not say so.

    Raises RuntimeError. What was put in by hand, or with rewrite_config=False, no config of the model says.
    """
    held = {id(config) for config in configs_in(model.config)}
    parts = {
        uncompiled_name(name): part
        for name, part in model.named_modules()
        if isinstance(part, PreTrainedModel) and id(part.config) not in held and _is_told_otherwise(part, model)
    }
    if not parts:  # as of nearly every model: nothing is built to compare it with
        return
    not_told = _not_told(model)
    for prefix, part in parts.items():
        inside = {name.removeprefix(f"{prefix}.") for name in not_told if name.startswith(f"{prefix}.")}
        lost = sorted(inside - _not_told(part)) if inside else []
        if lost:
            raise RuntimeError(
                f"activations of {prefix} ({type(part).__name__}) were exchanged in that part alone (as {lost[0]}), "
                f"and the config of {type(model).__name__}, which is saved, says others there: the checkpoint would be "
                f"another network. Do the surgery on the outermost model, this {type(model).__name__}, and not on its "
                f"part; or set the activation keys of its config to what that of its {prefix} says"
            )


def _is_told_otherwise(part: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Whether the config of a part says other activations than that of the whole, which may have none like it."""
    if any(type(config) is type(part.config) for config in configs_in(model.config)):
        return says_other_activations(part.config, model.config)
    return any(isinstance(module, LambdaGate) for module in part.modules())


def _not_told(model: PreTrainedModel) -> set[str]:
    """Names of the activations and λ-gates that neither the model's config builds nor a record in it tells."""
    built = built_otherwise(model, apply_changes(model.config, without_guard(model.config)))
    held = {id(config) for config in configs_in(model.config)}
    names = {id(module): uncompiled_name(name) for name, module in model.named_modules()}
    told = {
        f"{names[id(inner)]}.{entry['site']}".removeprefix(".")
        for inner, record in recorded_models(model)
        if id(inner.config) in held
        for entry in record
    }
    return {*built} - told
