"""torchft, imported when ``ft_ddp`` first needs it, and without its logs."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import Any

from lightning_multigpu.communication.main_store import listening_socket


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


def start_lighthouse(host: str, *, straggler_timeout_s: float, heartbeat_timeout_s: float) -> tuple[Any, str]:
    """Starts torchft's server that knows which ranks live; returns it, and its URL.

    It listens at the interface of ``host``, an address or a name of this host by which the ranks reach it.
    """
    server_class = torchft("coordination").LighthouseServer
    place = "[::]"  # where the name leads to loopback here, and perhaps elsewhere on other hosts
    if (listener := listening_socket(host, 0)) is not None:
        with listener:
            place = _bracketed(listener.getsockname()[0])
    server = server_class(
        bind=f"{place}:0",
        min_replicas=1,
        join_timeout_ms=round(1000 * straggler_timeout_s),
        quorum_tick_ms=50,
        heartbeat_timeout_ms=round(1000 * heartbeat_timeout_s),
    )
    return server, f"http://{_bracketed(host)}:{server.address().rpartition(':')[2]}"  # its own has the host's name


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
