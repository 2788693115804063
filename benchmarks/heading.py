"""The first line of a program's results: machine, load, versions and date; and the quiet of its fits."""

from __future__ import annotations

import logging
import os
import platform
import time
import warnings

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


def quiet() -> None:
    """Keeps what fits print from between the lines of a program, and gives each process one thread."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning gives a process more, which spin on cores that are shared
    torch.set_num_threads(1)
