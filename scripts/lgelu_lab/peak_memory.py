"""The most memory that this process has held."""

import resource
import sys


def peak_memory() -> int:
    """Bytes; Linux counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
