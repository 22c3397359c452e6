"""What batches hold between two layers: in memory as long as that is enough, then on disk."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class CarriedStates:
    """One state a batch, a dict of tensors, tuples or numbers: in memory up to a limit (bytes), the rest on disk."""

    def __init__(self, memory_limit: int) -> None:
        self._limit, self._used = memory_limit, 0
        self._kept: dict[Any, tuple[Any, int]] = {}
        self._folder: tempfile.TemporaryDirectory | None = None

    def close(self) -> None:
        """Forget all."""
        self._kept.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def put(self, key: Any, state: dict[str, Any]) -> None:
        """Keep a state under a key that holds none."""
        size = _bytes(state)
        if self._used + size <= self._limit:
            self._used += size
            self._kept[key] = (state, size)
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="hf_lgelu-")
        path = Path(self._folder.name, f"{len(self._kept)}-{abs(hash(key))}.pt")
        torch.save(state, path)
        self._kept[key] = (path, 0)

    def take(self, key: Any) -> dict[str, Any]:
        """Give the state back, and keep it no longer; an empty one where there was none."""
        state, size = self._kept.pop(key, ({}, 0))
        self._used -= size
        if isinstance(state, Path):
            loaded = torch.load(state, weights_only=True)
            state.unlink()
            return loaded
        return state


def _bytes(state: dict[str, Any]) -> int:
    """Each storage once: views share one."""
    storages = {
        leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
        for leaf in pytree.tree_leaves(state)
        if isinstance(leaf, Tensor)
    }
    return sum(storages.values())
