"""Joining: the steps of a rank's process from its launch until all ranks are connected."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from lightning_multigpu.communication.connections import Connections
from lightning_multigpu.communication.digest import compared, model_table, value_text
from lightning_multigpu.communication.interface import NO_WAY, source_address
from lightning_multigpu.communication.job_secret import JOB_SECRET, job_secret
from lightning_multigpu.communication.main_store import MainStore
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.rendezvous import Arrival, Limit, Rendezvous, RendezvousError, conflict, own_host
from lightning_multigpu.job.failure_watch import KEPT, FailureWatch, leave_guardian
from lightning_multigpu.job.guardian import Failure, Guardian, GuardianClient
from lightning_multigpu.job.guardian.host_links import node_name, silence
from lightning_multigpu.job.guardian.start import ADDRESS, address_of_job
from lightning_multigpu.job.process_groups import CONNECTIONS
from lightning_multigpu.job.run_context import RunContext

STARTS = "LIGHTNING_MULTIGPU_STARTS"
"""Set by ft_ddp's supervisor, which has the job's store: how often a rank has been started before."""

_CUT_S = 2.0
_SHORTEST_SILENCE_S = 1.0

# How often this process has joined at an address: a store or a guardian of an earlier run may still be there.
_ATTEMPTS: Counter[tuple[str, int]] = Counter()
# The store stays until the next one is open: a rank that begins the next run earlier connects to it.
LAST_STORE: list[Store] = []


class Joining:
    """Joins this rank to the world, in three steps::

        launcher             begin       the guardian of the host sees this rank
        setup_environment    meet        the ranks find each other and compare settings; the guardians of hosts meet
                             (process groups, within the same time limit)
        setup                check_model the ranks have the same model

    The guardian of a host starts before its ranks join: the launcher that starts the ranks starts it, or else the first
    rank. The guardians of several hosts connect to node 0's as soon as rank 0's store is open. From then on they need
    neither store nor process group, so that they also see a lost host or link.

    Attributes:
        resumes: whether this run loads a checkpoint; set by the launcher.
    """

    def __init__(self, watch: FailureWatch) -> None:
        self.watch = watch
        self._deadline_s: float | None = None
        self._attempt = 0
        self._rendezvous: Rendezvous | None = None
        self.resumes = self._has_met_hosts = False

    def begin(
        self,
        run: RunContext,
        *,
        guardian: Guardian | None = None,
        started: Mapping[int, int] = MappingProxyType({}),
        address: str | None = None,
    ) -> None:
        """Connects this rank to its host's guardian, or begins a further run under the one that it has.

        ``guardian``: started by this process. ``started``: the process ids of the ranks that this process has started,
        perhaps for an earlier run. ``address``: of the guardian, for a rank that has not inherited it.
        """
        if self._deadline_s is not None:
            return
        self._deadline_s = time.monotonic() + run.join_timeout_s
        run.tell_ranks()
        where = (run.environment.main_address, run.environment.main_port)
        place = (*where, run.ranks_per_host, run.num_nodes)
        has_joined = dist.is_initialized()
        self.watch.begin((lambda: None) if has_joined else CONNECTIONS.cut)
        if not has_joined:
            self._attempt = _ATTEMPTS[where]
            _ATTEMPTS[where] += 1
        self._has_met_hosts = bool(KEPT) and (has_joined or KEPT[0].place == place)
        if self._has_met_hosts:
            client = KEPT[0]
            client.begin(self.watch.receive, failure_timeout_s=run.failure_timeout_s, hang_report_s=run.hang_report_s)
        else:
            leave_guardian()
            client, guardian = self._connected(run, guardian, address)
            client.started, client.place = guardian, place
            KEPT.append(client)
            if guardian is not None:
                for rank, pid in started.items():
                    guardian.started(rank, pid)
        self.watch.client = client
        if not has_joined:
            # Later than the rank's own limit, whose error names the missing ranks.
            client.joining(run.join_timeout_s + run.failure_timeout_s)

    def _connected(
        self, run: RunContext, guardian: Guardian | None, address: str | None
    ) -> tuple[GuardianClient, Guardian | None]:
        """Connects this rank to a guardian of this run; the first rank of a host starts it if no launcher has."""
        inherited = os.environ.pop(ADDRESS, None)  # for no program that this rank starts, and no later run
        address, start_timeout_s = address or inherited, 0.0
        if not address:
            where = run.environment.main_address, run.environment.main_port
            address = address_of_job(*where, node_rank=run.node_rank, attempt=self._attempt, variables=os.environ)
            start_timeout_s = run.join_timeout_s
            if run.local_rank == 0:
                guardian = start_guardian(run, address)
        client = GuardianClient(address, rank=run.rank, on_failure=self.watch.receive, start_timeout_s=start_timeout_s)
        return client, guardian

    @contextlib.contextmanager
    def limited(self, run: RunContext) -> Iterator[None]:
        """Limits the time for connecting the ranks; after it, connections are cut."""
        self.begin(run)
        assert self._deadline_s is not None
        left_s = max(0.0, self._deadline_s - time.monotonic())
        try:
            # An error about the time limit says more than one about a cut connection.
            with CONNECTIONS.cut_after(left_s + _CUT_S):
                yield
            if self._rendezvous is not None:  # on rank 0
                self._rendezvous.withdraw()
            assert self.watch.client is not None
            self.watch.client.joining(None)
        except RendezvousError:
            raise
        except RuntimeError as error:
            self.watch.check()
            if any(reason in str(error) for reason in NO_WAY.values()):
                raise ConnectionError(  # no RuntimeError: it is told before those who only see connections close
                    f"no way to another rank: {error}. Check the routes and firewalls between the two hosts, or name "
                    "another interface by GLOO_SOCKET_IFNAME"
                ) from error
            if time.monotonic() < self._deadline_s:
                raise
            raise RendezvousError(
                f"all ranks arrived, but were not connected within {run.join_timeout_s:g} s (join_timeout_s): {error}"
            ) from error
        finally:
            self._deadline_s = self._rendezvous = None

    def meet(self, run: RunContext, alike: Mapping[str, str]) -> Store | None:
        """Waits for all ranks; returns the store for their process group, or None if there is one already.

        Raises:
            RendezvousError: ranks are missing, or settings (:func:`table_of`) differ; alike on all that have come.
        """
        if dist.is_initialized():
            return None
        client = self.watch.client
        assert self._deadline_s is not None
        assert client is not None
        limit = Limit(self._deadline_s, run.join_timeout_s, self.watch.check)
        world_size = run.environment.world_size()
        address = source_address(run.environment.main_address) or ""
        table = {**alike, "loads a checkpoint": "yes" if self.resumes else "no"}
        own = Arrival(run.rank, own_host(), run.node_rank, os.getpid(), world_size, table, address)
        # Another host that was started by mistake does not reach the store, where all would see it.
        if run.num_nodes == 1 and (problem := conflict([own])) is not None:
            raise RendezvousError(problem)
        store = main_store(run, limit, CONNECTIONS)
        LAST_STORE[:] = [store]
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        meets_hosts = run.num_nodes > 1 and not self._has_met_hosts
        if meets_hosts and run.rank == 0:
            own = replace(own, offer=_invite_hosts(client, run))
        rendezvous = Rendezvous(store, own, limit, attempt=f"{restart}-{self._attempt}")
        rendezvous.check_in()
        if own.offer is not None:
            self._rendezvous = rendezvous
        elif meets_hosts and run.local_rank == 0:
            [first] = rendezvous.wait_for(0)
            secret = job_secret(os.environ) or first.offer["secret"]
            client.join_hosts(first.offer["address"], first.offer["port"], node_rank=run.node_rank, secret=secret)
        arrivals = rendezvous.wait_for()
        if run.num_nodes > 2:  # links between two hosts other than node 0's
            hosts = {each.address: node_name(each.node_rank, each.host) for each in arrivals}
            own_name = node_name(run.node_rank, own_host())
            client.find_failure = partial(broken_link, own_name, hosts, run.failure_timeout_s)
        return rendezvous.group_store


def main_store(run: RunContext, limit: Limit, connections: Connections, *, rank: int | None = None) -> TCPStore:
    """The job's store: rank 0 has it, unless torchrun's agent or the supervisor of ``ft_ddp`` has it already."""
    return MainStore(
        *(run.environment.main_address, run.environment.main_port, limit),
        rank=run.rank if rank is None else rank,
        is_one_host=run.num_nodes == 1 and not run.admits_others,
        is_kept=STARTS in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        connections=connections,
    ).open()


def start_guardian(run: RunContext, address: str | None = None) -> Guardian:
    """Starts the guardian of this host, at a random address for ranks that this process is about to start."""
    return Guardian.start(
        num_ranks=run.ranks_per_host,
        failure_timeout_s=run.failure_timeout_s,
        hang_report_s=run.hang_report_s,
        address=address,
    )


def _invite_hosts(client: GuardianClient, run: RunContext) -> dict[str, Any]:
    """On rank 0: makes the guardian listen for the other hosts' guardians; returns address, port and secret for them.

    The secret is included only if the environment has none: a reader of the store then gets it while the ranks join.
    """
    given, made = job_secret(os.environ), os.urandom(32).hex()
    address = source_address(run.environment.main_address) or run.environment.main_address
    port = client.listen_for_hosts(address, num_nodes=run.num_nodes, secret=given or made)
    return {"address": address, "port": port, "secret": None if given else made}


def broken_link(own: str, hosts: Mapping[str, str], failure_timeout_s: float) -> Failure | None:
    """The failure of a link of this rank that is silent for half of ``failure_timeout_s``, or None.

    A guardian talks to node 0's only. The links between other hosts carry connections of ranks, whose kernels answer
    each other even while the processes are busy or stopped. ``hosts`` are the names of hosts by their addresses.
    """
    for _, address, silent_s in CONNECTIONS.silent(max(_SHORTEST_SILENCE_S, failure_timeout_s / 2)):
        return Failure(silence(own, hosts.get(address, address), silent_s), age_s=silent_s)
    return None


def check_model(module: torch.nn.Module, world: MeteredGroup) -> None:
    """Compares the module's parameters and buffers over all ranks, by name, type and shape; a collective.

    Raises:
        RendezvousError: they differ; the same message on all ranks.
    """
    table = model_table([*module.named_parameters(), *module.named_buffers()])
    found = compared(table, world.gather_objects, "do not have the same model")
    if found is not None:
        raise RendezvousError(f"{found}\nBuild it alike on all ranks: from the same configuration and the same code")


def table_of(run: RunContext, settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that must be equal on all ranks, and are known before they join; further ones are given."""
    values = {
        **{name: value_text(value) for name, value in settings.items()},
        "num_nodes": str(run.num_nodes),
        "devices on each host": str(run.ranks_per_host),
        "device type": run.device_type,
        "back end": str(run.backend or "by device"),
        "torch": str(torch.__version__),
        "lightning": str(lightning.__version__),
    }
    if run.num_nodes > 1:
        secret = job_secret(os.environ)
        shown = "not set" if secret is None else f"set (digest {hashlib.sha256(secret.encode()).hexdigest()[:8]})"
        values[JOB_SECRET] = shown
    with contextlib.suppress(PackageNotFoundError):
        values["lightning_multigpu"] = version("lightning_multigpu")
    return values
