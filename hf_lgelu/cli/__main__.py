"""`python -m hf_lgelu.cli` is `hf-lgelu`, for launchers: `accelerate launch -m hf_lgelu.cli convert ...`."""

import sys

from hf_lgelu.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
