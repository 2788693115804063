"""Several pipelines side by side, each with batches of its own: their gradients are averaged stage by stage.

::

    pipeline 0    stage 0 (rank 1) ---- stage 1 (rank 0)
                      |                     |               the data axis: one average a stage
    pipeline 1    stage 0 (rank 3) ---- stage 1 (rank 2)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer

_BUCKET_BYTES = 25 << 20


class DataAxis:
    """What the ranks that hold the same stage do together; every method is a collective of theirs.

    Args:
        group: those ranks; used by nothing else.
        bookkeeping: the same ranks, for small messages.
        meter: told of the gradients, as group "data".
    """

    def __init__(self, group: dist.ProcessGroup, bookkeeping: MeteredGroup, meter: Meter) -> None:
        self._reducer = GradientReducer(group, meter, axis="data")
        self._bookkeeping = bookkeeping

    def average_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Gives every rank the average of the ranks' gradients; a rank without one counts as zero.

        Parameters for which no rank has a gradient keep none.

        Raises:
            ValueError: a gradient is sparse.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            return
        mine = torch.tensor([parameter.grad is not None for parameter in trained])
        anywhere = self._bookkeeping.all_reduce(mine, "max").tolist()
        used = [parameter for parameter, found in zip(trained, anywhere, strict=True) if found]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                raise ValueError(
                    "several pipelines side by side do not average sparse gradients; make the embedding with "
                    "sparse=False, or use one pipeline"
                )
        for bucket in _buckets(used):
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self._reducer.average(flat)
            for gradient, part in zip(gradients, flat.split_with_sizes([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def share_buffers(self, buffers: list[Tensor]) -> None:
        """Gives every rank the buffers of the first one: BatchNorm's statistics."""
        if buffers:
            self._bookkeeping.broadcast_tensors(buffers, src=self._bookkeeping.first_rank)

    def close(self) -> None:
        """Ends the thread that sends gradients."""
        self._reducer.close()


def _buckets(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Parameters of one dtype whose gradients travel together, about 25 MiB."""
    by_dtype: dict[torch.dtype, list[Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for members in by_dtype.values():
        bucket: list[Parameter] = []
        size = 0
        for member in members:
            bucket.append(member)
            size += member.numel() * member.element_size()
            if size >= _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
