"""The strategy of data parallel training with a ring all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from lightning.pytorch.strategies import DDPStrategy
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_multigpu.communication.compression import Compressor
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.averaged_gradients import AveragedGradients
from lightning_multigpu.strategies.base import MultiGPUStrategy


class RingDDPStrategy(MultiGPUStrategy, DDPStrategy):
    """Data parallel training: each rank computes the gradients of its share of the batch, and a ring averages them.

    The all-reduce of the gradients runs while backward still computes. On CPU tensors the ring is this pack's own
    (:mod:`lightning_multigpu.communication.ring`); on GPUs NCCL moves the gradients. In a ring each rank sends 2(N-1)/N
    times the size of the gradients per optimizer step. Options of Lightning's ``DDPStrategy`` keep their names and
    meaning; communication hooks work on CPU tensors too.

    Args:
        bucket_cap_mb: size in MiB of the buckets in which gradients travel. Smaller buckets start earlier, larger ones
            cost less each. By default 4 between hosts and 25 on one host, more for models with many parameters, and
            DDP's own size where NCCL or a communication hook moves the gradients.
        find_unused_parameters: in every step, find the parameters on which the loss does not depend.
        gradient_as_bucket_view: make ``.grad`` a view of the bucket, which saves a copy of the gradients. A ``.grad``
            that your code keeps from one step to the next is then overwritten.
        static_graph: promise that every step uses the same parameters in the same order.
        broadcast_buffers: give every rank the buffers of rank 0 (BatchNorm's statistics) before each synchronised
            step and before validation.
        average_every: with k > 1, ranks take k optimizer steps with their own gradients, then average weights and
            optimizer state (local SGD); they also average before validation, before a checkpoint and at the end. This
            is another algorithm than that of one device, with 1/k of the traffic. 1 averages gradients in every step.
        compression: compress the gradients between hosts: "bf16", "int8", or a mapping with such a ``name``
            and the options of that compressor.
        shared_memory: let ranks of one host reduce gradients through shared memory. The buckets lie in ``/dev/shm``;
            where that is too small for the gradients of a host's ranks, gradients are copied instead, with a warning.
            False takes sockets, between which ``compression`` compresses on one host too.
        ddp_comm_state: the state that is passed to ``ddp_comm_hook``.
        ddp_comm_hook: a communication hook that replaces the ring, on CPUs as well.
        options: options of :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`.

    Raises:
        ValueError: an option is out of its range; ``verify_steps`` with ``static_graph``.
    """

    name_with_spawn: ClassVar[str | None] = "ring_ddp_spawn"

    def __init__(
        self,
        *,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        average_every: int = 1,
        compression: str | Mapping[str, Any] | Compressor | None = None,
        shared_memory: bool = True,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        averaging = option_checks.own_options(RingDDPStrategy, locals())
        self.averaging = AveragedGradients(self, averaging, options)
        super().__init__(**self.averaging.lightnings_options, **options)

    @override
    def _setup_model(self, model: Module) -> DistributedDataParallel:
        self.averaging.open()
        return self.averaging.wrap(model)
