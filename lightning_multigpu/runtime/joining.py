"""Joining: the way of a rank's process from its launch until all ranks are connected."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lightning_multigpu.communication.digest import compared, model_table, value_text
from lightning_multigpu.communication.interface import source_address
from lightning_multigpu.communication.main_store import MainStore, kept_by_torchrun
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.rendezvous import Arrival, Rendezvous, RendezvousError, own_host
from lightning_multigpu.guardian import Guardian, GuardianClient
from lightning_multigpu.guardian.discovery import address_of_job, find, start_at
from lightning_multigpu.guardian.start import ADDRESS, SECRET
from lightning_multigpu.runtime.failure_watch import FailureWatch
from lightning_multigpu.runtime.process_groups import CONNECTIONS
from lightning_multigpu.runtime.run_context import RunContext

_CUT_S = 2.0

# How often this process has joined at an address: a store or a guardian of an earlier time may still be there.
_ATTEMPTS: Counter[tuple[str, int]] = Counter()


class Joining:
    """This rank's way into the world, in three steps that follow each other::

        launcher             begin       the guardian of the host sees this rank
        setup_environment    meet        the ranks find each other, and that they agree; the guardians of hosts meet
                             (process groups, within the same time limit)
        setup                check_model the ranks have the same model

    The guardian of a host starts before its ranks join: by the launcher that starts them, or else by the first of
    them. The guardians of several hosts meet at node 0's as soon as rank 0's store is open, and need neither store nor
    process group from then on, so that they also see a host or a link that is gone.

    Args:
        watch: the failure watch of this rank; its connection to the guardian is made here.
    """

    def __init__(self, watch: FailureWatch) -> None:
        self.watch = watch
        self._deadline_s: float | None = None
        self._attempt = 0

    def begin(
        self, run: RunContext, *, guardian: Guardian | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Puts this rank under its host's guardian, unless it is in a world already.

        Args:
            run: the run.
            guardian: the guardian, if this process has started it.
            variables: the variables that name the guardian, if they are not in the environment.
        """
        if dist.is_initialized() or self._deadline_s is not None:
            return
        self._deadline_s = time.monotonic() + run.join_timeout_s
        run.tell_ranks()
        where = (run.main_address, run.main_port)
        self._attempt = _ATTEMPTS[where]
        _ATTEMPTS[where] += 1
        self.watch.begin(CONNECTIONS.cut)
        if sys.platform != "linux":
            return
        if guardian is not None:
            variables = guardian.environment
        if variables or os.environ.get(ADDRESS):
            self._connect_to(variables or os.environ, guardian, run)
            # A program that this rank starts must not take itself for a rank, and neither a later run in this process.
            for name in (ADDRESS, SECRET):
                os.environ.pop(name, None)
        else:
            address = address_of_job(*where, node_rank=run.node_rank, attempt=self._attempt, variables=os.environ)
            if run.local_rank == 0:
                # The ranks say more about who is missing than the guardian can, so it lets them speak first.
                guardian = start_at(address, join_timeout_s=_latest_s(run), **_guardian_options(run))
                if guardian is not None:
                    guardian.withdraw()
            client = find(address, rank=run.rank, on_failure=self.watch.hear, timeout_s=run.join_timeout_s)
            self._take(client, guardian)
        assert self.watch.client is not None
        self.watch.client.joining(_latest_s(run))  # later than the rank itself, which can say more, if it still can

    @contextlib.contextmanager
    def limited(self, run: RunContext) -> Iterator[None]:
        """Limits the time in which everything that connects ranks has to be done; then connections are cut."""
        if dist.is_initialized():
            self.watch.begin(lambda: None)
            yield
            return
        self.begin(run)
        assert self._deadline_s is not None
        left_s = max(0.0, self._deadline_s - time.monotonic())
        try:
            # Who looks at the clock by itself says more than who finds its connections cut.
            with CONNECTIONS.cut_after(left_s + _CUT_S):
                yield
            if self.watch.client is not None:
                self.watch.client.joined()
        except RendezvousError:
            raise
        except RuntimeError as error:
            self.watch.check()
            if time.monotonic() < self._deadline_s:
                raise
            raise RendezvousError(
                f"the ranks have come, but were not connected within {run.join_timeout_s:g} s (join_timeout_s): {error}"
            ) from error
        finally:
            self._deadline_s = None

    def meet(self, run: RunContext, alike: Mapping[str, str]) -> Store | None:
        """Waits for all ranks; returns the store for their process group, or None if there is one already.

        Args:
            run: the run.
            alike: name -> value of what must be equal on all ranks, as :func:`table_of` makes it.

        Raises:
            RendezvousError: they do not all come, or are not alike; the same one on all that have come.
        """
        if dist.is_initialized():
            return None
        assert self._deadline_s is not None
        client = self.watch.client
        limits: dict[str, Any] = {
            "deadline_s": self._deadline_s,
            "timeout_s": run.join_timeout_s,
            "check": self.watch.check,
        }
        store = MainStore(
            run.main_address,
            run.main_port,
            rank=run.rank,
            is_kept=kept_by_torchrun(os.environ),
            connections=CONNECTIONS,
            **limits,
        ).open()
        world_size = run.environment.world_size()
        own = Arrival(run.rank, own_host(), run.node_rank, os.getpid(), world_size, dict(alike))
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        rendezvous = Rendezvous(store, own, attempt=f"{restart}-{self._attempt}", **limits)
        if client is not None and run.num_nodes > 1 and run.rank == 0:
            rendezvous.offer("guardian", _invite_hosts(client, run))
        rendezvous.check_in()
        if client is not None and run.num_nodes > 1 and run.local_rank == 0 and run.rank != 0:
            client.join_hosts(**rendezvous.wait_for("guardian"), node_rank=run.node_rank)
        rendezvous.wait_for_all()
        return rendezvous.group_store

    def watch_again(self, run: RunContext, world: MeteredGroup) -> None:
        """Puts this rank under a new guardian when an earlier run has left its world open; a collective over it."""
        if sys.platform != "linux" or self.watch.client is not None:
            return
        guardian: Guardian | None = None
        mine: dict[str, str] = {}
        if run.local_rank == 0:
            guardian = Guardian.start(**_guardian_options(run))
            guardian.withdraw()
            mine = guardian.environment
        found = {node: variables for node, variables in world.gather_objects((run.node_rank, mine)) if variables}
        client = self._connect_to(found[run.node_rank], guardian, run)
        if run.num_nodes > 1:
            invitation = world.broadcast_object(_invite_hosts(client, run) if run.rank == 0 else None, 0)
            if run.local_rank == 0 and run.rank != 0:
                assert invitation is not None
                client.join_hosts(**invitation, node_rank=run.node_rank)

    def _connect_to(self, variables: Mapping[str, str], guardian: Guardian | None, run: RunContext) -> GuardianClient:
        client = GuardianClient.from_variables(variables, rank=run.rank, on_failure=self.watch.hear)
        self._take(client, guardian)
        return client

    def _take(self, client: GuardianClient, guardian: Guardian | None) -> None:
        # Made before any worker is forked, it is theirs as well: a worker that is ended would leave its own behind.
        client.uses_temporary(multiprocessing.util.get_temp_dir())
        self.watch.client, self.watch.guardian = client, guardian


