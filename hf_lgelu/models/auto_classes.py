"""The MLP in transformers' `AutoConfig` and `AutoModel`."""

import importlib

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
