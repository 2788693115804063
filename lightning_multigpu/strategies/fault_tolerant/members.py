"""The ranks that train together at the moment: torchft's quorum, and the process group over it."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import repeat
from typing import Any, NoReturn
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_multigpu._torch_compat import job_store
from lightning_multigpu._torchft import start_lighthouse, torchft
from lightning_multigpu.communication.connections import Connections
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.interface import interface_towards, own_address
from lightning_multigpu.communication.rendezvous import Limit
from lightning_multigpu.engine.data_parallel.gradient_transport import GradientTransport
from lightning_multigpu.job.failure_watch import SIGTERM_STATUS
from lightning_multigpu.job.joining import LAST_STORE, STARTS, main_store
from lightning_multigpu.job.run_context import RunContext
from lightning_multigpu.job.supervisor import LIGHTHOUSE, lighthouse_of
from lightning_multigpu.report.document import MemberChange
from lightning_multigpu.strategies.fault_tolerant.group import group_class

_CONNECT_S = 5.0
_MEETING_EVERY_S = 0.5
_LOOKS_EVERY_S = 0.5
_ENDED_S = 0.2  # in which a killed process is gone, with all its ports
_SLOWEST_BYTES_A_S = 20e6  # of a state that a peer sends, and of a link whose parts of a sum ranks of a host await

_GONE = (
    "rank 0 is lost, and with it the lighthouse, without which ranks do not find each other: start one that outlives "
    f"the ranks (torchft_lighthouse), and name it by {LIGHTHOUSE} or lighthouse="
)
_OF_GLOO = ("gloo", "connection", "socket", "broken pipe", "timed out", "timeout", "aborted", "process group")

_TOLD = re.compile(r'status: .*?message: "(.*?)".*')  # by torchft, in errors

_runs = 0  # of this process


class MembersLostError(RuntimeError):
    """A collective outside of a step has failed: the members have changed, or are about to."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Time limits in seconds, and the fewest ranks that train; the options of the strategy."""

    min_replicas: int
    wait_for_replicas_s: float
    collective_timeout_s: float
    heartbeat_timeout_s: float
    straggler_timeout_s: float
    join_timeout_s: float

    def start_lighthouse(self, host: str) -> tuple[Any, str]:
        """A lighthouse with these limits at the interface of ``host``, and its URL."""
        limits = {"straggler_timeout_s": self.straggler_timeout_s, "heartbeat_timeout_s": self.heartbeat_timeout_s}
        return start_lighthouse(host, **limits)


