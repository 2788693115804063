"""Ranks of ft_ddp as plain processes, with the environment that their supervisor would set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.distributed import TCPStore

from lightning_multigpu._torchft import torchft
from tests import preforked
from tests.world import free_port

_REPOSITORY = Path(__file__).resolve().parents[3]


class Job:
    """Starts ranks, and lost ones again if it is told to; a store and a lighthouse run in this process."""

    def __init__(self, directory: Path, plan: dict[str, Any], ranks: int = 2) -> None:
        self.directory, self.ranks = directory, ranks
        self.store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
        self.start_lighthouse(0)
        address = f"127.0.0.1:{self.lighthouse.address().rpartition(':')[2]}"
        self.store.set("lighthouse", address)
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{_REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            "http_proxy": "http://127.0.0.1:9",  # as in many clusters; ranks talk to each other without it
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "NODE_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "TORCHFT_LIGHTHOUSE": address,
            "PLAN": json.dumps(plan),
            "DIRECTORY": str(directory),
        }
        self._starts = [0] * ranks
        self.processes: list[Any] = [None] * ranks
        self._files: list[Any] = []
        for rank in range(ranks):
            self.start(rank)

    def start_lighthouse(self, port: int) -> None:
        limits = {"join_timeout_ms": 60000, "quorum_tick_ms": 50, "heartbeat_timeout_ms": 1500}
        bind = f"[::]:{port}"
        self.lighthouse = torchft("coordination").LighthouseServer(bind=bind, min_replicas=1, **limits)

    def start(self, rank: int) -> None:
        own = {"LOCAL_RANK": str(rank), "LIGHTNING_MULTIGPU_STARTS": str(self._starts[rank])}
        self._starts[rank] += 1
        output = (self.directory / f"output{rank}.txt").open("a")
        self._files.append(output)
        self.processes[rank] = preforked.Process(
            [sys.executable, "-m", "tests.strategies.fault_tolerant.program"],
            env={**self._environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def run(self, *, restarts: int = 0, timeout_s: float = 60.0) -> list[int]:
        """Waits until all ranks have ended, of which the first ``restarts`` lost ones are started again."""
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in self.processes) or restarts:
            for rank, process in enumerate(self.processes):
                if restarts and process.poll() not in (None, 0):
                    restarts -= 1
                    self.start(rank)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not over after {timeout_s} s:\n{self.output()}")
            if all(process.poll() == 0 for process in self.processes):
                break
            time.sleep(0.02)
        return [process.poll() for process in self.processes]

    def wait_for(self, words: str, timeout_s: float = 60.0) -> None:
        """Waits until some rank has written them."""
        deadline = time.monotonic() + timeout_s
        while words not in self.output():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {words!r} after {timeout_s} s")
            time.sleep(0.02)

    def output(self) -> str:
        files = [self.directory / f"output{rank}.txt" for rank in range(self.ranks)]
        return "\n".join(f"--- rank {rank}\n{file.read_text()[-40000:]}" for rank, file in enumerate(files))

    def notes(self, rank: int) -> list[dict[str, Any]]:
        file = self.directory / f"notes{rank}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def results(self) -> dict[int, dict[str, Any]]:
        files = {rank: self.directory / f"result{rank}.json" for rank in range(self.ranks)}
        return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.output())
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for file in self._files:
            file.close()
        self.lighthouse.shutdown()
