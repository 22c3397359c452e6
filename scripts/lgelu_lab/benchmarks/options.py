"""Moved; goes when nothing imports it from here."""

from lgelu_lab.benchmarks.data import DataOptions, ModelOptions  # noqa: F401
