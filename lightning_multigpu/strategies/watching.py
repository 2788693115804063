"""Puts the ranks of a run under the eyes of a guardian on every host."""

from __future__ import annotations

import multiprocessing.util
import os
from collections.abc import Callable

from lightning_multigpu.communication.collectives import MeteredGroup
from lightning_multigpu.communication.interface import source_address
from lightning_multigpu.communication.notes import Notes
from lightning_multigpu.guardian import Failure, Guardian, GuardianClient


class Watching:
    """This rank's part in it; a collective over the world when it begins.

    The first rank of each host starts the host's guardian. The hosts' guardians meet at that of node 0, without going
    through a store or a process group, so that they also see a host or a link that is gone.

    Args:
        world: all ranks.
        rank, local_rank, node_rank: of this process.
        num_processes: ranks on this host.
        num_nodes: hosts.
        main_address: where rank 0 is reached.
        failure_timeout_s: seconds after a failure in which all processes have to end.
        hang_report_s: seconds of waiting in a collective after which a report says for whom; None for none.
        on_failure: called in another thread when another rank, a host or a guardian has failed.
    """

    def __init__(
        self,
        world: MeteredGroup,
        *,
        rank: int,
        local_rank: int,
        node_rank: int,
        num_processes: int,
        num_nodes: int,
        main_address: str,
        failure_timeout_s: float,
        hang_report_s: float | None,
        on_failure: Callable[[Failure], None],
    ) -> None:
        self._guardian: Guardian | None = None
        self._node_rank = node_rank if num_nodes > 1 else None
        mine: dict[str, str] = {}
        if local_rank == 0:
            self._guardian = Guardian.start(
                num_ranks=num_processes, failure_timeout_s=failure_timeout_s, hang_report_s=hang_report_s
            )
            mine = self._guardian.environment
        found = {node: entry for node, entry in world.gather_objects((node_rank, mine)) if entry}
        self._client = GuardianClient.from_variables(found[node_rank], rank=rank, on_failure=on_failure)
        # Made before any worker is forked, it is theirs as well: a worker that is ended would leave its own behind.
        self._client.uses_temporary(multiprocessing.util.get_temp_dir())
        if num_nodes > 1:
            self._meet(world, rank, local_rank, node_rank, num_nodes, main_address)

    def _meet(
        self, world: MeteredGroup, rank: int, local_rank: int, node_rank: int, num_nodes: int, main_address: str
    ) -> None:
        where: tuple[str, int, str] | None = None
        if rank == 0:
            secret = os.urandom(32).hex()
            address = source_address(main_address) or main_address
            where = (address, self._client.listen_for_hosts(address, num_nodes=num_nodes, secret=secret), secret)
        where = world.broadcast_object(where, 0)
        assert where is not None
        address, port, secret = where
        if local_rank == 0 and rank != 0:
            self._client.join_hosts(address, port, node_rank=node_rank, secret=secret)

    @property
    def notes(self) -> Notes:
        """Where this rank notes the collectives that it is in."""
        return self._client.logbook

    @property
    def waited(self) -> list[str]:
        """After a failure: what this host's ranks were waiting in, a line a rank."""
        return self._client.waited

    def completed(self, step: int) -> None:
        """Notes how many optimizer steps are done, for the message; costs less than a microsecond."""
        self._client.completed(step)

    def failed(self, what: str, *, step: int | None, traceback: str) -> None:
        """This rank fails by itself."""
        self._client.failed(what, step=step, traceback=traceback)

    def report_to(self, directory: str) -> None:
        """Sets where this host's guardian leaves a file about a failure."""
        if self._guardian is not None:
            self._guardian.report_to(directory, node_rank=self._node_rank)

    def counts_interrupts(self) -> None:
        """A second Ctrl-C may end the job at once."""
        self._client.counts_interrupts()

    def interrupted(self, number: int) -> None:
        """This rank has received its first or second SIGINT."""
        self._client.interrupted(number)

    def finish(self) -> Failure | None:
        """Waits until all ranks have come to the end of the run, or one has failed: returns that failure."""
        return self._client.finish()

    def shown(self) -> None:
        """This rank shows the failure in its terminal."""
        self._client.announced()

    def end(self) -> None:
        """The run is over for this rank: its end is no failure from here on."""
        self._client.goodbye()
        if self._guardian is not None:
            self._guardian.stop()
            self._guardian = None
