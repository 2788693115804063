"""Where a rank that fails leaves word for the others: who, where, and why."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from lightning_multigpu.communication.interface import source_address

_FIRST = "failure/first"
_SEEN = "failure/seen"
_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class RankFailure:
    """What one rank says of its end.

    ``what`` goes on after the rank's name: "raised ValueError: ...", "was ended by SIGKILL". ``rank`` and ``pid`` are
    None where it is not a rank that failed but a host or a guardian. ``pickled`` is the exception itself where it can
    be pickled, so that other ranks can raise the same one.
    """

    rank: int | None
    host: str
    pid: int | None
    step: int | None
    what: str
    traceback: str
    pickled: bytes | None = None

    @classmethod
    def of(cls, error: BaseException, *, rank: int | None, step: int | None) -> RankFailure:
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = None
        return cls(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=step,
            what=f"raised {type(error).__name__}: {error}" if str(error) else f"raised {type(error).__name__}",
            traceback="".join(traceback.format_exception(error)),
            pickled=pickled,
        )

    def describe(self) -> str:
        details = [
            f"host {self.host}" if self.host else "",
            "" if self.pid is None else f"pid {self.pid}",
            "" if self.step is None else "no step completed" if self.step == 0 else f"last completed step {self.step}",
        ]
        where = ", ".join(detail for detail in details if detail)
        place = f" ({where})" if where else ""
        return f"the job{place} failed: {self.what}" if self.rank is None else f"rank {self.rank}{place} {self.what}"

    def summary(self) -> str:
        """As :meth:`describe`, without further lines."""
        return self.describe().partition("\n")[0]

    def exception(self) -> BaseException:
        """The exception of the failed rank, to be raised on another one; its own traceback stands in a note."""
        error: BaseException = RankFailedError(self.describe()) if self.pickled is None else pickle.loads(self.pickled)
        if type(error) is SystemExit:  # with which status one rank leaves is no matter of the others
            error = RankFailedError(self.describe())
        if self.rank is not None and (self.traceback or type(error) is not RankFailedError):
            error.add_note(f"Raised on another rank: {self.describe()}\n{self.traceback}".rstrip())
        error.__rank_failure__ = self  # type: ignore[attr-defined]
        return error

    @staticmethod
    def behind(error: BaseException) -> RankFailure | None:
        """The failure that ``error`` was made of by :meth:`exception`, or None if it is of another origin."""
        return getattr(error, "__rank_failure__", None)


class RankFailedError(RuntimeError):
    """Another rank of the job ended; its own exception could not be brought here, or it had none."""


class FailureBoard:
    """One note that all ranks of a job can read, kept by rank 0: the first failure.

    Args:
        store: reached by every rank and used by nothing else.
        rank: this rank.
        world_size: ranks of the job.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size

    @classmethod
    def open(cls, main_address: str, group: dist.ProcessGroup | None) -> FailureBoard:
        """Opens the board of the job; a collective over the ranks of ``group``. Rank 0 listens on a free port."""
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        where: list[tuple[str, int] | None] = [None]
        store: Store | None = None
        if rank == 0:
            address = source_address(main_address) or main_address
            store = TCPStore(address, 0, world_size, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
            where = [(address, store.port)]
        dist.broadcast_object_list(where, src=0, group=group)
        assert where[0] is not None
        if store is None:
            address, port = where[0]
            store = TCPStore(address, port, world_size, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
        return cls(store, rank=rank, world_size=world_size)

    def watcher(self) -> FailureBoard:
        """The same board over a connection of its own, for another thread: a store's calls wait for one another."""
        assert isinstance(self._store, TCPStore)
        return FailureBoard(
            self._store.clone(),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.world_size,
        )

    def report(self, failure: RankFailure) -> RankFailure:
        """Leaves word unless another rank has done so before; returns what stands on the board."""
        value = self._store.compare_set(_FIRST, "", pickle.dumps(failure).hex())
        return _decode(value)

    def first(self) -> RankFailure | None:
        """The first failure, or None; does not wait.

        Raises:
            RuntimeError: rank 0, which keeps the board, is gone.
        """
        if not self._store.check([_FIRST]):
            return None
        return _decode(self._store.get(_FIRST))

    def acknowledge(self) -> None:
        """Says that this rank has read the board."""
        self._store.add(_SEEN, 1)

    def acknowledged(self) -> int:
        """How many ranks have read the board."""
        return int(self._store.add(_SEEN, 0))


def _decode(value: bytes) -> RankFailure:
    failure = pickle.loads(bytes.fromhex(value.decode()))
    assert isinstance(failure, RankFailure)
    return failure
