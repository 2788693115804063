"""Starts the ranks of a host, and ends all of them with one message when one fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_multigpu._lightning_internals import EndOfRun, SubprocessScriptLauncher, set_num_threads_if_needed
from lightning_multigpu.guardian import Guardian
from lightning_multigpu.runtime.failure_watch import guarded

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_multigpu.strategies.base import MultiGPUStrategy

_POLL_S = 0.2
_STARTED: dict[int, subprocess.Popen[bytes]] = {}  # by this process, by rank; they run its script to its end
_PATIENCE = 0.6  # of failure_timeout_s; before its end the guardian ends the first rank, too


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
        guardian: Guardian | None = None
        if not self.cluster_environment.creates_processes_externally:
            guardian = self._strategy.joining.start_guardian(self._strategy)
            self._call_children_scripts()
            children = ChildWatch(self.procs, self._strategy)
            _STARTED.update(children.ranks())
            if guardian is not None:
                for rank, child in children.ranks():
                    guardian.started(rank, child.pid)
        else:
            self._strategy.failure_watch.earlier_children = dict(_STARTED)
        self._strategy.joining.begin(self._strategy, guardian=guardian)
        if children is not None:
            children.start()
        set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return guarded(function, self._strategy, args, kwargs)
        except EndOfRun:  # on all ranks, whose scripts go on
            raise
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


class ChildWatch(threading.Thread):
    """Sees to it that a child's death becomes a failure of the job, and that no child outlives a failed one."""

    def __init__(self, children: list[subprocess.Popen[bytes]], strategy: MultiGPUStrategy) -> None:
        super().__init__(name="child-watch", daemon=True)
        self._children = children
        self._strategy = strategy

    def ranks(self) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
        """The global rank of each child."""
        return enumerate(self._children, self._strategy.node_rank * self._strategy.num_processes + 1)

    @override
    def run(self) -> None:
        left = dict(self.ranks())
        while left:
            for rank, child in list(left.items()):
                code = child.poll()
                if code is not None:
                    del left[rank]
                    self._strategy.failure_watch.child_ended(rank, child.pid, code)
            time.sleep(_POLL_S)

    def end_all(self) -> None:
        """Gives the children time to end by themselves, then ends them."""
        _wait(self._children, _PATIENCE * self._strategy.failure_timeout_s)
        for child in self._children:
            child.kill()
            child.wait()


def _wait(children: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))


def is_notebook_fork_needed(start_method: str, interactive: bool) -> bool:
    """Whether processes must be forked: what is typed into a notebook cannot be imported by a spawned process."""
    return interactive and start_method == "spawn" and sys.platform != "win32" and hasattr(os, "fork")
