"""The config changes of a surgery: planned for every model that owns a config, and made once its modules are exchanged.

Planning may refuse, so all of it comes before the first module is touched.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from hf_lgelu.models.config_keys import ConfigChange, pretrained_roots, write_config_changes
from hf_lgelu.models.sites import uncompiled_name

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
