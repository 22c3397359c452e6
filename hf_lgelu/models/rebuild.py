"""Saving and loading what an activation string cannot say: several λ per layer, or only some sites.

Surgery then writes the sites and the shapes of their hardness into the config, under "lambda_gelu".
`from_pretrained` here builds the model, repeats the surgery and loads the weights in one go.
"""

import os
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_lgelu.activation.module import LambdaGELU, SharedLambdaGELU
from hf_lgelu.models.config_keys import ConfigChange

_KEY = "lambda_gelu"


def remember_sites(
    config: PreTrainedConfig, granularity: str, shapes: dict[str, tuple[int, ...]]
) -> list[ConfigChange]:
    """The config change that records which sites hold λ-GELU and the shape of each one's s."""
    record = {"granularity": granularity, "sites": {name: list(shape) for name, shape in shapes.items()}}
    return [ConfigChange((_KEY,), getattr(config, _KEY, None), record)]


def forget_sites(config: PreTrainedConfig) -> list[ConfigChange]:
    """The config change that removes such a record; empty if there is none."""
    record = getattr(config, _KEY, None)
    return [] if record is None else [ConfigChange((_KEY,), record, None)]


def from_pretrained(model_class: type, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Any:
    """`model_class.from_pretrained(...)` for any checkpoint, with λ-GELU put back where surgery had put it.

    Needed where the activation string alone cannot rebuild the model: granularity "channel", "neuron"
    or "network", and models whose config has no activation key. For all others it is plain
    `from_pretrained`.

    Args:
        model_class: a PreTrainedModel subclass or one of transformers' Auto classes.
        pretrained_model_name_or_path: folder or Hub id, as for transformers.
        **kwargs: everything that transformers' `from_pretrained` takes (dtype, device_map, revision, ...).
    """
    config = kwargs.get("config")
    if config is None:
        shared = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "force_download")
        config = AutoConfig.from_pretrained(
            pretrained_model_name_or_path, **{name: kwargs[name] for name in shared if name in kwargs}
        )
    record = getattr(config, _KEY, None)
    if not record:
        return model_class.from_pretrained(pretrained_model_name_or_path, **kwargs)
    concrete = _concrete_class(model_class, config)

    class _Rebuilt(concrete):
        def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            _repeat_surgery(self, record)

    # transformers reads these when it resolves the checkpoint's files and the model's own code.
    _Rebuilt.__name__, _Rebuilt.__qualname__, _Rebuilt.__module__ = (
        concrete.__name__,
        concrete.__qualname__,
        concrete.__module__,
    )
    loaded = _Rebuilt.from_pretrained(pretrained_model_name_or_path, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info=True
    model.__class__ = concrete
    return loaded


def _repeat_surgery(model: nn.Module, record: dict[str, Any]) -> None:
    owner: LambdaGELU | None = None
    for name, shape in record["sites"].items():
        parent_name, _, attribute = name.rpartition(".")
        parent = _submodule(model, parent_name)
        if parent is None or not isinstance(getattr(parent, attribute, None), nn.Module):
            raise ValueError(
                f"the checkpoint has a λ-GELU at {name!r}, and {type(model).__name__} has no module there; load it "
                "with the model class that was saved"
            )
        if record["granularity"] == "network" and owner is not None:
            setattr(parent, attribute, SharedLambdaGELU(owner))
            continue
        owner = LambdaGELU(granularity=record["granularity"], raw_shape=shape)
        setattr(parent, attribute, owner)


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _concrete_class(model_class: type, config: PreTrainedConfig) -> type[PreTrainedModel]:
    if issubclass(model_class, PreTrainedModel):
        return model_class
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is None or type(config) not in mapping:
        raise TypeError(
            f"model_class must be a PreTrainedModel subclass or an Auto class that knows {type(config).__name__}, got "
            f"{model_class!r}"
        )
    found = mapping[type(config)]
    if not isinstance(found, tuple):
        return found
    by_name = {cls.__name__: cls for cls in found}
    return next((by_name[name] for name in config.architectures or () if name in by_name), found[0])
