"""The supervisor of ``ft_ddp``: it starts the ranks of its host, and lost ones again, and trains nothing itself.

The process that the user has started becomes the supervisor of its host at the Trainer's first ``fit``, ``validate``,
``test`` or ``predict``, and ends with the ranks' status; each rank runs the whole script. Where torchrun, SLURM or Ray
has started the ranks, there is no supervisor.
::

    terminal -- starts --> supervisor of host 0             supervisor of host 1 -- starts --> its ranks
                             has the store, the lighthouse <--- a beat a second ---+
                             | environment                ^ a file each: the end of a fit, or an exception
                             v                            |
                           ranks of host 0, which the kernel ends with their supervisor
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed import Store  # type: ignore[attr-defined]
from typing_extensions import override

from lightning_multigpu._lightning_internals import (
    IS_INTERACTIVE,
    SubprocessScriptLauncher,
    command_of_rank,
    set_num_threads_if_needed,
)
from lightning_multigpu.communication.connections import Connections
from lightning_multigpu.communication.rendezvous import Limit
from lightning_multigpu.job.failure_watch import SIGTERM_STATUS
from lightning_multigpu.job.guardian.failure import Failure, host_name
from lightning_multigpu.job.guardian.proc import ended_text, read_stat
from lightning_multigpu.job.joining import STARTS, main_store
from lightning_multigpu.job.launchers.script_launcher import RANKS, check_started
from lightning_multigpu.job.run_context import RunContext
from lightning_multigpu.job.run_signals import SAME_INTERRUPT_S
from lightning_multigpu.job.uncaught_errors import EXIT

if TYPE_CHECKING:
    import lightning.pytorch as pl

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
_SUPERVISOR = "LIGHTNING_MULTIGPU_SUPERVISOR"  # of a rank: pid of the supervisor, descriptor of what it is told
_POLL_S = 0.05
_BEAT_S = 1.0
_HOST_GONE_S = 60.0  # host 0 is gone if no beat has reached it for so long
_STOPPED_S = 2.0  # a rank that is stopped (SIGSTOP) for longer is ended; in a validation the others wait for it
_LONGEST_PAUSE_S = 30.0
_SAME_PAUSE_S = 2.0  # in which other ranks raise the same exception too
_SOON_S = 60.0  # a rank that ends sooner than this is started again after a pause, which grows
_PR_SET_PDEATHSIG = 1
_OF_RANK: list[int] = []  # in a rank: that descriptor


class SupervisorLauncher(SubprocessScriptLauncher):
    """Makes the process that the user has started the supervisor of this host; in a rank it only runs the function.

    Args:
        run: ranks, environment and ``join_timeout_s``, in which the hosts have to find each other.
        start_lighthouse: starts torchft's lighthouse at the interface of an address; returns it, and its URL.
        lighthouse: the address of one that runs already; None for that of the environment, or an own one.
        check: raises if the run is impossible, before any rank is started.
        max_restarts: how often each rank is started again; one that is lost more often may have a sick device.

    Raises:
        ValueError: there is no script that ranks could run.
    """

    def __init__(
        self,
        run: RunContext,
        start_lighthouse: Callable[[str], tuple[Any, str]],
        lighthouse: str | None,
        check: Callable[[pl.Trainer], None],
        *,
        max_restarts: int,
    ) -> None:
        super().__init__(run.environment, run.ranks_per_host, run.num_nodes)
        self._run, self._check, self._max_restarts = run, check, max_restarts
        self._start_lighthouse, self._given = start_lighthouse, lighthouse
        self._is_rank = run.environment.creates_processes_externally
        if not self._is_rank and (IS_INTERACTIVE or sys.argv[0] in ("", "-", "-c")):
            raise ValueError(
                "there is no script that lost ranks could run again (a notebook, a REPL, or python -c): put the "
                "training into a file, or use strategy='ring_ddp_spawn'"
            )
        if self._is_rank and _SUPERVISOR in os.environ:
            _follow_supervisor()

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        if trainer is not None:
            self._check(trainer)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self._is_rank:
            _end_process(self._supervise())
        self._run.tell_ranks()
        check_started(self)
        set_num_threads_if_needed(num_processes=self.num_processes)
        EXIT.forget()
        try:
            returned = function(*args, **kwargs)
        except Exception as error:
            step = None if trainer is None else trainer.global_step
            EXIT.after(error, self._run.failure_timeout_s)
            EXIT.is_printed = _tell(Failure.of(error, rank=self._run.rank, step=step).to_message())
            raise
        if trainer is None or trainer.state.fn == TrainerFn.FITTING:
            _tell({})
        return returned

    def _supervise(self) -> int:
        run = self._run
        limit = Limit(time.monotonic() + run.join_timeout_s, run.join_timeout_s, lambda: None)
        store = main_store(run, limit, Connections(), rank=run.node_rank)
        start = partial(self._start_lighthouse, store.host)
        # Named, so that it serves until the ranks have ended.
        _lighthouse, url = lighthouse_of(store, self._given, start if run.node_rank == 0 else None)
        environment = {
            "MASTER_ADDR": store.host,
            "MASTER_PORT": str(run.environment.main_port),
            "NODE_RANK": str(run.node_rank),
            "WORLD_SIZE": str(run.world_size),
            RANKS: str(run.world_size),
            LIGHTHOUSE: url,
        }
        return Supervisor(run, store, environment, self._max_restarts).run_ranks()


def lighthouse_of(store: Store, given: str | None, start: Callable[[], tuple[Any, str]] | None) -> tuple[Any, str]:
    """The job's lighthouse and its URL; the first process starts it, unless it is given, and tells the others."""
    server, url = None, given or os.environ.get(LIGHTHOUSE)
    if start is not None:
        server, url = (None, url) if url else start()
        store.set("lighthouse", url)
    return server, url or store.get("lighthouse").decode()


