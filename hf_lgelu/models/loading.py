"""`from_pretrained`, which alone rebuilds a checkpoint with gates that no config key says.

transformers builds a network from its config, and then fills in the tensors of the checkpoint. The config builds the
network without the gates in its record (`record.py`). While `from_pretrained` runs, extended methods of transformers
put these gates in before the tensors come.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

import hf_lgelu.models.mlp  # noqa: F401 which the Auto classes then know
from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.models.config_keys import without_guard, write_changes
from hf_lgelu.models.record import VARIANT, has_record, rebuild_gates, recorded_models

_OPEN = threading.RLock()  # the methods are those of the whole process


def from_pretrained(model_class: Any, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Any:
    """`model_class.from_pretrained(...)`, which also rebuilds the gates in the config's record.

    A record has gates at some sites only, gates of a family without an activation key, or gates that a conversion kept.
    `model_class` is a class of transformers, an Auto class, or a class that loads models of transformers:
    AutoPeftModel, SentenceTransformer. As in transformers, a checkpoint may be loaded with another head or without one.
    Threads take turns, because methods of transformers are extended while a load runs.

    Raises ValueError for a model without a place for the checkpoint's gates, for a checkpoint without their λ, and for
    a damaged record.

    >>> import torch, hf_lgelu
    >>> config = hf_lgelu.MLPConfig(num_features=4, num_hidden_layers=2, hidden_act="gelu")
    >>> model = hf_lgelu.MLPForClassification(config)
    >>> _ = hf_lgelu.replace_activations(model, gate="lambda_silu", include="layers.0.activation".__eq__)
    >>> model.save_pretrained("soft")
    >>> loaded = hf_lgelu.from_pretrained(hf_lgelu.MLPForClassification, "soft")
    >>> [type(layer.activation).__name__ for layer in loaded.layers]
    ['LambdaSiLU', 'GELUActivation']
    """
    with _OPEN, _gates_put_in():
        load = getattr(model_class, "from_pretrained", model_class)  # a SentenceTransformer loads in its constructor
        return load(pretrained_model_name_or_path, **kwargs)


@contextmanager
def _gates_put_in() -> Iterator[None]:
    """A block in which transformers builds models with the gates of their records."""
    extensions: dict[str, Callable[..., Any]] = {
        "from_pretrained": _require_hardness,
        "__init__": _note_construction,
        "get_init_context": _with_gates_rebuilt,
        "get_expanded_tied_weights_keys": _keep_gates_untied,
    }
    with ExitStack() as methods:
        for name, extension in extensions.items():
            held = vars(PreTrainedModel)[name]
            methods.callback(setattr, PreTrainedModel, name, held)
            setattr(PreTrainedModel, name, _extended(held, extension))
        yield


def _extended(held: Any, extension: Callable[..., Any]) -> Any:
    """A method that calls `extension` with the held method and its arguments."""
    function = getattr(held, "__func__", held)  # of a class method

    @functools.wraps(function)
    def extended(*args: Any, **kwargs: Any) -> Any:
        return extension(function, *args, **kwargs)

    return extended if function is held else classmethod(extended)


def _require_hardness(original: Any, cls: Any, /, source: Any, *args: Any, **kwargs: Any) -> Any:
    wants_info = kwargs.pop("output_loading_info", False)
    load = functools.partial(original, cls, source, *args, **kwargs, output_loading_info=True)
    try:
        model, info = load()
    except OSError:  # no weights of the usual name
        if kwargs.get("variant") is not None:
            raise
        with suppress(OSError):
            return cls.from_pretrained(source, *args, **kwargs, variant=VARIANT, output_loading_info=wants_info)
        raise
    lost = sorted(key for key in info["missing_keys"] if key.endswith(".raw_hardness"))
    if lost and has_record(model.config):
        raise ValueError(f"{source} does not hold λ of the gates in its config: {', '.join(lost)}")
    return (model, info) if wants_info else model


_under_construction: ContextVar[list[PreTrainedModel] | None] = ContextVar("models under construction", default=None)
"""The models with a record that `from_pretrained` is building, the whole before its parts; None outside."""


def _note_construction(original: Any, model: PreTrainedModel, /, config: Any, *args: Any, **kwargs: Any) -> None:
    noted = _under_construction.get()
    if noted is not None and isinstance(config, PreTrainedConfig) and has_record(config):
        write_changes(config, without_guard(config))
        noted.append(model)
    original(model, config, *args, **kwargs)


def _with_gates_rebuilt(original: Any, cls: Any, /, *args: Any, **kwargs: Any) -> list[Any]:
    return [*original(cls, *args, **kwargs), _gates_rebuilt()]


@contextmanager
def _gates_rebuilt() -> Iterator[None]:
    """A block at whose end each model built inside, still without memory, gets the gates of its record."""
    noted: list[PreTrainedModel] = []
    token = _under_construction.set(noted)
    try:
        yield
    finally:
        _under_construction.reset(token)
    parts = {id(part) for model in noted for part in model.modules() if part is not model}
    for whole in (model for model in noted if id(model) not in parts):
        for model, record in list(recorded_models(whole)):
            rebuild_gates(model, record)
        held = {id(part.config): part.config for part in whole.modules() if isinstance(part, PreTrainedModel)}
        for config in held.values():  # in some models the parts have copies
            write_changes(config, without_guard(config, back=True))


def _keep_gates_untied(original: Any, model: PreTrainedModel, /, *args: Any, **kwargs: Any) -> dict[str, str]:
    # Families that tie whole blocks by a pattern (Zamba) take a gate's buffers for weights, which do not exist.
    of_gates = {
        f"{name}.{key}"
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, LambdaGate)
        for key in module.state_dict()
    }
    tied = original(model, *args, **kwargs)
    return {target: source for target, source in tied.items() if target not in of_gates}
