"""What surgery writes into configs, so that a saved model comes back with the activations that it has."""

from collections.abc import Callable, Iterable

from torch import nn
from transformers import PreTrainedModel

from hf_lgelu.activation.gates import DEFAULT_GATE, FORWARDS
from hf_lgelu.models.config_keys import (
    ConfigChange,
    UnsupportedConfigError,
    apply_changes,
    built_otherwise,
    combined,
    plan_config_changes,
)
from hf_lgelu.models.config_plans import ConfigPlans
from hf_lgelu.models.site_record import (
    describe_sites,
    forget_sites,
    recorded_plain_sites,
    remember_sites,
    without_guard,
)
from hf_lgelu.models.sites import ActivationSite


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
    kinds = {entry.get("gate", DEFAULT_GATE) + FORWARDS[entry.get("forward", "gate")] for entry in record}
    if len(kinds) == 1 and all(entry.get("granularity") == "layer" for entry in record):
        try:
            names = {entry["site"] for entry in record}
            changes = plan_config_changes(root, names, kinds.pop(), apply_changes(root.config, plain))
            return combined(root.config, plain, changes) + forget_sites(root.config)
        except UnsupportedConfigError:
            pass  # then the config remembers the sites themselves
    return remember_sites(root, record)


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
