"""Loading what an activation string cannot say, from what the config remembers of it.

`from_pretrained` here builds the model, repeats the surgery that the config's record tells of, and loads the weights in
one go.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import find_adapter_config_file

from hf_lgelu.activation.gates import DEFAULT_GATE, check_gate
from hf_lgelu.activation.module import GATE_MODULES
from hf_lgelu.models.config_keys import write_changes
from hf_lgelu.models.site_record import (
    RECORD_KEY,
    SiteRecord,
    checked_record,
    describe_sites,
    has_record,
    plain_sites,
    recorded_models,
    site_place,
    with_guard,
    without_guard,
)
from hf_lgelu.models.sites import is_activation, kind_of, place

_OF_ADAPTERS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
_WHERE = ("revision", "code_revision", "token", "cache_dir", "local_files_only", "force_download")


def from_pretrained(model_class: Any, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Any:
    """`model_class.from_pretrained(...)` for any checkpoint, with λ-GELU put back where surgery had put it.

    Needed where the activation string alone cannot rebuild the model: granularity "channel", models
    whose config has no activation key, and conversions that kept some gates. For all others it is plain
    `from_pretrained`. As there, a checkpoint may be loaded with another head or without one.

    Args:
        model_class: a PreTrainedModel subclass or one of transformers' Auto classes.
        pretrained_model_name_or_path: folder or Hub id, as for transformers.
        **kwargs: everything that transformers' `from_pretrained` takes (dtype, device_map, revision, ...).

    Raises:
        TypeError: an Auto class does not know the config.
        ValueError: the model has none of the places where the checkpoint has λ-GELU; or it is an adapter of a model
            that has to be loaded first.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, hidden_act="gelu"))
    >>> _ = hf_lgelu.replace_activations(model, granularity="channel", inputs=torch.zeros(1, 4))
    >>> model.save_pretrained("soft")
    >>> loaded = hf_lgelu.from_pretrained(hf_lgelu.MLPForClassification, "soft")
    >>> loaded.layers[0].activation.hardness.shape
    torch.Size([8])
    """
    config = _config(model_class, pretrained_model_name_or_path, kwargs)
    if not has_record(config):
        return model_class.from_pretrained(pretrained_model_name_or_path, **kwargs)
    concrete: Any = _concrete_class(model_class, config, pretrained_model_name_or_path, kwargs)

    class _Rebuilt(concrete):
        def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
            write_changes(config, without_guard(config))
            super().__init__(config, *args, **kwargs)
            for model, record in list(recorded_models(self)):
                _repeat_surgery(model, record)
            held = {id(model.config): model.config for model in self.modules() if isinstance(model, PreTrainedModel)}
            for own in (config, *held.values()):  # some models give their parts copies
                write_changes(own, with_guard(own))

    # transformers reads these when it resolves the checkpoint's files and the model's own code.
    _Rebuilt.__name__, _Rebuilt.__qualname__, _Rebuilt.__module__ = (
        concrete.__name__,
        concrete.__qualname__,
        concrete.__module__,
    )
    kwargs.pop("code_revision", None)  # of the class, which an Auto class does not pass on either
    loaded = _Rebuilt.from_pretrained(pretrained_model_name_or_path, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info=True
    model.__class__ = concrete
    return loaded


def _config(model_class: type, path: str | os.PathLike, kwargs: Mapping[str, Any]) -> PreTrainedConfig:
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        return config
    config_class = getattr(model_class, "config_class", None) or AutoConfig
    shared = (*_WHERE, "subfolder", "trust_remote_code")
    given = {name: kwargs[name] for name in shared if name in kwargs}
    try:
        return config_class.from_pretrained(config or path, **given)
    except (OSError, ValueError):  # there is no config
        adapter = find_adapter_config_file(path, **{name: given[name] for name in _OF_ADAPTERS if name in given})
        if config is not None or adapter is None:
            raise
    # transformers loads an adapter with its base; the base's config says which gates that has.
    with open(adapter, encoding="utf-8") as file:
        base = json.load(file)["base_model_name_or_path"]
    found = config_class.from_pretrained(base, **{name: given[name] for name in given if name != "revision"})
    if has_record(found):
        raise ValueError(
            f"{path} is an adapter of {base}, which has gates that its config alone cannot build. Load that one, "
            f"model = hf_lgelu.from_pretrained(..., {str(base)!r}), and put the adapter on it: "
            f"PeftModel.from_pretrained(model, {str(path)!r})"
        )
    return found


def _repeat_surgery(model: PreTrainedModel, record: SiteRecord) -> None:
    placed = 0
    for entry in checked_record(record):
        parent, attribute = site_place(model, entry["site"])
        if parent is None:
            continue  # it was in a head, and this model has another
        _require_activation(model, entry["site"], getattr(parent, attribute))
        placed += 1
        if "activation" in entry:
            place(parent, attribute, _plain_module(entry))
            continue
        if "shared_with" in entry or "forward" in entry:
            raise ValueError(
                f"the gate at {entry['site']} is one that this version of hf_lgelu has no more (forward='relu', or one "
                "λ for the whole network); load the checkpoint with hf_lgelu 0.2.0, and substitute_relu there"
            )
        gate = check_gate(entry.get("gate", DEFAULT_GATE)).name
        place(parent, attribute, GATE_MODULES[gate](raw_shape=entry.get("raw_shape", (1,))))
    if not placed:
        raise ValueError(
            f"the checkpoint has gates of its own at {', '.join(entry['site'] for entry in record)}, and "
            f"{type(model).__name__} has no module at any of these; load it with the model class that was saved"
        )
    actual = describe_sites(model, plain=plain_sites(record))
    for inner in model.modules():  # some models give each of their parts a copy of the config
        if isinstance(inner, PreTrainedModel) and getattr(inner.config, RECORD_KEY, None) == record:
            setattr(inner.config, RECORD_KEY, actual)


def _plain_module(entry: Mapping[str, Any]) -> nn.Module:
    name, slope = entry["activation"], entry.get("negative_slope")
    if not isinstance(name, str) or name not in ACT2FN or not isinstance(slope, int | float | None):
        raise ValueError(f"the config's record puts {name!r} at {entry['site']}, which is no activation here")
    return ACT2FN[name] if slope is None else nn.LeakyReLU(slope)


def _require_activation(model: nn.Module, name: str, present: nn.Module) -> None:
    if kind_of(present) is None and not is_activation(present):
        raise ValueError(
            f"the config's record puts a gate at {name}, and {type(model).__name__} has {type(present).__name__} "
            "there, which is no activation: the checkpoint is damaged, or of another model class"
        )


def _concrete_class(
    model_class: type, config: PreTrainedConfig, path: str | os.PathLike, kwargs: Mapping[str, Any]
) -> type[PreTrainedModel]:
    if issubclass(model_class, PreTrainedModel):
        return model_class
    mapping = getattr(model_class, "_model_mapping", {})
    if type(config) in mapping:
        found = mapping[type(config)]
        if not isinstance(found, tuple):
            return found
        by_name = {cls.__name__: cls for cls in found}
        return next((by_name[name] for name in config.architectures or () if name in by_name), found[0])
    own_code = (getattr(config, "auto_map", None) or {}).get(model_class.__name__)
    if own_code and kwargs.get("trust_remote_code"):
        return get_class_from_dynamic_module(
            own_code, path, **{name: kwargs[name] for name in _WHERE if name in kwargs}
        )
    raise TypeError(
        f"model_class must be a PreTrainedModel subclass or an Auto class that knows {type(config).__name__}, got "
        f"{model_class!r}" + (". The checkpoint brings its own code: pass trust_remote_code=True" if own_code else "")
    )
