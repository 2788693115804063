"""The first line of a program's results: machine, load, versions and date."""

from __future__ import annotations

import os
import platform
import time

import lightning as L
import torch

from lightning_multigpu.callbacks.probes import machine_of


def heading() -> str:
    """Of now, so that the load is that of the moment."""
    return (
        f"# {machine_of('cpu')['processor']}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, lightning {L.__version__}, "
        f"{time.strftime('%Y-%m-%d')}"
    )
