"""Moved; goes when nothing imports it from here."""

from typing import Any

from hf_lgelu.extras import require


def require_package(name: str) -> Any:
    """`hf_lgelu.extras.require`."""
    return require(name, "benchmarks")
