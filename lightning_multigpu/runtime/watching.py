"""Puts a rank under the eyes of the guardian of its host, and the hosts' guardians in touch with each other."""

from __future__ import annotations

import multiprocessing.util
import os
from collections.abc import Callable, Mapping
from typing import Any

from lightning_multigpu.communication.interface import source_address
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.collective_observer import CollectiveObserver, ranks_text
from lightning_multigpu.guardian import Failure, Guardian, GuardianClient
from lightning_multigpu.guardian.discovery import find, start_at
from lightning_multigpu.guardian.start import ADDRESS, SECRET

OnFailure = Callable[[Failure], None]


class Watching:
    """This rank's part in it.

    A host's guardian is started before its ranks join: by the launcher that starts them, or else by the first rank.
    The guardians of several hosts meet at that of node 0 as soon as rank 0's store is open, and from then on without
    any store or process group, so that they also see a host or a link that is gone.

    Args:
        client: of the host's guardian.
        guardian: if this process has started it for this rank's run.
    """

    def __init__(self, client: GuardianClient, guardian: Guardian | None) -> None:
        self._client = client
        self._guardian = guardian
        # Made before any worker is forked, it is theirs as well: a worker that is ended would leave its own behind.
        self._client.uses_temporary(multiprocessing.util.get_temp_dir())

    @classmethod
    def inherited(
        cls, variables: Mapping[str, str], guardian: Guardian | None, *, rank: int, on_failure: OnFailure
    ) -> Watching:
        """Under the guardian that the launcher has started, whose ``variables`` it has passed on."""
        client = GuardianClient.from_variables(variables, rank=rank, on_failure=on_failure)
        # A program that this rank starts must not take itself for a rank, and neither a later run in this process.
        for name in (ADDRESS, SECRET):
            os.environ.pop(name, None)
        return cls(client, guardian)

    @classmethod
    def of_job(
        cls,
        address: str,
        *,
        rank: int,
        local_rank: int,
        num_processes: int,
        failure_timeout_s: float,
        join_timeout_s: float,
        hang_report_s: float | None,
        on_failure: OnFailure,
    ) -> Watching:
        """Under the guardian at the job's address on this host; the first rank of the host starts it."""
        guardian: Guardian | None = None
        if local_rank == 0:
            # The ranks say more about who is missing than the guardian can, so it lets them speak first.
            guardian = start_at(
                address,
                num_ranks=num_processes,
                failure_timeout_s=failure_timeout_s,
                join_timeout_s=join_timeout_s + failure_timeout_s,
                hang_report_s=hang_report_s,
            )
            if guardian is not None:
                guardian.withdraw()
        return cls(find(address, rank=rank, on_failure=on_failure, timeout_s=join_timeout_s), guardian)

    @classmethod
    def again(
        cls,
        world: MeteredGroup,
        *,
        rank: int,
        local_rank: int,
        node_rank: int,
        num_processes: int,
        failure_timeout_s: float,
        hang_report_s: float | None,
        on_failure: OnFailure,
    ) -> Watching:
        """In a world that an earlier run of these processes has left open; a collective over it."""
        guardian: Guardian | None = None
        mine: dict[str, str] = {}
        if local_rank == 0:
            guardian = Guardian.start(
                num_ranks=num_processes, failure_timeout_s=failure_timeout_s, hang_report_s=hang_report_s
            )
            guardian.withdraw()
            mine = guardian.environment
        found = {node: entry for node, entry in world.gather_objects((node_rank, mine)) if entry}
        client = GuardianClient.from_variables(found[node_rank], rank=rank, on_failure=on_failure)
        return cls(client, guardian)

    def invite_hosts(self, main_address: str, num_nodes: int) -> dict[str, Any]:
        """On rank 0: has the guardian listen for those of the other hosts; returns what they need to come."""
        secret = os.urandom(32).hex()
        address = source_address(main_address) or main_address
        port = self._client.listen_for_hosts(address, num_nodes=num_nodes, secret=secret)
        return {"address": address, "port": port, "secret": secret}

    def join_hosts(self, invitation: Mapping[str, Any], node_rank: int) -> None:
        """On the first rank of another host: has the guardian join that of node 0, and waits for its welcome."""
        self._client.join_hosts(
            invitation["address"], invitation["port"], node_rank=node_rank, secret=invitation["secret"]
        )

    @property
    def notes(self) -> CollectiveObserver:
        """Where this rank notes the collectives that it is in."""
        return self._client.flight_recorder

    @property
    def waited(self) -> list[str]:
        """After a failure: what this host's ranks were waiting in, a line a rank."""
        return self._client.waited

    def joining(self, limit_s: float) -> None:
        """This rank is on its way to the others; it has failed if that takes longer, even if it cannot say so."""
        self._client.joining(limit_s)

    def joined(self) -> None:
        """This rank has joined the others."""
        self._client.joined()

    def completed(self, step: int) -> None:
        """Notes how many optimizer steps are done, for the message; costs less than a microsecond."""
        self._client.completed(step)

    def failed(self, what: str, *, step: int | None, traceback: str) -> None:
        """This rank fails by itself."""
        self._client.failed(what, step=step, traceback=traceback)

    def report_to(self, directory: str, node_rank: int | None) -> None:
        """Sets where this host's guardian leaves files about failures and hangs; with several hosts, ``node_rank``."""
        self._client.report_to(directory, node_rank=node_rank)

    def counts_interrupts(self) -> None:
        """A second Ctrl-C may end the job at once."""
        self._client.counts_interrupts()

    def interrupted(self, number: int) -> None:
        """This rank has received its first or second SIGINT."""
        self._client.interrupted(number)

    def finish(self, world_size: int) -> Failure | None:
        """Waits until all ranks have come to the end of the run, or one has failed: returns that failure."""
        ranks = ranks_text(range(world_size))
        note = self.notes.began("barrier", group="end of the run", ranks=ranks, group_size=world_size, size_bytes=0)
        failure = self._client.finish()
        if note is not None:
            note.ended()
        return failure

    def shown(self) -> None:
        """This rank shows the failure in its terminal."""
        self._client.announced()

    def child_ended(self, rank: int, exit_code: int) -> None:
        """A rank that this process has started has ended: some kernels tell its parent only how."""
        if self._guardian is not None:
            self._guardian.ended(rank, exit_code)

    def end(self) -> None:
        """The run is over for this rank: its end is no failure from here on."""
        self._client.goodbye()
        if self._guardian is not None:
            self._guardian.stop()
            self._guardian = None
