"""λ-GELU checkpoint → ReLU, GELU or ONNX: `python scripts/harden.py --model runs/digits --output_dir out/relu`."""

import sys

from transformers import HfArgumentParser
from transformers.utils import logging

from hf_lgelu.cli.harden import HardenArguments, harden


def main() -> int:
    """Export, and print what came out; the exit status is 1, with the reason, where it was refused."""
    (arguments,) = HfArgumentParser(HardenArguments).parse_args_into_dataclasses()
    logging.disable_progress_bar()
    try:
        harden(arguments)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
