"""The keys of a config that hold the width of hidden layers, found by building the model without memory.

The key has as many names as the activation's (intermediate_size, n_inner, ffn_dim, d_ff, encoder_ffn_dim ...), so no
list of names is kept here either: each key that holds the width is tried.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_lgelu.models.config_keys import CONFIG_REFUSALS, ConfigChange, apply_changes, built, config_entries

_LEFT_OPEN = ("inner", "intermediate")  # in the names of keys that may be None: GPT-2's is four times the hidden size


def plan_width_changes(
    model: PreTrainedModel, resized: Callable[[Any], Any], beside: Sequence[Sequence[ConfigChange]] = ((),)
) -> list[ConfigChange] | None:
    """The changes after which the config alone builds the tensors that `model` has now; None if no key does that.

    Nothing is changed here. From none on, the key is added that leaves the fewest tensors wrong: an encoder-decoder may
    have a key for either side, and another key may hold the same number by chance. Else all keys are tried at once.

    Args:
        model: has other shapes than its config says.
        resized: the new value for the value of a key: an integer, a list, or None where a family leaves the width open.
            The same value for one that is no width.
        beside: other changes that may be needed, each tried with the keys.
    """
    # What the config builds besides stays: a pooler, say, that BertModel(..., add_pooling_layer=False) is without.
    shapes = (_built_shapes(model, []) or {}) | _shapes(model)
    entries = [(path, value) for path, value in config_entries(model.config)
               if type(value) in (int, list)  # False is no width of 0
               or (value is None and any(part in path[-1] for part in _LEFT_OPEN))]  # fmt: skip
    keys = [ConfigChange(path, value, new) for path, value in entries if (new := resized(value)) != value]

    def wrong(changes: Sequence[ConfigChange]) -> float:
        found = _built_shapes(model, changes)
        return float("inf") if found is None else len(found.items() ^ shapes.items())

    for changes in ([*start, *other] for other in beside for start in ([], keys)):
        left = wrong(changes)
        while left:
            tried = [(wrong([*changes, key]), key) for key in keys if key not in changes]
            fewest, key = min(tried, key=lambda pair: pair[0], default=(left, None))
            if key is None or not fewest < left:
                break
            changes, left = [*changes, key], fewest
        if not left:
            for change in changes:  # the number of a token may equal a width
                fewer = [other for other in changes if other is not change]
                changes = changes if wrong(fewer) else fewer
            return changes
    return None


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _built_shapes(model: PreTrainedModel, changes: Sequence[ConfigChange]) -> dict[str, tuple[int, ...]] | None:
    try:
        return _shapes(built(model, apply_changes(model.config, list(changes))))
    except CONFIG_REFUSALS:  # a key that is no part of this model's shape, or cannot hold this width
        return None
