"""The names of the λ-gates in transformers' and timm's activation tables."""

import sys
from collections.abc import Callable, MutableMapping

from torch import nn

from hf_lgelu.activation.module import GATE_MODULES, NEEDS_THE_PACKAGE, GuardedGate, LambdaGate

_NAMES: dict[str, Callable[..., LambdaGate]] = {**GATE_MODULES, NEEDS_THE_PACKAGE: GuardedGate}

TIMM, TIMM_TABLE = "timm.layers.create_act", "_ACT_LAYER_DEFAULT"
"""timm has no call to register an activation: a module of timm, and in it the private dict {name: class}."""


def register_activation() -> None:
    """Make each row of GATES, e.g. "lambda_gelu", an activation string of transformers configs and a timm `act_layer`.

    Idempotent. `import hf_lgelu` calls it where transformers or timm is imported, or when it will be. Raises
    RuntimeError if another class has one of the names in one of the tables; all are then left as they were.
    """
    activations, create_act = sys.modules.get("transformers.activations"), sys.modules.get(TIMM)
    if create_act is not None and not hasattr(create_act, TIMM_TABLE):
        raise RuntimeError(
            f"this timm has no {TIMM}.{TIMM_TABLE}, where the λ-gates are registered as an act_layer. Use timm 1.0.27 "
            "to 1.0.31, or uninstall timm"
        )
    # ACT2FN is a copy of ACT2CLS made at import, and some models read the one, some the other.
    tables: dict[str, MutableMapping[str, Callable[..., nn.Module]] | None] = {
        **{f"transformers.activations.{name}": getattr(activations, name, None) for name in ("ACT2CLS", "ACT2FN")},
        TIMM: getattr(create_act, TIMM_TABLE, None),
    }
    there = {name: table for name, table in tables.items() if table is not None}
    for table_name, table in there.items():
        for name, cls in _NAMES.items():
            present = table.get(name)  # of ACT2FN the class; its __getitem__ would build an instance
            if present is not None and present is not cls:
                raise RuntimeError(
                    f"{name!r} is already registered in {table_name} as {present!r}; rename that activation, or "
                    "import hf_lgelu before the code that registers it"
                )
    for table in there.values():
        table.update(_NAMES)
