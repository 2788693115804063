"""``python -m lightning_multigpu``: the command line, as ``lightning-multigpu`` starts it."""

import sys

from lightning_multigpu.cli import main

if __name__ == "__main__":
    sys.exit(main())
