"""The names of the λ-gates in transformers' and timm's activation tables, and the MLP in its Auto classes."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, MutableMapping
from typing import TypeAlias

from torch import Tensor, nn

from hf_lgelu.activation.module import GATE_MODULES, LambdaGate, LambdaGELU

NEEDS_THE_PACKAGE = "hf_lgelu.from_pretrained"
"""The value of an activation key where the config alone cannot rebuild the model: a process without this package
refuses the checkpoint, and its error names what is missing."""


_GUARDED = (
    "this model was built from a config that alone cannot build its gates: it would be another network. Load a "
    "checkpoint with from_pretrained, copy a model with copy.deepcopy, or repeat the surgery on the config of before"
)


class GuardedGate(LambdaGELU):
    """What `NEEDS_THE_PACKAGE` builds in a process that has imported this package: a place that computes nothing.

    The config's record says which gate stands there, and `from_pretrained` builds that one.
    """

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(_GUARDED)


Table: TypeAlias = MutableMapping[str, Callable[..., nn.Module]]

_NAMES: dict[str, Callable[..., LambdaGate]] = {**GATE_MODULES, NEEDS_THE_PACKAGE: GuardedGate}


def is_guarded(model: nn.Module) -> bool:
    """Whether a model has a `GuardedGate`."""
    return any(isinstance(module, GuardedGate) for module in model.modules())


def refuse_guarded(model: nn.Module) -> None:
    """Raise RuntimeError for a model with a `GuardedGate`."""
    if is_guarded(model):
        raise RuntimeError(_GUARDED)


_TIMM = "timm.layers.create_act"


def register_activation() -> None:
    """Make each row of GATES, e.g. "lambda_gelu", an activation string of transformers configs and a timm `act_layer`.

    Idempotent. `import hf_lgelu` has both done when transformers and timm are imported, before it or after.
    Raises RuntimeError if another class has one of the names in one of the tables; all are then left as they were.
    """
    if importlib.util.find_spec("timm") is not None:
        importlib.import_module(_TIMM)
    _register({**_transformers_tables(), **_timm_tables()})


def register_in_transformers() -> None:
    """`register_activation` for transformers' tables alone."""
    _register(_transformers_tables())


def register_in_timm() -> None:
    """`register_activation` for timm's table alone; timm has been imported."""
    _register(_timm_tables())


def _register(tables: dict[str, Table]) -> None:
    for table_name, table in tables.items():
        for name, cls in _NAMES.items():
            present = table.get(name)  # of ACT2FN the class; its __getitem__ would build an instance
            if present is not None and present is not cls:
                raise RuntimeError(
                    f"{name!r} is already registered in {table_name} as {present!r}; rename that activation, or "
                    "import hf_lgelu before the code that registers it"
                )
    for table in tables.values():
        table.update(_NAMES)


def _transformers_tables() -> dict[str, Table]:
    # Not at the top: this is called while parts of transformers are being imported.
    from transformers.activations import ACT2CLS, ACT2FN

    # ACT2FN is a copy of ACT2CLS made at import, and some models read the one, some the other.
    return {"transformers.activations.ACT2CLS": ACT2CLS, "transformers.activations.ACT2FN": ACT2FN}


def _timm_tables() -> dict[str, Table]:
    table = timm_activation_classes()
    return {} if table is None else {_TIMM: table}


def timm_activation_classes() -> Table | None:
    """timm's name → activation class table, or None where timm has not been imported: no model has a layer of it.

    timm has no call to register an activation, so this is a private dict of its factory.
    """
    create_act = sys.modules.get(_TIMM)
    if create_act is None:
        return None
    table = getattr(create_act, "_ACT_LAYER_DEFAULT", None)
    if table is None:
        raise RuntimeError(
            f"this timm has no {_TIMM}._ACT_LAYER_DEFAULT, where the λ-gates are registered as an act_layer. Use timm "
            "1.0.26 to 1.0.31, or uninstall timm"
        )
    return table


# What the MLP is made of, in the order in which they import each other, and what each has when it is whole.
_HOSTS = (
    ("transformers.modeling_utils", "PreTrainedModel"),
    ("transformers.models.auto.modeling_auto", "AutoModel"),
    ("transformers.modeling_layers", "GradientCheckpointingLayer"),
)


def register_auto_classes() -> None:
    """Make `AutoConfig` and `AutoModel` build the MLP from a checkpoint; a second call changes nothing.

    Called in the middle of one of transformers' imports, it does nothing: it is called again after that import.

    Not `AutoModelForImageClassification` and not `AutoModelForSequenceClassification`: pipelines that
    look there hand over pixel values or token ids, while this model takes rows of features.
    """
    for module, last_name in _HOSTS:
        if not hasattr(importlib.import_module(module), last_name):
            return
    from transformers import AutoConfig, AutoModel

    from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

    AutoConfig.register(MLPConfig.model_type, MLPConfig, exist_ok=True)
    AutoModel.register(MLPConfig, MLPForClassification, exist_ok=True)