@dataclass
class _Rank:
    """A rank of this host: its process, or None; when the next one starts, None for never; how and when the last ended.

    ``polls_stopped``: how often in a row it was seen stopped; a supervisor that is stopped as well sees nothing.
    ``is_late``: whether it hangs: the other ranks have waited for it for too long.
    """

    rank: int
    process: subprocess.Popen[bytes] | None = None
    due_s: float | None = 0.0
    failure: Failure | None = None
    ended_s: float = 0.0
    starts: int = 0
    polls_stopped: int = 0
    is_late: bool = False
    begun_s: float = 0.0
    told: int = -1  # a file in memory, in which the process writes

    def start(self, environment: Mapping[str, str], local_rank: int) -> None:
        self.told = os.memfd_create("told")
        own = {"LOCAL_RANK": str(local_rank), STARTS: str(self.starts), _SUPERVISOR: f"{os.getpid()} {self.told}"}
        command, directory = command_of_rank(local_rank)
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, **environment, **own},
            stdin=subprocess.DEVNULL,
            pass_fds=[self.told],
            process_group=0,  # a terminal signals the supervisor alone, which forwards each signal once
        )
        self.begun_s, self.due_s, self.polls_stopped = time.monotonic(), None, 0
        self.starts, self.is_late = self.starts + 1, False

    @property
    def was_stopped(self) -> bool:
        return self.polls_stopped * _POLL_S > _STOPPED_S

    def messages(self) -> list[Any]:
        """What the process has told so far: a failure, or {} for the end of a fit."""
        told = os.pread(self.told, os.fstat(self.told).st_size, 0)
        return [json.loads(line) for line in told.split(b"\n")[:-1]]

    def watch(self) -> None:
        """Ends a process that is stopped for too long, or hangs."""
        assert self.process is not None
        stat = read_stat(self.process.pid)
        if self.was_stopped or self.is_late:
            self.process.kill()
        else:
            self.polls_stopped = self.polls_stopped + 1 if stat is not None and stat.state == "T" else 0

    def end(self, code: int) -> Failure:
        """Forgets the process, which has ended with the exit code ``code``; returns its failure."""
        assert self.process is not None
        messages, pid, self.process = self.messages(), self.process.pid, None
        os.close(self.told)
        if code > 0 and messages and messages[-1]:
            return Failure(**messages[-1])
        what = f"was stopped for {_STOPPED_S:g} s" if self.was_stopped else ended_text(code)
        what = "hung while the others waited for it" if self.is_late else what
        return Failure(what, self.rank, host_name(), pid)


