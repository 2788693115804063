"""Implementations with a fault each. Their ranks import this module, and without Lightning that takes no time."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_multigpu.bench.collectives.implementations import Call, Implementation, torch_collectives
from lightning_multigpu.bench.collectives.operations import OPERATIONS, Buffers
from lightning_multigpu.bench.jobs.rank_process import Seat, Turns


def liar(group: dist.ProcessGroup, ranks_per_host: int) -> dict[str, Call]:
    """One element on the last rank, or everything where ``barrier`` is concerned, is not what it should be."""
    right = torch_collectives(group)

    def wrongly(call: Call) -> Call:
        def lie(b: Buffers) -> None:
            if not b.operation.has_size:
                return
            call(b)
            if dist.get_rank() == dist.get_world_size() - 1 or b.operation.name in ("reduce", "gather"):
                b.output[b.output.numel() // 2] += 1

        return lie

    return {operation.name: wrongly(right[operation.name]) for operation in OPERATIONS}


def forgetful(group: dist.ProcessGroup, ranks_per_host: int) -> dict[str, Call]:
    """Right at first, then it does nothing any more."""
    right = torch_collectives(group)["all_reduce"]
    calls = iter([True])
    return {"all_reduce": lambda b: right(b) if next(calls, False) else None}


def faulty(group: dist.ProcessGroup, ranks_per_host: int) -> dict[str, Call]:
    """A different fault in each operation, on rank 1 unless all ranks refuse."""

    def on_rank_one(fault: Callable[[], None]) -> Call:
        return lambda b: fault() if dist.get_rank() == 1 else None

    def raise_it() -> None:
        raise RuntimeError("no route\nsecond line")

    def refuse(b: Buffers) -> None:
        raise NotImplementedError("not on this back end")

    return {
        **torch_collectives(group),
        "reduce": on_rank_one(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        "broadcast": on_rank_one(lambda: threading.Event().wait()),  # type: ignore[arg-type,return-value]
        "gather": on_rank_one(raise_it),
        "scatter": refuse,
    }


LIAR = Implementation("liar", "gloo", liar, "tells lies")
FORGETFUL = Implementation("forgetful", "gloo", forgetful, "does it once", "all_reduce")
FAULTY = Implementation("faulty", "gloo", faulty, "fails in many ways")


def obey(settings: Any, seat: Seat, turns: Turns) -> None:
    """A job that does what it is told: answers, or ends in one of several ways on one rank."""
    for word, rank in turns:
        if word == "die and raise":
            if seat.rank == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            if seat.local_rank == 0:
                raise ConnectionError("closed by peer")
        if seat.rank != rank:
            turns.answer((settings, seat.rank, seat.local_rank, os.environ.get("WORLD_SIZE"), torch.get_num_threads()))
        elif word == "raise":
            raise ValueError("as told")
        elif word == "exit":
            os._exit(3)
        elif word == "return":
            return
        elif word == "hang":
            threading.Event().wait()
