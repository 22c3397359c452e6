"""Optional packages: one error that names the extra to install."""

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import and return `module`, which the optional extra `extra` of this package brings.

    Raises ImportError that says what to install if it is not there, or is there and cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} cannot be imported ({error}); install it with: pip install 'hf-lgelu[{extra}]', or in a clone: "
            f"pip install '.[{extra}]'",
            name=module,
        ) from error