class Supervisor:
    """Starts the ranks of this host, and lost ones again, until all have ended.

    ``environment`` are the variables of all ranks, beside those of this process.
    """

    def __init__(self, run: RunContext, store: Store, environment: Mapping[str, str], max_restarts: int) -> None:
        self._run, self._store, self._environment, self._max_restarts = run, store, environment, max_restarts
        first = run.node_rank * run.ranks_per_host
        self._ranks = [_Rank(first + each) for each in range(run.ranks_per_host)]
        self._statuses: list[int] = []  # of ranks that are not started again
        self._status: int | None = None  # of the job, once an end has decided it
        self._has_finished = self._is_over = False
        self._arrived: list[int] = []
        self._ends_since_s: dict[int, float] = {}  # SIGINT and SIGTERM, when they came first
        self._shown: list[Failure] = []
        self._heard_s = time.monotonic()
        self._beats_end = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="beat", daemon=True)

    def run_ranks(self) -> int:
        """Returns the exit status of this host when all its ranks have ended.

        0 if one has come to the end of the script, also if others were lost. A rank that fails after the fit is no lost
        rank: its status is the job's.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP):
                signal.signal(number, lambda number, _: self._arrived.append(number))
        self._beats.start()
        try:
            while not self._is_over and any(each.process or each.due_s is not None for each in self._ranks):
                self._forward_signals()
                for local_rank, rank in enumerate(self._ranks):
                    self._look_after(local_rank, rank)
                if self._run.node_rank > 0 and time.monotonic() - self._heard_s > _HOST_GONE_S:
                    _say("The job failed: host 0, which has the lighthouse, is gone")
                    self._is_over, self._status = True, 1
                time.sleep(_POLL_S)
            self._wait_for_hosts()
        finally:
            for process in filter(None, [each.process for each in self._ranks]):
                process.kill()
                process.wait()
        if self._status is None and 0 not in self._statuses and self._ends_since_s:
            return SIGTERM_STATUS if signal.SIGTERM in self._ends_since_s else 1  # 1 as from Lightning
        return self._status or (0 if 0 in self._statuses else self._statuses[-1])

    def _look_after(self, local_rank: int, rank: _Rank) -> None:
        if rank.process is not None:
            code = rank.process.poll()
            self._has_finished = self._has_finished or code == 0 or {} in rank.messages()
            if code is None:
                rank.watch()
            else:
                self._has_ended(rank, code)
        elif rank.due_s is not None and time.monotonic() > rank.due_s:
            if rank.failure is not None:
                self._show(rank.failure, f"and is started again ({rank.starts} of {self._max_restarts})")
            rank.start(self._environment, local_rank)

    def _has_ended(self, rank: _Rank, code: int) -> None:
        """Decides whether the rank is started again."""
        failure, status, now_s = rank.end(code), code if code >= 0 else 128 - code, time.monotonic()
        is_common = code > 0 and self._is_common(rank, failure)
        rank.failure, rank.ended_s = failure, now_s
        if code == 0 or self._ends_since_s:
            pass
        elif status == SIGTERM_STATUS:
            self._show(failure, "and has left")
        elif self._has_finished:
            self._show(failure, "and is not started again: the fit is over")
            self._status = status if code > 0 else self._status
        elif is_common:
            self._show(failure, "as every rank of this host did", begin="The job failed: ")
            self._is_over, self._status = True, status
        elif rank.starts > self._max_restarts:
            self._show(failure, f"and is not started again: max_restarts={self._max_restarts}")
        else:
            pause_s = _SAME_PAUSE_S**rank.starts if now_s - rank.begun_s < _SOON_S else _SAME_PAUSE_S * (code > 0)
            rank.due_s = now_s + min(_LONGEST_PAUSE_S, pause_s)
            return
        self._statuses.append(status)

    def _is_common(self, rank: _Rank, failure: Failure) -> bool:
        """Whether all ranks of this host have failed so, now or at the same step.

        One rank alone, and the ranks of one of several hosts, have to do so twice; before the first step a host that
        cannot reach the others may have done it.
        """
        has_others = self._run.num_nodes > 1
        if has_others and not failure.step:
            return False
        if (has_others or len(self._ranks) == 1) and not _alike(failure, rank.failure):
            return False
        since_s = float("-inf") if failure.step else time.monotonic() - _SOON_S
        others = [each for each in self._ranks if each is not rank]
        return all(_alike(failure, each.failure) and each.ended_s > since_s for each in others)

    def _show(self, failure: Failure, what: str, *, begin: str = "") -> None:
        """Prints the end of a rank in one line, after its traceback if that is a new one."""
        if failure.traceback and not any(_alike(failure, each) for each in self._shown):
            self._shown.append(failure)
            _say(failure.traceback)
        _say(f"{begin}{failure.describe()}, {what}")

    def _forward_signals(self) -> None:
        """Sends the ranks the signals that have come. A second SIGINT or SIGTERM ends all at once."""
        while self._arrived:
            number, now_s = self._arrived.pop(0), time.monotonic()
            if number in self._ends_since_s:
                if now_s - self._ends_since_s[number] > SAME_INTERRUPT_S:
                    self._is_over, self._status = True, 128 + number  # the status of a shell
                continue
            if number in (signal.SIGINT, signal.SIGTERM):
                self._ends_since_s[number] = now_s
                for rank in self._ranks:
                    rank.due_s = None
            if number == signal.SIGTSTP:  # Ctrl-Z: the lighthouse stops too, so that no rank is missed
                self._signal(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
            self._signal(signal.SIGCONT if number == signal.SIGTSTP else number)

    def _signal(self, number: int) -> None:
        for process in filter(None, [each.process for each in self._ranks]):
            process.send_signal(number)

    def _beat(self) -> None:
        """Tells host 0 each second that this host is there, and asks for ranks that hang.

        A store that is gone raises; behind a cut link it waits.
        """
        key = f"beat {self._run.node_rank}"
        try:
            while not self._beats_end.wait(_BEAT_S if self._store.add(key, 1) else 0):
                self._heard_s = time.monotonic()
                for rank, process in [(each, each.process) for each in self._ranks]:
                    if process is not None and self._store.check([f"late/{rank.rank}/{process.pid}"]):
                        rank.is_late = rank.process is process
            self._store.delete_key(key)
        except RuntimeError:
            self._heard_s -= _HOST_GONE_S

    def _wait_for_hosts(self) -> None:
        """Ends the beat of this host. Host 0 waits for the other hosts, whose ranks need its lighthouse."""
        if self._run.node_rank > 0:
            self._beats_end.set()
            self._beats.join(_BEAT_S)
            return
        for key in [f"beat {node}" for node in range(1, self._run.num_nodes)]:
            beat, changed_s = 0, time.monotonic()
            while time.monotonic() - changed_s < _HOST_GONE_S and self._store.check([key]):
                if self._ends_since_s or self._arrived:
                    break
                if (now := self._store.add(key, 0)) != beat:
                    beat, changed_s = now, time.monotonic()
                time.sleep(_POLL_S)


def _follow_supervisor() -> None:
    """Has the kernel end this rank with its supervisor."""
    pid, told = map(int, os.environ.pop(_SUPERVISOR).split())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != pid:
        sys.exit(f"the supervisor of this rank, pid {pid}, has ended")
    os.set_inheritable(told, False)
    _OF_RANK[:] = [told]


def _tell(message: Mapping[str, Any]) -> bool:
    """Tells the supervisor, if there is one; returns whether it has been told."""
    if not _OF_RANK:
        return False
    os.write(_OF_RANK[0], json.dumps(message).encode() + b"\n")
    return True


def _end_process(status: int) -> NoReturn:
    """Ends the supervisor: what follows in the script is the work of the ranks, and so are the Trainer's callbacks."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _alike(one: Failure, other: Failure | None) -> bool:
    return other is not None and one.is_alike(other) and (bool(one.error_type) or one.what == other.what)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
