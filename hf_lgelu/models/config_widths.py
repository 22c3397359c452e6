"""The keys of a config that hold the width of hidden layers, found by building the model without memory.

The key has as many names as the activation's (intermediate_size, n_inner, ffn_dim, d_ff, encoder_ffn_dim ...), and
families add others. So no list of names is kept here either: each key that holds the width is tried.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_lgelu.models.config_keys import CONFIG_REFUSALS, ConfigChange, apply_changes, built

_LEFT_OPEN = ("inner", "intermediate")  # in the names of keys that may be None: GPT-2's is four times the hidden size


def plan_width_changes(
    model: PreTrainedModel,
    resized: Callable[[Any], Any],
    beside: Sequence[Sequence[ConfigChange]] = ((),),
) -> list[ConfigChange] | None:
    """The changes after which the config alone builds the tensors that `model` has now; None if no key does that.

    Nothing is changed here. Each key is tried by itself, then all keys at once: an encoder-decoder may have a key for
    either side. Last, where another key holds the same number by chance, the keys that each bring the shapes nearer.

    Args:
        model: has other shapes than its config says.
        resized: the new value for the value of a key: an integer, a list, or None where a family leaves the width open.
            The same value for one that is no width.
        beside: other changes that may be needed, each tried with each of these keys, and alone.
    """
    # What the config builds besides stays: a pooler, say, that BertModel(..., add_pooling_layer=False) is without.
    shapes = (_built_shapes(model, []) or {}) | _shapes(model)
    keys = _keys(model.config, resized)
    for width, other in itertools.product(([], *([change] for change in keys), keys), beside):
        changes = [*width, *other]
        if _built_shapes(model, changes) == shapes:
            return _needed(model, changes, shapes)
    for other in beside:
        grown = _grown(model, keys, [*other], shapes)
        if grown is not None:
            return _needed(model, grown, shapes)
    return None


def _grown(
    model: PreTrainedModel, keys: Sequence[ConfigChange], changes: list[ConfigChange], shapes: Mapping[str, Any]
) -> list[ConfigChange] | None:
    """`changes` and some of `keys`, each of which leaves fewer tensors wrong; None if the shapes are not reached."""

    def wrong(some: list[ConfigChange]) -> float:
        built = _built_shapes(model, some)
        return float("inf") if built is None else sum(built.get(name) != shape for name, shape in shapes.items())

    left = wrong(changes)
    while left:
        tried = [(wrong([*changes, key]), key) for key in keys if key not in changes]
        fewest, key = min(tried, key=lambda pair: pair[0], default=(left, None))
        if key is None or not fewest < left:
            return None
        changes, left = [*changes, key], fewest
    return changes if _built_shapes(model, changes) == shapes else None


def _needed(model: PreTrainedModel, changes: list[ConfigChange], shapes: Mapping[str, Any]) -> list[ConfigChange]:
    """The changes without which these shapes are not built: the number of a token may equal a width."""
    for change in changes:
        fewer = [other for other in changes if other is not change]
        if _built_shapes(model, fewer) == shapes:
            return _needed(model, fewer, shapes)
    return changes


def config_entries(
    config: PreTrainedConfig | Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of every key, those of sub-configs and dicts too."""
    for key, value in (config if isinstance(config, Mapping) else config.to_dict()).items():
        if isinstance(value, Mapping):
            yield from config_entries(value, (*path, key))
        else:
            yield (*path, key), value


def _keys(config: PreTrainedConfig, resized: Callable[[Any], Any]) -> list[ConfigChange]:
    entries = list(config_entries(config))
    held = [(path, value) for path, value in entries if type(value) in (int, list)]  # False is no width of 0
    held += [(path, None) for path, value in entries if value is None and any(part in path[-1] for part in _LEFT_OPEN)]
    return [ConfigChange(path, value, new) for path, value in held if (new := resized(value)) != value]


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _built_shapes(model: PreTrainedModel, changes: list[ConfigChange]) -> dict[str, tuple[int, ...]] | None:
    try:
        return _shapes(built(model, apply_changes(model.config, changes)))
    except CONFIG_REFUSALS:  # a key that is no part of this model's shape, or cannot hold this width
        return None
