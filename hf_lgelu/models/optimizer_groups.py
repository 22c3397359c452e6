"""An optimizer whose model has been operated on: parameters that are gone leave it, a new hardness joins it."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from hf_lgelu.activation.hardness import is_number

DEFAULT_LR_MULTIPLIER = 9.0
"""The paper's c."""

HARDNESS_GROUP = "hardness"
"""Value of a parameter group's "group_name" that marks it as the one that holds s."""


def check_rate(name: str, value: float) -> None:
    """Raise a ValueError with the name unless the value is a finite number of at least 0."""
    if not is_number(value) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")


def hardness_group(optimizer: Any) -> dict[str, Any] | None:
    """The optimizer's parameter group that holds s, or None."""
    return next((group for group in optimizer.param_groups if group.get("group_name") == HARDNESS_GROUP), None)


def hardness_options(group: dict[str, Any], multiplier: float) -> dict[str, Any]:
    """What a hardness group has otherwise than the `group` that it comes from: c times its rate, and no decay."""
    options = {"lr": float(multiplier) * group["lr"], "weight_decay": 0.0, "group_name": HARDNESS_GROUP}
    # timm's Muon would take an s of several dimensions for a matrix; other optimizers have no such option.
    return {**options, "use_fallback": True}


def require_no_scheduler(groups: Sequence[dict[str, Any]]) -> None:
    """Raise RuntimeError where a scheduler has taken up the groups: it would not know a new one."""
    if any("initial_lr" in group for group in groups):
        raise RuntimeError(
            "a learning-rate scheduler belongs to the optimizer already and would not know a new group. Give s its "
            "group, or do the surgery, before the scheduler is made, or make both anew after it"
        )


def require_takes_hardness(optimizer: Any) -> None:
    """Raise RuntimeError for an optimizer of torch that accepts a group of s, and cannot make a step with it."""
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps one
    for kind, takes in ((torch.optim.LBFGS, "one group of parameters"), (torch.optim.Muon, "matrices")):
        if isinstance(inner, kind):
            raise RuntimeError(
                f"{kind.__name__} takes {takes} alone, and no raw hardness with a learning rate of its own beside: its "
                "next step would fail. Choose an optimizer with ordinary groups, such as AdamW or SGD, or give s one "
                "beside it"
            )


class OptimizerChange:
    """What an optimizer has to change when its model's modules do. Building it raises; carrying it out does not.

    Args:
        optimizer: holds the model's parameters; also as accelerate has wrapped it.
        model: as it is before the surgery.
        multiplier: c of a hardness group that has to be added.

    Raises:
        ValueError: it holds none of the model's parameters, or the multiplier is out of range.
    """

    def __init__(self, optimizer: Any, model: nn.Module, multiplier: float) -> None:
        check_rate("hardness_lr_multiplier", multiplier)
        own = {id(parameter) for parameter in model.parameters()}
        self._optimizer, self._multiplier = optimizer, multiplier
        self._groups = [group for group in optimizer.param_groups if any(id(p) in own for p in group["params"])]
        if not self._groups:
            raise ValueError(
                "the optimizer holds none of the model's parameters: it belongs to another model, or to this one "
                "before it was wrapped. Make a new optimizer after the surgery"
            )

    def require_room_for_hardness(self) -> None:
        """Raise RuntimeError if the optimizer cannot take up a new hardness."""
        require_takes_hardness(self._optimizer)
        if hardness_group(self._optimizer) is not None:
            return
        if any(group.get("lr") is None for group in self._groups):
            raise RuntimeError(
                f"{type(self._optimizer).__name__} has no learning rate to multiply (relative step sizes); give it one"
            )
        if len({float(group["lr"]) for group in self._groups}) != 1:
            raise RuntimeError(
                "the optimizer's groups have several learning rates, and which of them the new hardness multiplies is "
                "not ours to say. Make a new optimizer from hardness_parameter_groups(...) after the surgery"
            )
        require_no_scheduler(self._groups)

    def carry_out(self, removed: Collection[torch.nn.Parameter], added: Sequence[torch.nn.Parameter]) -> None:
        """Forget the removed parameters, and give the added ones to the hardness group."""
        gone = {id(parameter) for parameter in removed}
        for group in self._optimizer.param_groups:
            keeps = [id(parameter) not in gone for parameter in group["params"]]
            for key in ("params", "param_names") if "param_names" in group else ("params",):
                group[key] = [item for item, kept in zip(group[key], keeps, strict=True) if kept]
        for parameter in removed:
            self._optimizer.state.pop(parameter, None)
        if added:
            self._add(added)

    def _add(self, added: Sequence[torch.nn.Parameter]) -> None:
        names = [f"{HARDNESS_GROUP}.{index}" for index in range(len(added))]
        group = hardness_group(self._optimizer)
        if group is not None:
            group["params"] += added
            if "param_names" in group:
                group["param_names"] += names
            return
        first = self._groups[0]
        options = {name: value for name, value in first.items() if name not in ("params", "param_names")}
        options |= hardness_options(first, self._multiplier)
        entries = list(zip(names, added, strict=True)) if "param_names" in first else list(added)
        self._optimizer.add_param_group({"params": entries, **options})
