"""The strategy of data parallel training with the optimizer on the host."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
from lightning_multigpu.communication.shared_memory.segment import SharedMemoryUnavailableError
from lightning_multigpu.engine.data_parallel.module_buffers import ModuleBuffers
from lightning_multigpu.engine.parameter_server.host_transport import HostTransport
from lightning_multigpu.strategies.base import MultiGPUStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


class CPUParameterServerStrategy(MultiGPUStrategy):
    """Data parallel training with the optimizer on the host: devices compute gradients, the CPU updates the weights.

    Gradients go to memory that the ranks of the host share, and not through sockets. Each rank's process averages and
    updates one part of the model on the CPU, so that all cores take part. Every device then gets all new weights. A
    device holds the weights and the gradients, but no optimizer state. Weights equal one device's at the same global
    batch.

    Args:
        options: options of :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`.

    Raises:
        ValueError: an option is out of its range, the run has several hosts, or the optimizer is LBFGS.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._ranks: SharedMemoryAllReduce | None = None
        self._num_reserved = 0

    @override
    def _configure_launcher(self) -> None:
        if self.num_nodes > 1:
            raise ValueError(
                f"num_nodes={self.num_nodes}: cpu_ps trains on the devices of one host, whose memory they share; use "
                "num_nodes=1, or strategy='sync_ps' for several hosts"
            )
        super()._configure_launcher()

    @override
    def _setup_model(self, model: Module) -> Module:
        self.buffers = ModuleBuffers(self._module, self.collectives.data, averages=True)
        return self._begin_alike(model, self.collectives.data)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        if self._ranks is None:  # else the other optimizers are refused
            self._ranks = SharedMemoryAllReduce(self.groups.new("data", backend="gloo"))
            self._undo.callback(self._ranks.close)
            self.groups.also_cut.append(self._ranks.abort)
        super().setup_optimizers(trainer)
        self._watch_given_gradients()
        self.owned.begin(self.optimizers, self._transport, self.given)
        self.owned.clip_in_steps(self._module, self.precision_plugin, self._data_axis, self._note_averages)

    def _transport(self, optimizer: Optimizer) -> HostTransport:
        assert self._ranks is not None
        return HostTransport(optimizer, self._ranks, self.meter, reserve=self._reserve, gather=self.gather_objects)

    @override
    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self._ranks = None

    def _reserve(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor that all ranks can access; if memory cannot be shared, ranks copy pieces of it instead."""
        assert self._ranks is not None
        on_gpu = self.root_device.type == "cuda"
        # Memory of torch's own, not pages of the heap: two tensors may share one, which CUDA locks once only.
        flat = torch.zeros(numel, dtype=dtype, pin_memory=on_gpu)
        if not numel:
            return flat
        if self._ranks.world_size > 1:
            self._num_reserved += 1
            try:
                self._ranks.move(flat, self._num_reserved)
            except SharedMemoryUnavailableError as error:
                rank_zero_warn(f"gradients and weights are copied once more, between the ranks of this host: {error}")
            if on_gpu and self._ranks.has_moved(flat):
                self._pin(flat)
        return flat

    def _pin(self, flat: Tensor) -> None:
        """Pins the pages of a tensor in memory, so that GPU copies overlap with computing."""
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(cudart.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0)) == 0:
            self._undo.callback(lambda: cudart.cudaHostUnregister(flat.data_ptr()))
        else:
            with contextlib.suppress(RuntimeError):  # CUDA keeps the error until the next launch of a kernel finds it
                torch.ones((), device=self.root_device).add_(1)
            rank_zero_warn(
                f"{flat.nbytes / 2**20:.0f} MiB of the host's memory cannot be locked (ulimit -l), so that copies to "
                "and from the GPU do not overlap its work"
            )

    # Checkpoints

    @property
    @override
    def _needs_others(self) -> bool:
        return self.world_size > 1
