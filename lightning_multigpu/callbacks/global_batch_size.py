"""Callback that keeps the samples of an optimizer step under any strategy and number of devices."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.parsing import lightning_hasattr, lightning_setattr
from typing_extensions import override

from lightning_multigpu.engine.batch_size import tensors_in
from lightning_multigpu.engine.data_parallel.agreement import full_batch_size
from lightning_multigpu.strategies.run_view import view_of


class GlobalBatchSize(Callback):
    """Sets the batch size of each rank's loader, so that all ranks together train on this many samples in each step.

    ``batch_size`` of a loader is per rank under ``ring_ddp``, and per pipeline under a pipeline. With this callback the
    same configuration trains with the same global batch under any strategy, also Lightning's own, and on any number of
    devices and nodes: each rank's batch is the global one divided by the data ranks (pipelines count as one) and by the
    Trainer's ``accumulate_grad_batches``.

    The ``LightningDataModule`` or ``LightningModule`` has an attribute or hyperparameter ``batch_size``, from which
    ``train_dataloader`` makes its loader, as for Lightning's ``BatchSizeFinder``; its value is replaced. A loader that
    gives another number of samples is refused before the first step.

    Args:
        global_batch_size: samples of an optimizer step; a multiple of data ranks times ``accumulate_grad_batches``.

    Raises:
        ValueError: ``global_batch_size`` is below 1; or the ranks cannot share it (raised before any rank starts under
            a strategy of this pack, else in ``setup``).
    """

    def __init__(self, global_batch_size: int) -> None:
        if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int) or global_batch_size < 1:
            raise ValueError(f"global_batch_size={global_batch_size!r}: pass a whole number of at least 1")
        self.global_batch_size = global_batch_size
        self._is_checked = False

    def check_before_launch(self, trainer: Trainer) -> None:
        """Checks, before any process is started, that the ranks can share the global batch; strategies call this."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._share(trainer)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._is_checked, share = False, self._share(trainer)
        if lightning_hasattr(pl_module, "batch_size"):
            lightning_setattr(pl_module, "batch_size", share)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._is_checked:
            return
        self._is_checked, share = True, self._share(trainer)
        given = full_batch_size(trainer.train_dataloader)
        if given is None:
            first = next(tensors_in(batch), None)
            if first is None or not first.ndim:
                rank_zero_warn(f"{self._name} cannot be checked: no tensor of the first batch counts its samples")
                return
            dim = view_of(trainer).options.get("batch_dim", 0)
            given = first.shape[dim if dim < first.ndim else 0]
            if given < share and trainer.is_last_batch:  # which may have fewer
                return
        if given != share:
            raise ValueError(
                f"{self._name}: the training loader has {given} samples a batch, and {share} are due, for "
                f"{self._divisor_text(trainer)}. Make it with batch_size=self.batch_size in train_dataloader() of a "
                "LightningDataModule or LightningModule that has this attribute, which is then set; or with "
                f"batch_size={share}"
            )

    @property
    def _name(self) -> str:
        return f"{type(self).__name__}({self.global_batch_size})"

    def _share(self, trainer: Trainer) -> int:
        """Samples of a rank's batch.

        Raises:
            ValueError: the ranks cannot share the global batch.
        """
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                f"{self._name} beside GradientAccumulationScheduler, which changes the global batch from epoch to "
                "epoch; leave one out"
            )
        divisor = _data_ranks(trainer) * trainer.accumulate_grad_batches
        share, rest = divmod(self.global_batch_size, divisor)
        if rest or not share:
            near = " or ".join(str(divisor * times) for times in (share, share + 1) if times)
            raise ValueError(
                f"{self._name}: {self.global_batch_size} samples cannot be shared by {self._divisor_text(trainer)}; "
                f"pass a multiple of {divisor}, such as {near}, or change devices, num_nodes or accumulate_grad_batches"
            )
        return share

    def _divisor_text(self, trainer: Trainer) -> str:
        count = _data_ranks(trainer)
        ranks = "1 data rank" if count == 1 else f"{count} data ranks"
        return f"{ranks} x accumulate_grad_batches={trainer.accumulate_grad_batches}"


def _data_ranks(trainer: Trainer) -> int:
    """The number of different batches that are trained on at once."""
    return int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))
