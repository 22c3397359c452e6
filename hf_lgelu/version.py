"""The version, alone so that a build can read it without importing torch."""

__version__ = "0.3.0"