def start_guardian(run: RunContext) -> Guardian | None:
    """Starts the guardian of this host for ranks that this process is about to start; None without Linux."""
    if sys.platform != "linux":
        return None
    return Guardian.start(join_timeout_s=_latest_s(run), **_guardian_options(run))


def _guardian_options(run: RunContext) -> dict[str, Any]:
    return {
        "num_ranks": run.ranks_per_host,
        "failure_timeout_s": run.failure_timeout_s,
        "hang_report_s": run.hang_report_s,
    }


def _latest_s(run: RunContext) -> float:
    """Seconds that a guardian waits for ranks to join: the ranks, who know more, speak first."""
    return run.join_timeout_s + run.failure_timeout_s


def _invite_hosts(client: GuardianClient, run: RunContext) -> dict[str, Any]:
    """On rank 0: has the guardian listen for those of the other hosts; returns what they need to come."""
    secret = os.urandom(32).hex()
    address = source_address(run.main_address) or run.main_address
    port = client.listen_for_hosts(address, num_nodes=run.num_nodes, secret=secret)
    return {"address": address, "port": port, "secret": secret}


def check_model(module: torch.nn.Module, world: MeteredGroup) -> None:
    """Compares the module's parameters and buffers over all ranks, by name, type and shape; a collective.

    Raises:
        RendezvousError: they differ; the same message on all ranks.
    """
    table = model_table([*module.named_parameters(), *module.named_buffers()])
    found = compared(table, world.gather_objects, "do not have the same model")
    if found is not None:
        raise RendezvousError(f"{found}\nBuild it alike on all ranks: from the same configuration and the same code")


def table_of(run: RunContext, *, strategy: str, options: Mapping[str, Any], precision: object) -> dict[str, str]:
    """The settings that must be equal on all ranks and are known before they have joined.

    Args:
        run: the run.
        strategy: the name of the strategy's class.
        options: the strategy's options.
        precision: the precision that it trains in.
    """
    values = {
        "strategy": strategy,
        **{f"option {name}": value_text(value) for name, value in options.items()},
        "num_nodes": str(run.num_nodes),
        "devices on each host": str(run.ranks_per_host),
        "device type": run.device_type,
        "precision": str(precision),
        "back end": str(run.backend or "by device"),
        "torch": str(torch.__version__),
        "lightning": str(lightning.__version__),
    }
    with contextlib.suppress(PackageNotFoundError):
        values["lightning_multigpu"] = version("lightning_multigpu")
    return values
