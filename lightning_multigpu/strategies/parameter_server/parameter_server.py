"""The strategy of data parallel training with parameter servers, which are processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu.communication.interface import source_address
from lightning_multigpu.communication.job_secret import JOB_SECRET, job_secret
from lightning_multigpu.communication.rendezvous import own_host
from lightning_multigpu.engine.parameter_server.consistency import Consistency
from lightning_multigpu.engine.parameter_server.remote_optimizer import RemoteOptimizer
from lightning_multigpu.engine.parameter_server.server_connections import ServerConnections
from lightning_multigpu.engine.parameter_server.server_statistics import ServerStatistics
from lightning_multigpu.engine.parameter_server.wire import elementwise
from lightning_multigpu.runtime.process_groups import leave_world
from lightning_multigpu.runtime.server_process import ServerProcess
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.parameter_server.asynchronous_training import AsynchronousTraining
from lightning_multigpu.strategies.parameter_server.optimizer_servers import OptimizerServerStrategy, Served

if TYPE_CHECKING:
    import lightning.pytorch as pl

_BUCKET_CAP_MB = {True: 4.0, False: 1.0}  # on one host; on a network, where pulls wait for the first bucket
_STARTED_S = 10.0  # servers of the strategy listen before any worker looks for them


class ParameterServerStrategy(OptimizerServerStrategy):
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
        scale_lr_by_staleness: with "async", divide the learning rate of an update by its staleness: the number of
            updates by others since the worker got its weights (Zhang et al., IJCAI 2016).
        delay_compensation: with "async", lambda in ``g + lambda * g * g * (w - w_pulled)``, which approximates
            gradients at the newest weights w (Zheng et al., ICML 2017); 0 for none. A server then keeps each worker's
            weights.
        num_servers: the number of servers that the strategy starts, spread over the hosts; "nodes" for one on each
            host, but at least 2.
        servers: "auto" to start them, or the addresses of servers that ``lightning-multigpu serve`` runs elsewhere, as
            ``["10.0.0.5:7000"]``. These need the same ``LIGHTNING_MULTIGPU_JOB_SECRET`` as the ranks.
        compression: push float32 gradients as "fp16", "bf16" or "int8", the last with error feedback, as under
            ring_ddp; pulled weights are not compressed.
        bucket_cap_mb: size of a bucket of gradients, in MiB; a bucket is pushed, updated and pulled at once. None for 4
            on one host with ``servers="auto"``, else 1: on a network, the first pull begins when a bucket is pushed.
        options: options of :class:`OptimizerServerStrategy` and
            :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`.

    Raises:
        ValueError: an option is out of its range, or the optimizer cannot run on a server.
    """

    _state_is_elsewhere = True

    def __init__(
        self,
        *,
        mode: Literal["sync", "async"] = "sync",
        max_staleness: int | None = None,
        scale_lr_by_staleness: bool = False,
        delay_compensation: float = 0.0,
        num_servers: int | Literal["nodes"] = 1,
        servers: Literal["auto"] | list[str] = "auto",
        compression: str | Mapping[str, Any] | None = None,
        bucket_cap_mb: float | None = None,
        **options: Any,
    ) -> None:
        option_checks.check_choice("mode", mode, ("sync", "async"))
        option_checks.check_bools(scale_lr_by_staleness=scale_lr_by_staleness)
        rules = {
            "max_staleness": max_staleness is not None,
            "scale_lr_by_staleness": scale_lr_by_staleness,
            "delay_compensation": delay_compensation != 0,
        }
        _check_rules(mode, max_staleness, delay_compensation, [name for name, is_given in rules.items() if is_given])
        self._addresses = None if servers == "auto" else _addresses(servers)
        _check_servers(self._addresses, num_servers)
        if bucket_cap_mb is not None:
            option_checks.check_positive("bucket_cap_mb", bucket_cap_mb)
        super().__init__(**options)
        self._mode, self._max_staleness = mode, max_staleness
        self._is_asynchronous = mode == "async" and max_staleness != 0
        self._consistency = Consistency()
        if self._is_asynchronous:
            self._check_that_no_rank_waits(options)
            self._consistency = Consistency(False, max_staleness, scale_lr_by_staleness, float(delay_compensation))
        self._asynchronous: AsynchronousTraining | None = None
        self._compressor = elementwise(compression)
        self._num_servers = num_servers
        self._reported_unshared: set[str] = set()
        self._bucket_cap_mb = bucket_cap_mb
        self._processes: list[ServerProcess] = []
        self._connections: ServerConnections | None = None

    def _check_that_no_rank_waits(self, options: Mapping[str, Any]) -> None:
        if self.feed.uneven_inputs != "stop" or self.common.check_every:
            name = "uneven_inputs" if self.feed.uneven_inputs != "stop" else "check_replicas_every_n_steps"
            raise ValueError(
                f"{name}={options[name]!r}: with mode='async' no rank waits for another one, and their weights differ; "
                "leave it out, or use mode='sync'"
            )

    @property
    @override
    def options(self) -> dict[str, Any]:
        return {
            **super().options,
            "mode": self._mode,
            "max_staleness": self._max_staleness,
            "scale_lr_by_staleness": self._consistency.scales_learning_rate,
            "delay_compensation": self._consistency.compensation,
            "num_servers": self._num_servers,
            "servers": self._addresses,
            "compression": None if self._compressor is None else repr(self._compressor),
            "bucket_cap_mb": self._bucket_cap_mb,
        }

    @override
    def check_before_launch(self, trainer: pl.Trainer) -> None:
        super().check_before_launch(trainer)
        if self._addresses is not None and job_secret(os.environ) is None:
            raise ValueError(
                f"servers=[...]: {JOB_SECRET} is not set, by which servers and ranks know each other; make "
                "one with 'openssl rand -hex 32', and set it for both"
            )
        finders = [c for c in trainer.callbacks if isinstance(c, BatchSizeFinder | LearningRateFinder)]  # type: ignore[attr-defined]
        if finders and self._is_asynchronous:
            raise ValueError(
                f"{type(finders[0]).__name__}: it has all ranks train in step with each other, which mode='async' does "
                "not; find the value on one device with strategy='auto', and train with it"
            )
        if self._is_asynchronous and self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True: ranks wait for each other's statistics in every layer, and with mode='async' "
                "they do not; use sync_batchnorm=False or strategy='sync_ps'"
            )

    @override
    def _connect(self) -> None:
        assert self.groups is not None
        given = job_secret(os.environ)
        secret = self.broadcast(os.urandom(32)) if given is None else bytes.fromhex(given)
        self._connections = connections = ServerConnections(
            self._addresses or self._start_servers(secret),
            secret,
            worker=self.global_rank,
            num_workers=self.world_size,
            consistency=self._consistency,
            meter=self.meter,
            gather=self.gather_objects,
            silence_s=self.failure_timeout_s / 2,
        )
        self.groups.also_cut.append(connections.cut)
        limit = f"for {self.join_timeout_s:g} s at most (join_timeout_s)"
        connections.open(
            timeout_s=self.join_timeout_s if self._addresses else min(self.join_timeout_s, _STARTED_S),
            on_late=lambda server: rank_zero_info(f"{server} is not there yet; ranks look for it {limit}"),
        )
        if self._is_asynchronous:
            self._asynchronous = AsynchronousTraining(
                connections,
                self.signals,
                leave_groups=self._leave_world,
                can_be_lost=self.failure_watch.can_be_lost,
            )

    def _start_servers(self, secret: bytes) -> list[tuple[str, int]]:
        """Starts this host's servers on its first rank; returns the addresses of all servers; a collective."""
        number = max(2, self.num_nodes) if self._num_servers == "nodes" else self._num_servers
        own = range(self.node_rank, number, self.num_nodes) if self.local_rank == 0 else range(0)
        host = "127.0.0.1"
        if self.num_nodes > 1:
            host = source_address(self.run_context.main_address) or host
            self._check_reachable(host)
        computing = len(own) + (self.num_processes if self.root_device.type == "cpu" else 0)
        threads = max(1, option_checks.available_cpu_count() // max(1, computing))
        self._processes = [ServerProcess(host, secret, num_threads=threads) for _ in own]
        found = dict(zip(own, [(host, process.port) for process in self._processes], strict=True))
        everywhere = {k: where for by_rank in self.gather_objects(found) for k, where in by_rank.items()}
        return [everywhere[k] for k in range(number)]

    def _check_reachable(self, host: str) -> None:
        """Refuses a loopback address for servers of several hosts; a collective."""
        hosts = self.gather_objects((own_host(), host))
        at_home = [(name, address) for name, address in hosts if ip_address(address).is_loopback]
        if at_home and len({name for name, _ in hosts}) > 1:
            raise ValueError(
                f"MASTER_ADDR={self.run_context.main_address} leads to {at_home[0][1]} on {at_home[0][0]}, where "
                "parameter servers would listen, and ranks of other hosts do not reach them there; set it to an "
                "address of the network on all hosts, or name servers, such as servers=['10.0.0.5:7000']"
            )

    @property
    def _bucket_bytes(self) -> int:
        is_on_one_host = self._addresses is None and self.num_nodes == 1
        return round((self._bucket_cap_mb or _BUCKET_CAP_MB[is_on_one_host]) * 2**20)

    @override
    def _serve(self, optimizer: Optimizer) -> Served:
        assert self._connections is not None
        served = RemoteOptimizer(
            optimizer,
            self._connections,
            split=self._split,
            bucket_bytes=self._bucket_bytes,
            compressor=self._compressor,
        )
        for name, why in self._connections.unshared.items():
            if name not in self._reported_unshared:
                self._reported_unshared.add(name)
                rank_zero_info(f"{name} is on this host, but gradients and weights go over sockets: {why}")
        return served

    @override
    def _disconnect(self) -> None:
        if self._connections is not None:
            connections, self._connections = self._connections, None
            connections.close()
        for process in self._processes:
            process.close()
        self._processes = []

    @override
    def server_statistics(self) -> ServerStatistics | None:
        return None if self._connections is None or self.global_rank else self._connections.statistics()

    # Asynchronous workers

    @override
    def newest_of_ranks(self, name: str, value: Any) -> list[Any] | None:
        return None if self._asynchronous is None else self._asynchronous.newest(name, value)

    @override
    def gather_at_end(self, value: Callable[[], Any]) -> list[Any] | None:
        return None if self._asynchronous is None else self._asynchronous.gather_at_end(value)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if self._asynchronous is None:
            return
        self._asynchronous.served = [served for served in self._served.values() if isinstance(served, RemoteOptimizer)]

    @override
    def barrier(self, name: str | None = None) -> None:
        super().barrier(name)
        if name == "run-stage" and self._asynchronous is not None:  # the last barrier before rank 0 validates alone
            assert self.lightning_module is not None
            self._asynchronous.begin(self.lightning_module.trainer)
            self._leave_world()

    def _leave_world(self) -> None:
        """Leaves the process groups of the run; from then on collectives return this rank's own values."""
        if self.groups is not None:
            assert self._connections is not None
            self.collectives.leave()
            leave_world()
            self.failure_watch.joined(self._connections.cut, self.world_size)

    @override
    def teardown(self) -> None:
        training, self._asynchronous = self._asynchronous, None
        if training is not None and self.lightning_module is not None:
            training.end(self.lightning_module.trainer)
        super().teardown()

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if self._asynchronous is not None and trainer is not None and not trainer.training:
            return {"num_replicas": 1, "rank": 0}  # rank 0 validates, with all batches
        return super().distributed_sampler_kwargs

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        if self._asynchronous is None:
            return super().process_dataloader(dataloader)
        assert self.lightning_module is not None
        return self._asynchronous.distribute(dataloader, self.lightning_module.trainer)

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
        if self._asynchronous is not None and self.lightning_module is not None:
            self._asynchronous.after_step(self.lightning_module.trainer)
        return output

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._asynchronous is not None and self.lightning_module is not None and not self.failure_watch.failed:
            self._asynchronous.training_ends(self.lightning_module.trainer)

    @override
    def _further_state(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        return {} if self._asynchronous is None else self._asynchronous.further_state()

    @override
    def _load_further_state(self, checkpoint: Mapping[str, Any]) -> None:
        if self._asynchronous is not None:
            self._asynchronous.loaded(checkpoint)


def _check_rules(mode: str, max_staleness: Any, delay_compensation: Any, given: Sequence[str]) -> None:
    """Checks the options that rule when and how asynchronous workers update; ``given`` names those that are set."""
    if mode == "sync" and given:
        raise ValueError(
            f"{' and '.join(given)}: with mode='sync' no gradients are stale; leave that out, or use mode='async'"
        )
    if max_staleness == 0 and len(given) > 1:
        raise ValueError(
            f"max_staleness=0: no gradients are stale then, and {given[1]} would do nothing; leave it out, or use "
            "max_staleness=None, or 1 or more"
        )
    if max_staleness is not None and (max_staleness != 0 or isinstance(max_staleness, bool)):
        option_checks.check_positive("max_staleness", max_staleness, whole=True)
    if delay_compensation != 0:
        option_checks.check_positive("delay_compensation", delay_compensation)


def _check_servers(addresses: Sequence[tuple[str, int]] | None, num_servers: Any) -> None:
    """Checks the number of servers; ``addresses`` are those of servers that run already."""
    if isinstance(num_servers, str):
        option_checks.check_choice("num_servers", num_servers, ("nodes",))
    else:
        option_checks.check_positive("num_servers", num_servers, whole=True)
    if addresses is not None and num_servers not in (1, len(addresses)):
        raise ValueError(
            f"num_servers={num_servers!r} is for servers that the strategy starts, and "
            f"servers={[f'{host}:{port}' for host, port in addresses]!r} names {len(addresses)}: leave one of the two "
            "out"
        )


def _addresses(servers: Any) -> list[tuple[str, int]]:
    """Hosts and ports from texts like "10.0.0.5:7000" or "[::1]:7000"."""
    if not isinstance(servers, list | tuple) or not servers:
        raise ValueError(f"servers={servers!r}: give 'auto', or a list of addresses such as ['10.0.0.5:7000']")
    found = []
    for address in servers:
        host, _, port = str(address).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ValueError(f"servers={servers!r}: {address!r} is no address and port such as '10.0.0.5:7000'")
        found.append((host.strip("[]"), int(port)))
    if len({*found}) < len(found):
        raise ValueError(f"servers={servers!r}: an address stands there twice")
    return found
