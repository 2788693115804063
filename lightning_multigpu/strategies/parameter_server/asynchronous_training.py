"""Asynchronous training: what Lightning's loops do where synchronous ranks would wait for each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping, Timer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_multigpu.engine.data_parallel.agreement import ContinuedLoader
from lightning_multigpu.engine.data_parallel.batch_distribution import OnDemandBatchSampler, distribute_batches
from lightning_multigpu.engine.parameter_server.server_transport import ServerTransport
from lightning_multigpu.engine.parameter_server.servers import Servers
from lightning_multigpu.job.batch_feed import evaluation_limit
from lightning_multigpu.job.run_signals import RunSignals

if TYPE_CHECKING:
    import lightning.pytorch as pl

SAVED_AS = "parameter_server"
_DECIDING = Checkpoint | EarlyStopping | Timer


class AsynchronousTraining(Callback):
    """One worker of an asynchronous fit.

    Within an epoch no worker waits for another one, except for ``max_staleness``. Worker 0 validates when all batches
    of the epoch are in the weights, saves, and ends training. Other workers train meanwhile; they do not validate, save
    or stop. ``can_be_lost`` is called when training begins, on workers that may be lost.
    """

    def __init__(self, servers: Servers, signals: RunSignals, *, can_be_lost: Callable[[], object]) -> None:
        self.transports: Sequence[ServerTransport] = ()  # of the optimizers; the strategy sets them
        self._servers = servers
        self._signals = signals
        self._can_be_lost = can_be_lost
        self._is_first = servers.worker == 0
        self._first_batch: int | None = None
        self._resumed_epoch: int | None = None
        self._resumed_version = 0
        self._batches: OnDemandBatchSampler | None = None
        self._number: int | None = None
        self._unreported: list[int] = []
        self._has_stepped = False
        self._num_reported = 0
        self._planned_updates = math.inf
        self._stepped: dict[int, int] = {}
        self._kept: list[tuple[int, Callback]] = []
        self._at_end: list[tuple[Callable[[], Any], list[Any]]] = []
        self._limit_val_batches: int | float | None = None
        self._minimums: tuple[int | None, int | None] = (None, None)
        self._sizes: dict[int, int] = {}

    @property
    def version(self) -> int:
        """The updates in this worker's weights, by all workers, of all optimizers, since the run began."""
        return self._resumed_version + sum(transport.version for transport in self.transports)

    def begin(self, trainer: pl.Trainer) -> None:
        """Goes before the other callbacks, and removes those that act on worker 0 alone.

        Until then all workers use collectives, in ``on_fit_start`` of ``Timer`` for example.
        """
        self._minimums = trainer.fit_loop.min_epochs, trainer.fit_loop.min_steps
        if not self._is_first:
            callbacks = trainer.callbacks  # type: ignore[attr-defined]
            self._kept = [(i, c) for i, c in enumerate(callbacks) if isinstance(c, _DECIDING)]
            for _, callback in self._kept:
                callbacks.remove(callback)
            self._limit_val_batches, trainer.limit_val_batches = trainer.limit_val_batches, 0
            configs = trainer.strategy.lr_scheduler_configs
            trainer.strategy.lr_scheduler_configs = [config for config in configs if not config.reduce_on_plateau]
        trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]

    def end(self, trainer: pl.Trainer) -> None:
        """Puts back what :meth:`begin` has changed."""
        loop: Any = trainer.fit_loop.epoch_loop
        vars(loop).pop("update_lr_schedulers", None)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if self in callbacks:
            callbacks.remove(self)
            trainer.fit_loop.min_epochs, loop.min_steps = self._minimums
        for index, callback in self._kept:
            callbacks.insert(index, callback)
        if self._limit_val_batches is not None:
            trainer.limit_val_batches = self._limit_val_batches
        self._kept, self._limit_val_batches = [], None

    # Batches

    def distribute(self, loader: Any, trainer: pl.Trainer) -> Any:
        """The loader of this worker: batches on demand in training, and all batches otherwise."""
        kwargs = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        if not trainer.training:
            return distribute_batches(loader, **kwargs, even=True, limit=evaluation_limit(trainer))[0]

        distributed, batches = distribute_batches(loader, **kwargs, even=False, take=lambda: self._take(trainer))
        self._batches = batches if isinstance(batches, OnDemandBatchSampler) else None
        if (
            self._batches is None
            and isinstance(distributed, DataLoader)
            and not isinstance(distributed.dataset, IterableDataset)
        ):
            rank_zero_warn(
                "each worker trains on all batches of its loader: batches are distributed to workers where Lightning "
                "can put its own sampler into the DataLoader (use_distributed_sampler=True, and no batch_sampler of "
                "yours)"
            )
        return distributed if self._batches is None else ContinuedLoader(distributed)

    def _take(self, trainer: pl.Trainer) -> int | None:
        first, num_batches = self._limits(trainer)
        return self._servers.next_batch(trainer.current_epoch, first=first, num_batches=num_batches)

    def _limits(self, trainer: pl.Trainer) -> tuple[int, int]:
        """The first batch that is left of the epoch, and the end of its batches, for all workers together.

        ``max_steps`` leaves fewer of the last epoch: each worker comes through all epochs, and knows how many batches
        were in those before.
        """
        assert self._batches is not None
        epoch = trainer.current_epoch
        num_batches = int(min(len(self._batches), trainer.num_training_batches))
        first = min(self._first_batch or 0, num_batches) if epoch == self._resumed_epoch else 0
        self._sizes[epoch] = num_batches - first
        left = self._left(trainer, epoch)
        return first, num_batches if left is None else min(num_batches, first + max(0, left))

    def _left(self, trainer: pl.Trainer, epoch: int) -> int | None:
        """How many updates ``max_steps`` leaves for an epoch and later ones; None for any number."""
        if trainer.max_steps < 0 or not trainer.lightning_module.automatic_optimization:
            return None  # in manual optimization batches make any number of steps
        earlier = sum(size for number, size in self._sizes.items() if number < epoch)
        return trainer.max_steps - self._resumed_version - earlier

    # The moments of a fit

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if len(tree_leaves(trainer.train_dataloader)) > 1:
            raise ValueError(
                "there are several training loaders, and mode='async' distributes the batches of one: put their "
                "datasets into one Dataset whose samples come from all of them, or use strategy='sync_ps'"
            )
        self._set_validation(trainer)
        if self._batches is not None:
            self._resume_epoch(trainer)
            self._take_schedules(trainer)
        if self._is_first:  # a checkpoint, or a callback that tries learning rates, has changed weights
            for transport in self.transports:
                transport.send_changed_weights()
            self._pull()  # the answer shows that all servers have the new weights
        self._servers.exchange("start", awaited="first")
        if not self._is_first:
            self._pull()
            self._can_be_lost()

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._set_validation(trainer)  # Lightning has set it anew if it has made the loader again

    def _set_validation(self, trainer: pl.Trainer) -> None:
        """Has Lightning validate after this worker's share of the batches between two validations."""
        interval = getattr(trainer, "val_check_interval", None)  # None if it is a time
        if self._batches is None or interval is None:
            return
        batches = interval if isinstance(interval, int) else interval * trainer.num_training_batches
        within_epoch = trainer.check_val_every_n_epoch is not None
        if within_epoch and batches >= trainer.num_training_batches:
            trainer.val_check_batch = float("inf")  # at the end of the epoch; a worker's batches are known only then
        else:
            trainer.val_check_batch = max(1, int(batches / self._servers.job.num_workers))

    def _resume_epoch(self, trainer: pl.Trainer) -> None:
        """Sets Lightning's counts of batches to those of the epoch that a checkpoint was saved in.

        The checkpoint has the counts of one worker, or of another strategy with other batches.
        """
        loop: Any = trainer.fit_loop.epoch_loop
        progress = loop.batch_progress
        if not trainer.fit_loop.restarting or progress.is_last_batch:
            return
        self._resumed_epoch = trainer.current_epoch
        if self._first_batch is None:
            self._first_batch = progress.current.processed

    def _take_schedules(self, trainer: pl.Trainer) -> None:
        """Has Lightning leave schedules by step to :meth:`_step_schedulers`."""
        self._planned_updates = trainer.estimated_stepping_batches
        self._stepped = {id(config.scheduler): self._due(config) for config in _by_step(trainer)}
        loop: Any = trainer.fit_loop.epoch_loop
        lightnings = loop.update_lr_schedulers

        def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
            if interval != "step" or update_plateau_schedulers:
                lightnings(interval, update_plateau_schedulers)

        vars(loop)["update_lr_schedulers"] = update_lr_schedulers

    def _due(self, config: Any) -> int:
        """The steps of a schedule so far. When a worker is lost just after an update, others make the update again:
        a schedule takes no more steps than it was planned for, since some, such as OneCycleLR, then raise an error."""
        return int(min(self.version, self._planned_updates) // config.frequency)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._signals.agree(self._signals.received, may_act=True)
        self._number, self._has_stepped = None, False
        if self._batches is not None and self._batches.numbers:
            self._number = self._batches.numbers.popleft()
            self._batches.counts.popleft()
        if not pl_module.automatic_optimization:
            self._look_ahead(trainer)  # a training_step may ask whether the batch is the last one

    def after_step(self, trainer: pl.Trainer) -> None:
        """Takes the next batch as late as possible: no other worker can train on it from then on."""
        self._has_stepped = True
        if trainer.lightning_module.automatic_optimization:
            self._look_ahead(trainer)

    def _look_ahead(self, trainer: pl.Trainer) -> None:
        if self._batches is not None:
            trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = not self._batches.has_next()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self._number is not None:
            self._unreported.append(self._number)
        if self._has_stepped or is_last:  # gradients that are being accumulated would be lost with this worker
            for number in self._unreported:
                self._servers.trained(trainer.current_epoch, number)
            self._unreported.clear()
        self._warn_of_lost()
        if is_last and self._is_first:
            self._servers.pause()
            self._servers.give_back(trainer.current_epoch)
            self._pull()
        self._step_schedulers(trainer)
        self._stop_if_over(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_first:
            self._servers.pause()
            if trainer.should_stop:
                self._servers.exchange("stop")
            self._servers.exchange("end", awaited="all")
            self._pull()

    def _pull(self) -> None:
        for transport in self.transports:
            transport.pull()

    def _step_schedulers(self, trainer: pl.Trainer) -> None:
        """Steps schedulers for the updates of all workers; for this worker's own where its batches are its own."""
        module = trainer.lightning_module
        if self._batches is None or not module.automatic_optimization:
            return
        if not self._has_stepped:  # torch warns of a schedule that steps before its optimizer
            return
        for config in _by_step(trainer):
            due = self._due(config)
            for _ in range(self._stepped.get(id(config.scheduler), 0), due):
                module.lr_scheduler_step(config.scheduler, None)
            self._stepped[id(config.scheduler)] = due

    def _warn_of_lost(self) -> None:
        for lost in self._servers.lost[self._num_reported :]:
            batches = f"; its {lost['batches']} batches go to others" if lost["batches"] else ""
            rank_zero_warn(
                f"worker {lost['worker']} is gone, and training goes on; workers left: {lost['left']}{batches}"
            )
            self._num_reported += 1

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._servers.pause()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._batches is not None:
            self._unreported.clear()
            self._servers.give_back(trainer.current_epoch)
        self._stop_if_over(trainer)

    def _stop_if_over(self, trainer: pl.Trainer) -> None:
        is_over = self._servers.is_stopped
        if self._batches is not None:
            left = self._left(trainer, trainer.current_epoch + 1)
            is_over |= left is not None and left <= 0 and not self._batches.has_next()
            is_over |= not trainer.lightning_module.automatic_optimization and 0 < trainer.max_steps <= self.version
        if is_over:
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None

    def training_ends(self, trainer: pl.Trainer) -> None:
        """Gives all workers the weights, buffers and metrics of worker 0, and the states of its callbacks."""
        self._servers.pause()
        message: dict[str, Any] = {}
        beside = _beside_servers(trainer)
        if self._is_first:
            self._warn_of_lost()
            deciding = [c for c in trainer.callbacks if isinstance(c, _DECIDING)]  # type: ignore[attr-defined]
            message["callbacks"] = [callback.state_dict() for callback in deciding]
            message["metrics"] = {k: v.cpu() for k, v in trainer.callback_metrics.items()}
            message["beside servers"] = {name: value.cpu() for name, value in beside.items()}
            for transport in self.transports:
                if transport.send_changed_weights():  # a callback has put averages in place
                    transport.pull()  # the answer shows that all servers have the new weights
            self._servers.exchange("last word", message)
        else:
            self._servers.exchange("end")
            (message,) = self._servers.exchange("last word", awaited="first")
            self._pull()
            for name, value in message["beside servers"].items():
                beside[name].copy_(value)
            for (_, callback), state in zip(self._kept, message["callbacks"], strict=True):
                callback.load_state_dict(state)
            trainer.callback_metrics.update(message["metrics"])
        for number, (value, found) in enumerate(self._at_end):
            own = value()
            told = self._servers.exchange(f"at the end {number}", own, awaited="all" if self._is_first else "nobody")
            found += told if self._is_first else [own]
        self._at_end.clear()

    def gather_at_end(self, value: Callable[[], Any]) -> list[Any]:
        """See :attr:`.RunView.gather_at_end`."""
        found: list[Any] = []
        self._at_end.append((value, found))
        return found

    # Checkpoints

    def further_state(self) -> dict[str, Any]:
        """The next batch of the epoch and the number of updates in the weights, as a checkpoint's entry."""
        following = 0 if self._number is None else self._number + 1
        return {SAVED_AS: {"version": self.version, "first_batch": following}}

    def loaded(self, checkpoint: Mapping[str, Any]) -> None:
        """Resumes from a checkpoint, which may be another strategy's."""
        saved = checkpoint.get(SAVED_AS, {})
        progress = checkpoint.get("global_step", 0)
        self._resumed_version = int(saved.get("version", progress))
        self._first_batch = saved.get("first_batch")


def _beside_servers(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Name -> the module's buffers, and its parameters that no optimizer has."""
    module = trainer.lightning_module
    trained = {p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]}
    values = {name: value for name, value in module.named_parameters() if value not in trained}
    return {name: value.detach() for name, value in {**values, **dict(module.named_buffers())}.items()}


def _by_step(trainer: pl.Trainer) -> list[Any]:
    """The configurations of schedulers with ``interval="step"``."""
    return [c for c in trainer.lr_scheduler_configs if c.interval == "step" and not c.reduce_on_plateau]
