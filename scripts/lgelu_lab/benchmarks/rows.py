"""Moved; goes when nothing imports it from here."""

from lgelu_lab.benchmarks.data import Batch, TensorRows, collate_rows  # noqa: F401
