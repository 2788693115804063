"""torchft, imported when ``ft_ddp`` first needs it, and without its logs."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import Any


def torchft(module: str = "") -> Any:
    """The package torchft, or one of its modules. Its Rust part reads ``RUST_LOG`` at its import.

    Raises:
        ImportError: it is not installed, or lacks what it needs.
    """
    before = os.environ.get("RUST_LOG")
    os.environ["RUST_LOG"] = before or "error"
    try:
        found = import_module(f"torchft.{module}" if module else "torchft")
    except ImportError as error:
        raise ImportError(f"ft_ddp needs torchft: pip install 'lightning-multigpu[ft]' ({error})") from error
    finally:
        if before is None:
            del os.environ["RUST_LOG"]
    if before is None:
        for name in ("torchft", "torchft_errors", "torchft_quorums", "torchft_commits"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    return found
