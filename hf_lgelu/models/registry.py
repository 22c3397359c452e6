"""The name "lambda_gelu" in transformers' and timm's activation tables."""

import importlib
import importlib.util
import sys
from collections.abc import MutableMapping

from transformers.activations import ACT2CLS, ACT2FN

from hf_lgelu.activation.module import LambdaGELU

ACTIVATION_NAME = "lambda_gelu"

_TIMM = "timm.layers.create_act"


def register_activation() -> None:
    """Make "lambda_gelu" an activation string of transformers configs and a timm `act_layer`.

    Idempotent. `import hf_lgelu` has both done when transformers and timm are imported, before it or after.
    Raises RuntimeError if another class has the name in one of the tables; all are then left as they were.

    >>> import hf_lgelu
    >>> hf_lgelu.register_activation()
    >>> from transformers.activations import ACT2FN
    >>> ACT2FN["lambda_gelu"]
    LambdaGELU(granularity='layer', raw_shape=(1,), init_hardness=1.05)
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


def _register(tables: dict[str, MutableMapping[str, type]]) -> None:
    for table_name, table in tables.items():
        _check_free(table, table_name)
    for table in tables.values():
        table[ACTIVATION_NAME] = LambdaGELU


def _transformers_tables() -> dict[str, MutableMapping[str, type]]:
    # ACT2FN is a copy of ACT2CLS made at import, and some models read the one, some the other.
    return {"transformers.activations.ACT2CLS": ACT2CLS, "transformers.activations.ACT2FN": ACT2FN}


def _timm_tables() -> dict[str, MutableMapping[str, type]]:
    table = timm_activation_classes()
    return {} if table is None else {_TIMM: table}


def timm_activation_classes() -> MutableMapping[str, type] | None:
    """timm's name → activation class table, or None where timm has not been imported: no model has a layer of it.

    timm has no call to register an activation, so this is a private dict of its factory.
    """
    create_act = sys.modules.get(_TIMM)
    if create_act is None:
        return None
    table = getattr(create_act, "_ACT_LAYER_DEFAULT", None)
    if table is None:
        raise RuntimeError(
            "this timm keeps its activation classes elsewhere than timm.layers.create_act._ACT_LAYER_DEFAULT, so "
            "'lambda_gelu' cannot be registered as an act_layer. Use timm 1.0.26 to 1.0.31, or uninstall timm"
        )
    return table


def _check_free(table: MutableMapping[str, type], table_name: str) -> None:
    # dict.get of ACT2FN returns the class; its __getitem__ would build an instance.
    present = table.get(ACTIVATION_NAME)
    if present is not None and present is not LambdaGELU:
        raise RuntimeError(
            f"{ACTIVATION_NAME!r} is already registered in {table_name} as {present!r}; two activations cannot share "
            "the name. Import hf_lgelu before the code that registers the other, or rename that one"
        )
