"""What a command says while its work goes on, to somebody who may have stopped reading (`hf-lgelu … | head`)."""

import os
import sys


def say(text: str) -> None:
    """Print a line at once. Where nobody reads on, the work does: what follows is said to no one."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        stop_saying()


def stop_saying() -> None:
    """Lead stdout nowhere, or its flush at the end of the process would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