class Members:
    """The ranks that train together, in the order of their ranks; every rank is a replica of torchft.

    A quorum is asked for where it is needed, and not at each step: at the start, after a collective has failed, and
    every half second if the first member's clock says so, for ranks that wait to come in. In between the process group
    is the proof that all members live, and a step costs no message to the lighthouse::

        rank 0   step 7 | sum: ok | step 8 | sum: error | quorum {0, 2}, new group, sum again | step 9 ...
        rank 1   step 7 | sum: ok | killed
        rank 2   step 7 | sum: ok | step 8 | sum: error | quorum {0, 2}, new group, sum again | step 9 ...

    Args:
        run: this process in the job.
        lighthouse: "host:port"; None for that of the environment or, without one, of rank 0.
        transport: how sums travel.
        is_fit: ranks can come in; a validation that is over, or under way, a later rank repeats alone.
        give, take: this rank's state for a rank that comes in, and the other way round.
        step: the number of optimizer steps done.
        changed: called after each change of the members.

    Attributes:
        processes: the members' ranks, in order, by a name of each process: its rank, pid and torchft's name.
        has_joined: False while this rank waits to come in: it computes, and what it computes does not count.
        begins_anew: whether all ranks have been lost, and begin again from the last checkpoint.
        asks: whether members meet before the next sum.
        healed: whether this rank has taken a member's state since the last step.
        wants_to_leave, has_left: see :meth:`leave_without`; 2 asks all to save for SLURM, which starts the job anew.
        requeue_is_due: whether some member has asked for that in the last sum.
        history: the changes so far.
    """

    def __init__(
        self,
        run: RunContext,
        lighthouse: str | None,
        limits: Limits,
        *,
        transport: GradientTransport,
        is_fit: bool,
        give: Callable[[], Any],
        take: Callable[[Any], None],
        step: Callable[[], int],
        changed: Callable[[], None],
    ) -> None:
        global _runs
        self.rank, self._world_size, self.limits = run.rank, run.world_size, limits
        self._step, self._changed = step, changed
        self.processes: dict[str, int] = {}
        self.history: list[MemberChange] = []
        self.begins_anew = self.has_ended = self._has_begun = False
        self.has_joined = self.healed = self.asks = self.has_left = self._is_broken = self.requeue_is_due = False
        self.generation = self.wants_to_leave = 0
        self._checked_s = self._broken_s = time.monotonic()
        self._error: RuntimeError | None = None  # of the last failure
        self._give = give
        self._take = take
        if not LAST_STORE and not _runs and dist.is_initialized():  # Ray Train's
            LAST_STORE[:] = [job_store()]
        limit = Limit(time.monotonic() + limits.join_timeout_s, limits.join_timeout_s, lambda: None)
        main: Any = LAST_STORE[0] if LAST_STORE else main_store(run, limit, Connections())
        if not LAST_STORE:
            main.set_timeout(timedelta(seconds=limits.join_timeout_s))
        self._supervisors = main
        self._job = PrefixStore(f"ft_ddp/{_runs}", main)
        _runs += 1
        # torchrun keeps the store, and starts all of its ranks again when one is lost: nothing there is of these.
        is_all_of_agent = os.environ.get("LOCAL_WORLD_SIZE") == str(self._world_size)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_all_of_agent else "0"
        self._main = PrefixStore(attempt, self._job)
        has_met = self._main.check(["met"])
        if has_met and not is_fit:
            self.has_ended = True
            return
        address = run.environment.main_address
        interface = interface_towards(address)
        self._sets_interface = interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ
        if self._sets_interface:
            os.environ["GLOO_SOCKET_IFNAME"] = str(interface)
        own = own_address(address)
        self._is_of_rank = not (lighthouse or os.environ.get(LIGHTHOUSE))
        hosts = self.rank == 0 and STARTS not in os.environ
        if has_met and hosts and self._is_of_rank:
            raise RuntimeError(_GONE)
        start = partial(limits.start_lighthouse, own) if hosts else None
        self._lighthouse, given = lighthouse_of(self._main, lighthouse, start)
        self._url = url = given if "://" in given else f"http://{given}"
        own_store = TCPStore(own, 0, is_master=True, wait_for_workers=False)
        self._group = group_class()(own, own_store, self, transport, timedelta(seconds=limits.collective_timeout_s))
        if run.num_nodes > 1:
            threading.Thread(target=self._cut_silent, name="cut-silent", daemon=True).start()
        begins = not has_met or (_all_lost(url, limits.heartbeat_timeout_s) and not self.is_over)
        if begins:
            self.begins_anew = has_met or attempt != "0"
            limit_s = limits.straggler_timeout_s if has_met else limits.join_timeout_s
            here = self._gather(limit_s)  # before the lighthouse hears of this rank, and has others wait for it
        warnings.filterwarnings("ignore", module=r"torchft\.")  # of torch, about how it sends a state
        self._manager = torchft().Manager(
            pg=self._group,
            load_state_dict=self._heal,
            state_dict=self._given,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=timedelta(seconds=limits.straggler_timeout_s),
            quorum_timeout=timedelta(seconds=limits.straggler_timeout_s + _CONNECT_S),
            connect_timeout=timedelta(seconds=_CONNECT_S),
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=own_store.port,
            lighthouse_addr=url,
            replica_id=f"rank{self.rank:06}",  # the order of the members
            hostname=own,
            checkpoint_transport=torchft("checkpointing.pg_transport").PGTransport(
                self._group, timedelta(seconds=limits.straggler_timeout_s), torch.device("cpu")
            ),
            init_sync=False,
        )
        if begins:
            self.has_joined = True
            until_s = time.monotonic() + limit_s
            while len(self.ranks) < here and time.monotonic() < until_s:
                self.meet()
            self.history.clear()
            self._main.set("met", "")
        self._has_begun = True

    def _gather(self, limit_s: float) -> int:
        """Waits for all ranks of the job, so that they begin together; returns how many have come.

        One that waits here counts up. What former processes have counted stays below.
        """
        everybody = [f"here/{each}" for each in range(self._world_size)]
        counts, until_s = [self._main.add(each, 0) for each in everybody], time.monotonic() + limit_s
        here = 0
        while here < len(everybody) and time.monotonic() < until_s:
            self._main.add(everybody[self.rank], 1)
            here = sum(self._main.add(each, 0) > count for each, count in zip(everybody, counts, strict=True))
            time.sleep(_LOOKS_EVERY_S / 25 * min(25, len(everybody)))
        self._main.add(everybody[self.rank], 1)  # for a rank that has begun to look after the last time
        if here < len(everybody):
            _say(f"not all {self._world_size} ranks have come in {limit_s:g} s: the others begin")
        return here

    # Who

    @property
    def ranks(self) -> list[int]:
        return [*self.processes.values()]

    @property
    def index(self) -> int:
        """This rank's place among the members; 0 for the one that writes checkpoints and logs."""
        return self.ranks.index(self.rank) if self.has_joined else -1

    @property
    def size(self) -> int:
        return max(1, len(self.ranks))

    @property
    def talks(self) -> bool:
        """Whether there are members to talk to."""
        return self.has_joined and not self._is_broken and not self.has_left

    def split(self, error: RuntimeError | None = None, since_s: float | None = None) -> None:
        """Ends the group after a failure: all other members' collectives then fail too, and all meet again."""
        if not self._is_broken:
            self._is_broken, self._broken_s, self._error = True, since_s or time.monotonic(), error
            self.all_reduce.abort()
            self._group.abort(errored=False)

    # Meeting

    def is_due(self) -> bool:
        """Whether members have to meet before they can sum."""
        return self._is_broken or self.asks or not self.has_joined

    def wants_meeting(self) -> bool:
        """Whether this rank asks for a meeting after the present step: the first member's clock decides."""
        return self.index == 0 and time.monotonic() - self._checked_s > _MEETING_EVERY_S

    def meet(self, *, shrinks: bool = False) -> None:
        """Asks for a quorum and takes part in it; afterwards the process group is that of its members.

        This waits for members that are slow, and takes a member's state if this rank is behind. With ``shrinks`` no
        rank comes in.

        Raises:
            TimeoutError: fewer than ``min_replicas`` ranks for ``wait_for_replicas_s``.
            RuntimeError: rank 0 is lost, and had the lighthouse.
        """
        begun_s, before, told = self._broken_s if self._is_broken else time.monotonic(), self.processes, False
        has_failed, self.healed = self._is_broken and self.has_joined, False
        own = [f"meets/{process}" for process, rank in before.items() if rank == self.rank]
        for key in own:
            self._job.set(key, "now")  # without an answer: behind a link that was cut it would take seconds
        problem: str | None = None
        while True:
            if has_failed and problem is None:  # the lighthouse then numbers the quorum anew, and all make a new group
                self._manager.report_error(RuntimeError("a collective has failed"))
                self._manager.should_commit()
            self._manager.load_state_dict({"step": self._step() + 1 if self.has_joined else 0, "batches_committed": 0})
            self._is_broken = False
            try:
                if has_failed and self._is_of_rank:
                    time.sleep(_ENDED_S)
                _reach(self._url)
                if shrinks and self._is_left_out():
                    self.exit_behind()
                self._manager.start_quorum(shrink_only=shrinks)
            except (RuntimeError, OSError) as error:  # it is away, or waits for slow ranks
                if self._is_of_rank and isinstance(error, ConnectionRefusedError) and not self.wants_to_leave:
                    raise RuntimeError(_GONE) from error
                why = _TOLD.sub(r"\1", str(error).splitlines()[0])
                problem = f"no quorum of the lighthouse {self._url} ({why})"
                self._is_broken, self._manager._quorum_future = True, None  # torchft would raise the error again
            else:
                has_failed = self._manager.errored() is not None or self._is_broken
                problem = None
                if not has_failed and self.size < self.limits.min_replicas:
                    problem = f"{self.size} of min_replicas={self.limits.min_replicas} ranks are left"
            if {*before} - {*self.processes} and self.is_over:
                _say(f"rank {self.rank} ends at step {self._step()}: the others have ended the fit without it")
                raise SystemExit(0)
            if problem is None and not has_failed:
                if not self.has_joined:
                    raise RuntimeError("the ranks that this one was to join have ended; it has to be started again")
                break
            waited_s = time.monotonic() - begun_s
            if problem is not None:
                self._give_up(before, waited_s)
                if self.wants_to_leave == 1:
                    raise left()
                if waited_s > self.limits.wait_for_replicas_s:
                    raise TimeoutError(f"{problem} for wait_for_replicas_s={self.limits.wait_for_replicas_s:g} s")
                if not told:
                    told = True
                    _say(f"rank {self.rank} waits at step {self._step()}: {problem}")
                time.sleep(0.2)
        for key in own:
            self._job.set(key, "")
        self._checked_s = time.monotonic()
        self.has_joined, self.asks = True, False
        self._note(before, self._checked_s - begun_s)
        self._error = None

    def _is_left_out(self) -> bool:
        """Whether the others have gone on without this rank."""
        if not self.has_joined or not self._job.check(["members"]):
            return False
        members = self._job.get("members").decode().split()
        return any(rank == self.rank and process not in members for process, rank in self.processes.items())

    def exit_behind(self) -> NoReturn:
        """Ends this process, which would be at another place of the program than the others."""
        sys.exit(f"ft_ddp: rank {self.rank} is behind, at another place of the program: it has to start again")

    def _give_up(self, processes: Iterable[str], waited_s: float) -> None:
        """Has supervisors end processes that live, and have kept the others waiting for ``straggler_timeout_s``.

        Not those that wait for a quorum too, as all do while the lighthouse is away; and none if they have gone on
        without this rank.
        """
        is_over = waited_s > self.limits.straggler_timeout_s and not self._is_left_out()
        for process in processes if is_over else ():
            key = f"meets/{process}"
            if not self._job.check([key]) or self._job.get(key) != b"now":
                self._supervisors.set(f"late/{process.rpartition('/')[0]}", "")

    def finish_meeting(self) -> None:
        """Tells torchft that a sum has succeeded since; after a failure it would ask for a new group each time."""
        self._manager.should_commit()
        self.healed = False

    def _note(self, before: Mapping[str, int], seconds: float, *, gone: str = "is lost") -> None:
        """Tells of a change of the members, if there is one."""
        _tell_rank_zero(self.index if self.has_joined else -1, self.rank)
        lost = [rank for process, rank in before.items() if process not in self.processes]
        joined = [rank for process, rank in self.processes.items() if process not in before]
        if self.healed:
            lost, joined, seconds = [], [self.rank], 0.0
        if not lost and not joined:
            if self._error is not None and (self.index == 0 or hasattr(self._error, "__notes__")):
                said = "; ".join([str(self._error), *getattr(self._error, "__notes__", [])])
                _say(f"rank {self.rank}: a collective has failed at step {self._step()}, but no rank is lost: {said}")
            return
        self._give_up(before.keys() - self.processes.keys(), seconds)
        self.generation += 1
        change = MemberChange(
            step=self._step(), time_s=time.time(), lost=lost, joined=joined, members=self.size, seconds=seconds
        )
        self.history.append(change)
        if self.index == 0:
            self._job.set("members", " ".join(self.processes))
        were_there = [rank for rank in self.ranks if rank not in joined]  # the first may be the one that is back
        if self._has_begun and before and were_there[:1] == [self.rank]:
            go_on = f"{self.size} of {self._world_size} ranks go on after {seconds:.1f} s"
            for ranks, text in (lost, gone), (joined, "is back"):
                for rank in ranks:
                    _say(f"rank {rank} {text} at step {change.step}: {go_on}")
        self._changed()

    def _given(self) -> Any:
        return {"history": [asdict(each) for each in self.history], "state": self._give()}

    def _heal(self, state: Any) -> None:
        self.history[:] = [MemberChange(**each) for each in state["history"]]
        self.healed = self.has_joined = True
        self._take(state["state"])

    def leave_without(self, leaving: Sequence[int]) -> None:
        """Makes the group anew without the members at these places, who have announced it; no quorum is needed."""
        if self.index in leaving:
            self.has_left = True
            return
        before, begun_s = self.processes, time.monotonic()
        self._group.shrink([each for each in range(self.size) if each not in leaving], -1 - self._step())
        # Until its last beat has become old the lighthouse would wait for the rank that has left.
        self._checked_s = time.monotonic() + self.limits.heartbeat_timeout_s
        self._note(before, time.monotonic() - begun_s, gone="has left")

    # The last checkpoint, which all ranks resume from when all have been lost

    @property
    def last_checkpoint(self) -> str | None:
        """The path that some rank has told."""
        return self._job.get("checkpoint").decode() if self._job.check(["checkpoint"]) else None

    def has_saved(self, path: str) -> None:
        self._job.set("checkpoint", path)

    # Collectives

    @property
    def all_reduce(self) -> HierarchicalAllReduce:
        """What sums over the members."""
        return self._group.all_reduce  # type: ignore[no-any-return]

    def sum(self, tensors: Sequence[Tensor], timeout_s: float, keys: Iterable[Hashable] = repeat(None)) -> None:
        """Sums flat CPU tensors over the members, in place; those with a key may be compressed between hosts.

        Raises:
            RuntimeError: a member is lost, or late: nothing has come from it for ``timeout_s``.
        """
        for tensor, key in zip(tensors, keys, strict=False):
            inside_s = timeout_s + (0 if self.all_reduce.between is None else tensor.nbytes / _SLOWEST_BYTES_A_S)
            self.all_reduce.limit(timeout_s, inside_s=inside_s)
            self.all_reduce(tensor, key)

    def _cut_silent(self) -> None:
        """Cuts connections to a host that does not answer, for which a collective outside of steps would wait long."""
        while not self.has_ended:
            self._group.connections.cut_silent(max(1.0, self.limits.collective_timeout_s))
            time.sleep(_LOOKS_EVERY_S)

    def timeout_s(self, size_bytes: int, *, meets: bool) -> float:
        """The limit of the sums of a step; after a meeting a rank may still be taking a member's state."""
        healing_s = self.limits.straggler_timeout_s + 4 * size_bytes / _SLOWEST_BYTES_A_S if meets else 0.0
        return self.limits.collective_timeout_s + healing_s

    # Ending

    @property
    def is_over(self) -> bool:
        """Whether some rank has ended its fit: a rank that waits to come in would train alone."""
        return self._main.check(["finished"])

    def end(self, *, finished: bool, is_fit: bool) -> None:
        """Leaves torchft; a run that has ``finished`` waits for the others, and keeps the group for later hooks."""
        if self.has_ended:
            return
        self.has_ended = True
        try:
            if is_fit and finished and self.talks:
                self._main.set("finished", "")
            self._manager.shutdown()
            del self._manager, self._main, self._job, self._supervisors  # closed before others join another main store
            if finished and self.talks:
                dist.barrier()
        except RuntimeError:
            pass  # others are lost, or have ended first
        if not finished:
            self.split()
        self.all_reduce.close()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
            self._lighthouse = None
        if self._sets_interface:
            del os.environ["GLOO_SOCKET_IFNAME"]


