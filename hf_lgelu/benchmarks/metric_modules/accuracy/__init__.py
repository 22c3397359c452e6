"""The module `accuracy`."""
