"""The strategy of data parallel training with parameter servers, which are processes of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu._torch_compat import job_store
from lightning_multigpu._usable_cores import usable_cores
from lightning_multigpu.engine.data_parallel.module_buffers import ModuleBuffers
from lightning_multigpu.engine.parameter_server.pair import PairEndedError
from lightning_multigpu.engine.parameter_server.server import EXTERNAL, RUNS, Job
from lightning_multigpu.engine.parameter_server.server_statistics import ServerStatistics
from lightning_multigpu.engine.parameter_server.server_transport import ServerTransport
from lightning_multigpu.engine.parameter_server.servers import Servers
from lightning_multigpu.job.process_groups import leave_world
from lightning_multigpu.job.run_context import RunContext
from lightning_multigpu.job.server_process import ServerProcess
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.base import MultiGPUStrategy
from lightning_multigpu.strategies.parameter_server.asynchronous_training import AsynchronousTraining
from lightning_multigpu.strategies.run_view import RunView

if TYPE_CHECKING:
    import lightning.pytorch as pl

_BUCKET_CAP_MB = {True: 4.0, False: 1.0}  # on one host; on a network, where pulls wait for the first bucket
_POLL_S = 0.05


class ParameterServerStrategy(MultiGPUStrategy):
    """Data parallel training with parameter servers, which average gradients, update the weights and send them.

    Ranks are workers: they push gradients to the servers while backward still runs, and pull new weights. The servers
    are further processes that the strategy starts on the hosts of the run. They hold the weights and the optimizer's
    state in shards.

    With ``mode="sync"`` an update uses the average of all workers' gradients, and weights equal one device's at the
    same global batch. With ``mode="async"`` the gradients of each worker make an update as soon as they arrive, and no
    worker waits for another. A batch goes to the worker that asks for it first, and an epoch has each batch once. Rank
    0 validates, saves, and decides when training ends. An epoch has as many updates as one device makes at the batch
    size of a rank, and schedulers step with all updates.

    Args:
        mode: "sync" or "async".
        max_staleness: with "async", the most steps that a worker may be ahead of the slowest one: 0 for the same
            updates as "sync", None for no bound.
        num_servers: the number of servers; those that the strategy starts are spread over the hosts. "nodes" for one
            on each host, but at least 2.
        servers: "auto" to start them, or "external" for servers that join the job by themselves: ``lightning-multigpu
            serve`` with the ``MASTER_ADDR`` and ``MASTER_PORT`` of the job.
        bucket_cap_mb: size of a bucket of gradients, in MiB; a bucket is pushed, updated and pulled at once. None for 4
            on one host with ``servers="auto"``, else 1: on a network, the first pull begins when a bucket is pushed.
        options: options of :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`.

    Raises:
        ValueError: an option is out of its range, or the optimizer cannot run on a server.
    """

    def __init__(
        self,
        *,
        mode: Literal["sync", "async"] = "sync",
        max_staleness: int | None = None,
        num_servers: int | Literal["nodes"] = 1,
        servers: Literal["auto", "external"] = "auto",
        bucket_cap_mb: float | None = None,
        **options: Any,
    ) -> None:
        option_checks.check_choice("mode", mode, ("sync", "async"))
        if mode == "sync" and max_staleness is not None:
            raise ValueError(
                f"max_staleness={max_staleness}: with mode='sync' no gradients are stale; leave that out, or use "
                "mode='async'"
            )
        if max_staleness is not None:
            option_checks.check_number("max_staleness", max_staleness, least=0, whole=True)
        option_checks.check_choice("servers", servers, ("auto", "external"))
        if isinstance(num_servers, str):
            option_checks.check_choice("num_servers", num_servers, ("nodes",))
        else:
            option_checks.check_number("num_servers", num_servers, whole=True)
        if bucket_cap_mb is not None:
            option_checks.check_number("bucket_cap_mb", bucket_cap_mb)
        super().__init__(**options)
        self._options |= option_checks.own_options(ParameterServerStrategy, locals())
        self._mode, self._max_staleness = mode, max_staleness
        self._is_asynchronous = mode == "async" and max_staleness != 0
        if self._is_asynchronous and (self.feed.uneven_inputs != "stop" or self.check_replicas_every):
            name = "uneven_inputs" if self.feed.uneven_inputs != "stop" else "check_replicas_every_n_steps"
            raise ValueError(
                f"{name}={options[name]!r}: with mode='async' no rank waits for another one, and their weights differ; "
                "leave it out, or use mode='sync'"
            )
        self._asynchronous: AsynchronousTraining | None = None
        self._num_servers, self._are_external = num_servers, servers == "external"
        self._bucket_cap_mb = bucket_cap_mb
        self._processes: list[ServerProcess] = []
        self._connections: Servers | None = None

    @override
    def check_before_launch(self, trainer: pl.Trainer) -> None:
        super().check_before_launch(trainer)
        if self._are_external and isinstance(self.cluster_environment, LightningEnvironment):
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if missing:
                raise ValueError(
                    f"servers='external': {' and '.join(missing)} is not set, by which servers find the job; set "
                    "MASTER_ADDR to an address of the host of rank 0, and MASTER_PORT to a free port, here and for "
                    "'lightning-multigpu serve'"
                )
        if self._is_asynchronous:
            kinds = BatchSizeFinder, LearningRateFinder, GradientAccumulationScheduler
            names = [type(c).__name__ for c in trainer.callbacks if isinstance(c, kinds)]  # type: ignore[attr-defined]
            if trainer.accumulate_grad_batches != 1:
                names.append(f"accumulate_grad_batches={trainer.accumulate_grad_batches}")
            if self._layer_sync is not None:
                names.append("sync_batchnorm=True")
            if names:
                raise ValueError(
                    f"{names[0]}: with mode='async' each batch of a rank is an update, and no rank waits for another; "
                    "leave it out, or use strategy='sync_ps'"
                )

    @property
    @override
    def run_context(self) -> RunContext:
        return dataclasses.replace(super().run_context, admits_others=self._are_external)

    @property
    @override
    def _ranks_may_differ(self) -> bool:
        return self._is_asynchronous

    @override
    def _setup_model(self, model: Module) -> Module:
        self.buffers = ModuleBuffers(self._module, self.collectives.data, averages=True)
        return self._begin_alike(model, self.collectives.data)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        if self._connections is None:  # else the other optimizers are refused
            self._connect()  # not for evaluation; before schedules ask for the loader, which is one for their mode
        super().setup_optimizers(trainer)
        if not self._is_asynchronous:  # else a worker's gradients are its own
            self._watch_given_gradients()
        self.owned.begin(self.optimizers, self._transport, self.given)
        self.owned.clip_in_steps(
            self._module,
            self.precision_plugin,
            self._data_axis,
            self._note_averages,
            is_asynchronous=self._is_asynchronous,
        )
        if self._asynchronous is not None:
            self._asynchronous.transports = self.owned.transports

    def _connect(self) -> None:
        """Starts the servers, unless they are external, and connects to them; a collective."""
        store = job_store()
        number = max(2, self.num_nodes) if self._num_servers == "nodes" else self._num_servers
        job = Job(
            name=self.broadcast(f"{RUNS}/{store.add(RUNS, 1) if self.global_rank == 0 else 0}"),
            address=self.run_context.environment.main_address,
            num_workers=self.world_size,
            num_servers=number,
            is_synchronous=not self._is_asynchronous,
            max_staleness=self._max_staleness or None,
            join_timeout_s=self.join_timeout_s,
            silence_s=max(1.0, self.failure_timeout_s / 2),
        )
        if self.global_rank == 0:
            store.set(f"{job.name}/job", pickle.dumps(job))
            if self._are_external:
                store.set(EXTERNAL, job.name)
                self._undo.callback(_withdraw, store)
        if not self._are_external:
            self._start_servers(store, job)
        self._connections = servers = Servers(job, worker=self.global_rank, meter=self.meter)
        self._undo.callback(servers.close)
        self.groups.also_cut.append(servers.cut)
        servers.join(store, lambda server: self._await_server(store, job, server))
        if self._is_asynchronous:
            self._asynchronous = AsynchronousTraining(servers, self.signals, can_be_lost=self.failure_watch.can_be_lost)

    def _start_servers(self, store: Any, job: Job) -> None:
        """Starts this host's servers on its first rank."""
        own = range(self.node_rank, job.num_servers, self.num_nodes) if self.local_rank == 0 else range(0)
        computing = len(own) + (self.num_processes if self.root_device.type == "cpu" else 0)
        threads = max(1, usable_cores() // max(1, computing))
        self._processes = [ServerProcess(store.host, store.port, job.name, k, num_threads=threads) for k in own]
        for process in self._processes:
            self._undo.callback(process.close)

    def _await_server(self, store: Store, job: Job, server: int) -> None:
        until_s = time.monotonic() + job.join_timeout_s
        while not store.check([f"{job.name}/server {server}"]):
            self.failure_watch.check()
            for process in self._processes:
                process.check()
            if time.monotonic() > until_s:
                fix = (
                    ": run 'lightning-multigpu serve' with the MASTER_ADDR and MASTER_PORT of this job, once for each "
                    f"of the {job.num_servers} servers (num_servers)"
                )
                raise PairEndedError(
                    f"parameter server {server} of {job.num_servers} did not come within {job.join_timeout_s:g} s "
                    f"(join_timeout_s){fix if self._are_external else ''}"
                )
            time.sleep(_POLL_S)

    @property
    def _bucket_bytes(self) -> int:
        is_on_one_host = not self._are_external and self.num_nodes == 1
        return round((self._bucket_cap_mb or _BUCKET_CAP_MB[is_on_one_host]) * 2**20)

    def _transport(self, optimizer: Optimizer) -> ServerTransport:
        assert self._connections is not None
        return ServerTransport(optimizer, self._connections, bucket_bytes=self._bucket_bytes)

    @override
    def run_view(self) -> RunView:
        return replace(
            super().run_view(),
            server_statistics=self._server_statistics,
            newest_of_ranks=self._newest_of_ranks,
            gather_at_end=lambda value: None if self._asynchronous is None else self._asynchronous.gather_at_end(value),
        )

    def _server_statistics(self) -> ServerStatistics | None:
        if self._connections is None or self.global_rank:
            return None
        sizes = [transport.weights_bytes() for transport in self.owned.transports]
        staleness = self._connections.staleness() if self._is_asynchronous else {}
        return ServerStatistics([*map(sum, zip(*sizes, strict=True))], staleness)

    # Asynchronous workers

    def _newest_of_ranks(self, name: str, value: Any) -> list[Any] | None:
        if self._asynchronous is None or self._connections is None:
            return None
        told = self._connections.exchange(name, value)
        return told if self.global_rank == 0 else [value]

    @override
    def barrier(self, name: str | None = None) -> None:
        super().barrier(name)
        if name == "run-stage" and self._asynchronous is not None:  # the last barrier before rank 0 validates alone
            assert self._connections is not None
            self._asynchronous.begin(self._module.trainer)
            # From then on collectives return this rank's own values: with a process group, Lightning and torchmetrics
            # would have workers wait for each other in every batch.
            self.collectives.leave()
            leave_world()
            self.failure_watch.joined(self._connections.cut, self.world_size)

    @override
    def teardown(self) -> None:
        training, self._asynchronous = self._asynchronous, None
        if training is not None:
            training.end(self._module.trainer)
        try:
            super().teardown()
        finally:
            self._connections = None

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._asynchronous is not None and not self._module.trainer.training:
            return {"num_replicas": 1, "rank": 0}  # rank 0 validates, with all batches
        return super().distributed_sampler_kwargs

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        if self._asynchronous is None:
            return super().process_dataloader(dataloader)
        return self._asynchronous.distribute(dataloader, self._module.trainer)

    @property
    @override
    def replicas_differ(self) -> bool:
        return self._asynchronous is not None

    @override
    def _tell_global_batch(self) -> None:
        if self._asynchronous is None:
            super()._tell_global_batch()
        elif self.world_size > 1:
            rank_zero_info(f"{self.world_size} workers train, each at its own pace: each batch of theirs is an update")

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        if self._asynchronous is not None:
            self._asynchronous.after_step(self._module.trainer)
        return output

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._asynchronous is not None and not self.failure_watch.failed:
            self._asynchronous.training_ends(self._module.trainer)

    # Checkpoints

    @property
    @override
    def _needs_others(self) -> bool:
        return True

    @override
    def _further_state(self) -> dict[str, Any]:
        return {} if self._asynchronous is None else self._asynchronous.further_state()

    @override
    def _load_further_state(self, checkpoint: Mapping[str, Any]) -> None:
        if self._asynchronous is not None:
            self._asynchronous.loaded(checkpoint)


def _withdraw(store: Store) -> None:
    """Has servers that come now wait for the next fit."""
    with contextlib.suppress(RuntimeError):  # the store's process has ended
        store.delete_key(EXTERNAL)
