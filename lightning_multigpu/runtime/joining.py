"""How the process of a rank comes to be one of a world: from its launch until all ranks are connected."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import lightning
import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lightning_multigpu.communication.digest import disagreement, fingerprint, model_table, value_text
from lightning_multigpu.communication.main_store import MainStore, kept_by_torchrun
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.rendezvous import Arrival, Rendezvous, RendezvousError, own_host
from lightning_multigpu.guardian import Guardian
from lightning_multigpu.guardian.discovery import address_of_job
from lightning_multigpu.guardian.start import ADDRESS
from lightning_multigpu.runtime.process_groups import CONNECTIONS
from lightning_multigpu.runtime.watching import Watching

if TYPE_CHECKING:
    from lightning_multigpu.strategies.base import MultiGPUStrategy

_CUT_S = 2.0

# How often this process has joined at an address: a store or a guardian of an earlier time may still be there.
_ATTEMPTS: Counter[tuple[str, int]] = Counter()


class Joining:
    """This rank's way into the world, in three steps that follow each other::

        launcher             begin       the guardian of the host sees this rank
        setup_environment    meet        the ranks find each other, and that they agree; the guardians of hosts meet
                             (process groups, within the same time limit)
        setup                check_model the ranks have the same model

    Args:
        timeout_s: how long the first two may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._deadline_s: float | None = None
        self._attempt = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Joining, (self.timeout_s,)  # what a spawned rank starts from

    def start_guardian(self, strategy: MultiGPUStrategy) -> Guardian | None:
        """Starts the guardian of this host for ranks that this process is about to start; None without Linux."""
        if sys.platform != "linux":
            return None
        return Guardian.start(
            num_ranks=strategy.num_processes,
            failure_timeout_s=strategy.failure_timeout_s,
            join_timeout_s=self.timeout_s + strategy.failure_timeout_s,
            hang_report_s=strategy.hang_report_s,
        )

    def begin(
        self,
        strategy: MultiGPUStrategy,
        *,
        guardian: Guardian | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Puts this rank under its host's guardian, unless it is in a world already.

        Args:
            strategy: of this rank.
            guardian: if this process has started it.
            variables: by which it is found, if they do not stand in the environment.
        """
        if dist.is_initialized() or self._deadline_s is not None:
            return
        self._deadline_s = time.monotonic() + self.timeout_s
        strategy.set_world_ranks()
        environment = strategy.cluster_environment
        assert environment is not None
        where = (environment.main_address, environment.main_port)
        self._attempt = _ATTEMPTS[where]
        _ATTEMPTS[where] += 1
        watch = strategy.failure_watch
        watch.begin(CONNECTIONS.cut)
        if sys.platform != "linux":
            return
        if guardian is not None:
            variables = guardian.environment
        if variables or os.environ.get(ADDRESS):
            watch.watching = Watching.inherited(
                variables or os.environ, guardian, rank=strategy.global_rank, on_failure=watch.seen_by_guardian
            )
        else:
            watch.watching = Watching.of_job(
                address_of_job(*where, node_rank=strategy.node_rank, attempt=self._attempt, variables=os.environ),
                join_timeout_s=self.timeout_s,
                **_what_guardians_ask(strategy),
            )
        # Later than the rank itself, which can say more, if it still can.
        watch.watching.joining(self.timeout_s + strategy.failure_timeout_s)

    @contextlib.contextmanager
    def limited(self, strategy: MultiGPUStrategy) -> Iterator[None]:
        """The time in which everything that connects ranks has to be done; connections are cut when it is over."""
        if dist.is_initialized():
            strategy.failure_watch.begin(lambda: None)
            yield
            return
        self.begin(strategy)
        assert self._deadline_s is not None
        left_s = max(0.0, self._deadline_s - time.monotonic())
        try:
            # Who looks at the clock by itself says more than who finds its connections cut.
            with CONNECTIONS.cut_after(left_s + _CUT_S):
                yield
            if strategy.failure_watch.watching is not None:
                strategy.failure_watch.watching.joined()
        except RendezvousError:
            raise
        except RuntimeError as error:
            strategy.failure_watch.check()
            if time.monotonic() < self._deadline_s:
                raise
            raise RendezvousError(
                f"the ranks have come, but were not connected within {self.timeout_s:g} s (join_timeout_s): {error}"
            ) from error
        finally:
            self._deadline_s = None

    def meet(self, strategy: MultiGPUStrategy) -> Store | None:
        """Waits for all ranks; returns the store for their process group, or None if there is one already.

        Raises:
            RendezvousError: they do not all come, or are not alike; the same one on all that have come.
        """
        if dist.is_initialized():
            return None
        assert self._deadline_s is not None
        assert strategy.cluster_environment is not None
        environment, check = strategy.cluster_environment, strategy.failure_watch.check
        store = MainStore(
            environment.main_address,
            environment.main_port,
            rank=strategy.global_rank,
            is_kept=kept_by_torchrun(os.environ),
            connections=CONNECTIONS,
            deadline_s=self._deadline_s,
            timeout_s=self.timeout_s,
            check=check,
        ).open()
        own = Arrival(
            strategy.global_rank,
            own_host(),
            strategy.node_rank,
            os.getpid(),
            environment.world_size(),
            table_of(strategy),
        )
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        rendezvous = Rendezvous(
            store,
            own,
            attempt=f"{restart}-{self._attempt}",
            deadline_s=self._deadline_s,
            timeout_s=self.timeout_s,
            check=check,
        )
        watching = strategy.failure_watch.watching
        several = watching is not None and strategy.num_nodes > 1
        if several and own.rank == 0:
            assert watching is not None
            rendezvous.offer("guardian", watching.invite_hosts(environment.main_address, strategy.num_nodes))
        rendezvous.check_in()
        if several and strategy.local_rank == 0 and own.rank != 0:
            assert watching is not None
            watching.join_hosts(rendezvous.wait_for("guardian"), strategy.node_rank)
        rendezvous.wait_for_all()
        return rendezvous.group_store

    def watch_again(self, strategy: MultiGPUStrategy, world: MeteredGroup) -> None:
        """Puts this rank under a new guardian when it came in a world that was open already."""
        watch = strategy.failure_watch
        if sys.platform != "linux" or watch.watching is not None:
            return
        watch.watching = Watching.again(world, node_rank=strategy.node_rank, **_what_guardians_ask(strategy))
        if strategy.num_nodes > 1:
            assert strategy.cluster_environment is not None
            mine = None
            if strategy.global_rank == 0:
                mine = watch.watching.invite_hosts(strategy.cluster_environment.main_address, strategy.num_nodes)
            invitation = world.broadcast_object(mine, 0)
            if strategy.local_rank == 0 and strategy.global_rank != 0:
                watch.watching.join_hosts(invitation, strategy.node_rank)


def _what_guardians_ask(strategy: MultiGPUStrategy) -> dict[str, Any]:
    """What a rank tells of itself wherever its guardian comes from."""
    return {
        "rank": strategy.global_rank,
        "local_rank": strategy.local_rank,
        "num_processes": strategy.num_processes,
        "failure_timeout_s": strategy.failure_timeout_s,
        "hang_report_s": strategy.hang_report_s,
        "on_failure": strategy.failure_watch.seen_by_guardian,
    }


def check_model(module: torch.nn.Module, world: MeteredGroup) -> None:
    """Compares the module's parameters and buffers over all ranks, by name, type and shape; a collective.

    Raises:
        RendezvousError: they differ; the same message on all ranks.
    """
    table = model_table([*module.named_parameters(), *module.named_buffers()])
    own = fingerprint(table)
    if set(world.gather_objects(own)) == {own}:
        return
    found = disagreement(dict(enumerate(world.gather_objects(table))), "do not have the same model")
    raise RendezvousError(f"{found}\nBuild it alike on all ranks: from the same configuration and the same code")


def table_of(strategy: MultiGPUStrategy) -> dict[str, str]:
    """What must be equal on all ranks and is known before they have joined."""
    values = {
        "strategy": type(strategy).__qualname__,
        **{f"option {name}": value_text(value) for name, value in strategy.options.items()},
        "num_nodes": str(strategy.num_nodes),
        "devices on each host": str(strategy.num_processes),
        "device type": strategy.root_device.type,
        "precision": str(strategy.precision_plugin.precision),
        "back end": str(strategy.process_group_backend or "by device"),
        "torch": str(torch.__version__),
        "lightning": str(lightning.__version__),
    }
    with contextlib.suppress(PackageNotFoundError):
        values["lightning_multigpu"] = version("lightning_multigpu")
    return values
