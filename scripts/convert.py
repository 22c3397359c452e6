"""Smooth checkpoint → ReLU without training, refitted on unlabelled inputs.

python scripts/convert.py --model runs/digits --calibration mlp-digits --output_dir out/relu
python scripts/convert.py --model user/gpt2 --calibration texts/ --max_calibration_samples 64 --output_dir out/relu
accelerate launch --num_processes 2 scripts/convert.py ...
"""

import sys

from transformers import HfArgumentParser
from transformers.utils import logging

from hf_lgelu.cli.convert import convert
from hf_lgelu.cli.convert_arguments import ConvertArguments


def main() -> int:
    """Convert, and print what came out; the exit status is 1, with the reason, where it was refused."""
    (arguments,) = HfArgumentParser(ConvertArguments).parse_args_into_dataclasses()
    logging.disable_progress_bar()
    try:
        convert(arguments)
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
