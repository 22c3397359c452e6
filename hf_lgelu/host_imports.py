"""Actions that run once a host library's module is imported, without importing it ahead of its user.

The additions to transformers and timm have to be in place before either builds a model. Importing both for that would
cost every `import hf_lgelu` several seconds and their optional packages.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_actions: dict[str, list[Callable[[], object]]] = {}


def when_imported(module: str, action: Callable[[], object]) -> None:
    """Call `action` right after each import of `module`, and now if it is imported; the import raises its errors.

    An action may be called again: a module can be reloaded.
    """
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())
    _actions.setdefault(module, []).append(action)
    if module in sys.modules:
        importlib.import_module(module)  # waits for another thread that is just importing it
        action()


class _Watch(MetaPathFinder):
    """A finder that takes a spec from the other finders, and has the loader of an awaited module act at its end."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _actions:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _Watch))
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _act_after(spec.loader, fullname)
        return spec


def _act_after(loader: Any, fullname: str) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        for action in _actions[fullname]:
            action()

    loader.exec_module = exec_module
