"""The processes that share a conversion."""

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env


def known_processes() -> PartialState:
    """accelerate's state, on CPUs where its launcher was told so.

    accelerate reads ACCELERATE_USE_CPU in Accelerator alone; without it, processes on CPUs would not know of each
    other.
    """
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