def is_of_gloo(error: RuntimeError) -> bool:
    """Whether a collective has failed because a rank is gone, or late; and not because of what it was asked."""
    return any(word in str(error).lower() for word in _OF_GLOO)


def left() -> SIGTERMException:
    """What ends a rank that leaves."""
    error = SIGTERMException()
    error.code = SIGTERM_STATUS  # Lightning sets none
    return error


def _reach(url: str) -> None:
    """Raises OSError if no process listens there: torchft would wait for long, and for no signal."""
    place = urlsplit(url)
    socket.create_connection((place.hostname, place.port), timeout=_CONNECT_S).close()


def _say(text: str) -> None:
    sys.stderr.write(f"ft_ddp: {text}\n")
    sys.stderr.flush()


def _tell_rank_zero(index: int, rank: int) -> None:
    """Makes the first member the one that logs and prints; a rank that waits does neither."""
    rank_zero_only.rank = index if index >= 0 else max(1, rank)  # type: ignore[attr-defined]


def _all_lost(lighthouse: str, beat_s: float) -> bool:
    """Whether no member of the last quorum lives."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        with direct.open(f"{lighthouse}/status", timeout=_CONNECT_S) as page:
            quorum, beats = page.read().decode().split("Heartbeats")
        members = {*re.findall(r"rank\d{6}:[-\w]+", quorum)}
        ages_s = {name: float(age) for name, age in re.findall(r"(rank\d{6}:[-\w]+): seen ([\d.e-]+)s", beats)}
        ages = [ages_s[each] for each in members & {*ages_s} if ages_s[each] < beat_s]
        if not ages:
            return True
        # A beat may be of the moment before a loss of all ranks, this one's former process included.
        if min(ages) < beat_s / 3 and time.time() - psutil.Process().create_time() > beat_s:
            return False
        time.sleep(0.1)
