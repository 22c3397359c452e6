"""Moved; goes when nothing imports it from here."""

from lgelu_lab.benchmarks.images import Augmentation, ImageRows  # noqa: F401
