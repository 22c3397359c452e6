"""A recording cut into stages, one for each layer, and the values that are carried from stage to stage."""

import tempfile
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from hf_lgelu.graph.recording import Recording, upstream


@dataclass(frozen=True)
class Stage:
    """The operations between the aims of two successive layers, and the values that later stages use."""

    before: tuple[Node, ...]  # up to the inputs of the layer's maps
    after: tuple[Node, ...]  # from the maps to the layer's aim
    original: frozenset[Node]  # the original's values that are used later
    converted: frozenset[Node]  # the converted network's; `after` runs again with the refitted weights


def plan_stages(
    recording: Recording, stops: Sequence[tuple[Sequence[Node], Sequence[Node]]], kept: Set[Node]
) -> list[Stage]:
    """The stages of a forward pass that stops at each layer: (its maps, whose weights will change, and its aims).

    Inputs in `kept` are available in all stages.
    """
    done: set[Node] = set()
    parts: list[tuple[tuple[Node, ...], tuple[Node, ...]]] = []
    for maps, aims in stops:
        needed_for = set().union(*map(upstream, aims))
        starts = set(maps)  # and what computes their weights
        for operand in (operand for each in maps for operand in each.all_input_nodes):
            stored = recording.stored_value(operand, or_buffer=True)
            starts.update(() if stored is None else stored.views)
        changing = recording.downstream(starts, needed_for | done)  # `done`, too: a map may be used early and late
        parts.append((recording.in_order(needed_for - done - changing), recording.in_order(changing)))
        done |= needed_for
    later = set(kept)
    stages: list[Stage] = []
    for before, after in reversed(parts):
        first, again = ({operand for node in nodes for operand in node.all_input_nodes} for nodes in (before, after))
        stages.append(Stage(before, after, frozenset(later), frozenset((later | again) - {*after})))
        later |= first | again
    return stages[::-1]


class KeptValues:
    """The values of each batch between two stages: in memory up to a limit (bytes), the rest on disk."""

    def __init__(self, memory_limit: int) -> None:
        self._left = memory_limit
        self._kept: dict[Any, tuple[list[Any] | Path, Any, int]] = {}
        self._folder: tempfile.TemporaryDirectory | None = None

    def close(self) -> None:
        """Forget all values, in memory and on disk."""
        self._kept.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def put(self, key: Any, values: Any) -> None:
        """Keep values, in containers of any kind, under a new key."""
        leaves, structure = pytree.tree_flatten(values)
        storages = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
        size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # views share a storage
        if size <= self._left:
            self._left -= size
            self._kept[key] = leaves, structure, size
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="hf_lgelu-")
        path = Path(self._folder.name, f"{len(self._kept)}-{abs(hash(key))}.pt")
        torch.save(leaves, path)
        self._kept[key] = path, structure, 0

    def take(self, key: Any) -> Any:
        """The values under a key, which is free again."""
        leaves, structure, size = self._kept.pop(key)
        self._left += size
        if isinstance(leaves, Path):
            path, leaves = leaves, torch.load(leaves, weights_only=True)
            path.unlink()
        return pytree.tree_unflatten(leaves, structure)
