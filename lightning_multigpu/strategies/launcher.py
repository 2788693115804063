"""Starts the ranks of a host, and ends all of them with one message when one fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_multigpu._lightning_internals import (
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    interrupt,
    set_num_threads_if_needed,
)
from lightning_multigpu.guardian.interrupts import INTERRUPTED_STATUS, SAME_INTERRUPT_S
from lightning_multigpu.strategies.failure_watch import guarded

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_multigpu.strategies.base import MultiGPUStrategy

_POLL_S = 0.2
_AT_ONCE_S = 2.0


class ScriptLauncher(SubprocessScriptLauncher):
    """Runs the script again for each further rank of this host, and watches those processes.

    Where torchrun, SLURM or another launcher has started the processes, it only guards the rank's own function.
    """

    def __init__(self, strategy: MultiGPUStrategy) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        children: ChildWatch | None = None
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            children = ChildWatch(self.procs, self._strategy)
            children.start()
        set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return guarded(function, self._strategy, args, kwargs)
        except Exception:
            if children is not None:
                children.end_all()
            raise

    @override
    def kill(self, signum: signal.Signals | int) -> None:
        """Signals the other ranks of this host. They know of a Ctrl-C, and get time to end in order before SIGKILL."""
        if signum == signal.SIGKILL:
            _wait(self.procs, self._strategy.failure_timeout_s)
        super().kill(signum)


class SpawnLauncher(MultiProcessingLauncher):
    """Runs a function of the current interpreter in one new process a rank."""

    _strategy: MultiGPUStrategy

    def __init__(self, strategy: MultiGPUStrategy, start_method: Literal["spawn", "fork", "forkserver"]) -> None:
        super().__init__(strategy, start_method=start_method)

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        guarded_function = _Guarded(function, self._strategy, trainer)
        try:
            return super().launch(guarded_function, *args, trainer=trainer, **kwargs)
        except BaseException as error:
            self._strategy.state_is_lost = True  # callbacks that save at exceptions do not know that
            self._await_ranks(error)
            raise

    def _await_ranks(self, error: BaseException) -> None:
        """Lets the ranks end in order after a first Ctrl-C, and ends them and this process at a second."""
        since_s = time.monotonic()
        try:
            while isinstance(error, KeyboardInterrupt) and any(rank.is_alive() for rank in self.procs):
                with contextlib.suppress(*[KeyboardInterrupt] * (time.monotonic() - since_s < SAME_INTERRUPT_S)):
                    time.sleep(_POLL_S)
        except KeyboardInterrupt:
            deadline_s = time.monotonic() + _AT_ONCE_S  # their guardian ends them
            for rank in self.procs:
                rank.join(max(0.0, deadline_s - time.monotonic()))
                rank.kill()
            os._exit(INTERRUPTED_STATUS)
        if any(rank.exitcode == INTERRUPTED_STATUS for rank in self.procs):
            os._exit(INTERRUPTED_STATUS)


@dataclass(frozen=True)
class _Guarded:
    """A picklable function that runs in each spawned rank."""

    function: Callable[..., Any]
    strategy: Any
    trainer: pl.Trainer | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return guarded(self.function, self.strategy, args, kwargs)
        except (KeyboardInterrupt, SIGTERMException) as error:
            # Lightning handles them in the first process only, where the trained weights are not.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            if self.trainer is not None:
                interrupt(self.trainer, error)
                self.trainer._teardown()
            raise SystemExit(1 if isinstance(error, KeyboardInterrupt) else 128 + signal.SIGTERM) from None


class ChildWatch(threading.Thread):
    """Sees to it that a child's death becomes a failure of the job, and that no child outlives a failed one."""

    def __init__(self, children: list[subprocess.Popen[bytes]], strategy: MultiGPUStrategy) -> None:
        super().__init__(name="child-watch", daemon=True)
        self._children = children
        self._strategy = strategy

    @override
    def run(self) -> None:
        while True:
            codes = [child.poll() for child in self._children]
            dead = [(index, code) for index, code in enumerate(codes) if code]
            if dead:
                index, code = dead[0]
                rank = self._strategy.node_rank * self._strategy.num_processes + index + 1
                self._strategy.failure_watch.child_died(rank, self._children[index].pid, _ended(code))
                return
            if all(code == 0 for code in codes):
                return
            time.sleep(_POLL_S)

    def end_all(self) -> None:
        """Gives the children time to end by themselves, then ends them."""
        _wait(self._children, self._strategy.failure_timeout_s)
        for child in self._children:
            child.kill()
            child.wait()


def _wait(children: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))


def _ended(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit status {code}"


def is_notebook_fork_needed(start_method: str, interactive: bool) -> bool:
    """Whether processes must be forked: what is typed into a notebook cannot be imported by a spawned process."""
    return interactive and start_method == "spawn" and sys.platform != "win32" and hasattr(os, "fork")
