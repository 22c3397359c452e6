"""λ-GELU for the Hugging Face ecosystem.

Importing this package adds "lambda_gelu", "lambda_gelu_tanh" and "lambda_silu" to the tables of activations of
transformers and timm, as soon as these are imported, before it or after. Nothing else of a host library changes.
The public names, in `__init__.pyi`, load on first use.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import lazy_loader

__version__ = "0.3.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_TABLES = ("transformers.activations", "timm.layers.create_act")


class _WhenImported(MetaPathFinder):
    """A finder that registers the gates at the end of the import of a module with a table of activations.

    So a name is there before a library builds a model, and no library is imported ahead of its user.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _TABLES:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _register()

            loader.exec_module = exec_module
        return spec


def _register() -> None:
    importlib.import_module("hf_lgelu.registry").register_activation()


sys.meta_path[:] = [_WhenImported(), *(finder for finder in sys.meta_path if type(finder).__module__ != __name__)]
for _module in set(_TABLES) & set(sys.modules):
    importlib.import_module(_module)  # waits for another thread that is just importing it
    _register()
