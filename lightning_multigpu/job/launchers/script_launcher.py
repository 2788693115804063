"""The launcher that runs the script again for each further rank of a host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_multigpu._lightning_internals import (
    SubprocessScriptLauncher,
    given_checkpoint,
    set_num_threads_if_needed,
)
from lightning_multigpu.job.guardian import Guardian
from lightning_multigpu.job.joining import Joining, start_guardian
from lightning_multigpu.job.run_context import RunContext

if TYPE_CHECKING:
    import lightning.pytorch as pl

RANKS = "LIGHTNING_MULTIGPU_RANKS"
"""Set by ft_ddp's supervisor: the number of ranks; Lightning forgets WORLD_SIZE after a run."""

# Children by rank; they run this script to its end. They are not collected before: the guardian reads their statuses.
_STARTED: dict[int, subprocess.Popen[bytes]] = {}


class ScriptLauncher(SubprocessScriptLauncher):
    """Runs the script again for each further rank of this host; the guardian watches those processes.

    If torchrun, SLURM or another launcher has started the processes, it only guards the rank's own function. ``check``
    raises if the run is impossible, before any process is started.
    """

    def __init__(self, run: RunContext, joining: Joining, check: Callable[[pl.Trainer], None]) -> None:
        super().__init__(run.environment, run.ranks_per_host, run.num_nodes)
        self._run = run
        self._joining = joining
        self._check = check

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        if trainer is not None:
            self._check(trainer)
            self._joining.resumes = given_checkpoint(function, args) is not None
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        guardian: Guardian | None = None
        if not self.cluster_environment.creates_processes_externally:
            guardian = start_guardian(self._run)
            self._start_ranks(guardian)
            _STARTED.update(enumerate(self.procs, self._run.node_rank * self.num_processes + 1))
        else:
            check_started(self)
        self._joining.begin(self._run, guardian=guardian, started={rank: each.pid for rank, each in _STARTED.items()})
        set_num_threads_if_needed(num_processes=self.num_processes)
        return self._joining.watch.guarded(function, args, kwargs, run=self._run, trainer=trainer)

    def _start_ranks(self, guardian: Guardian) -> None:
        """Starts the other ranks of this host; if one cannot be started, the started ones are ended."""
        try:
            self._call_children_scripts()
        except BaseException:
            guardian.kill()
            for process in self.procs:
                process.kill()
                process.wait()
            raise

    @override
    def kill(self, signum: signal.Signals | int) -> None:
        """Signals the other ranks of this host.

        After a Ctrl-C they have time to end in order before SIGKILL. All ranks act on SIGTERM at the same batch: they
        would take another one for the user's second, which ends them at once.
        """
        if signum == signal.SIGTERM and self._joining.watch.signals.agreed_on(SIGTERMException()):
            return
        until_s = time.monotonic() + self._run.failure_timeout_s
        for child in self.procs if signum == signal.SIGKILL else ():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until_s - time.monotonic()))
        super().kill(signum)


def check_started(launcher: SubprocessScriptLauncher) -> None:
    """Raises ValueError where other ranks have been started than those of ``devices`` and ``num_nodes``."""
    environment, ranks = launcher.cluster_environment, launcher.num_nodes * launcher.num_processes
    started, local_rank = int(os.environ.get(RANKS) or environment.world_size()), environment.local_rank()
    if started != ranks or local_rank >= launcher.num_processes:
        devices = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(started // launcher.num_nodes, local_rank + 1)
        raise ValueError(
            f"devices={launcher.num_processes} and num_nodes={launcher.num_nodes} make {ranks} ranks, and "
            f"{type(environment).__name__} has {started} (this one has local rank {local_rank}): set "
            f"Trainer(devices={devices}, num_nodes={max(1, started // devices)})"
        )
