"""The strategy of hybrid parallel training: pipelines side by side, with the layers of each stage split over ranks."""

from __future__ import annotations

import math
from typing import Any

from typing_extensions import override

from lightning_multigpu.communication.compression import make_compressor
from lightning_multigpu.engine.data_parallel.gradient_transport import GradientTransport
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy
from lightning_multigpu.strategies.tensor_parallel.split_layers import Plan, check_plan

_SIZES = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")


class HybridStrategy(PipelineStrategy):
    """Hybrid parallel training: pipelines side by side, with the layers of each stage split over a tensor group.

    Neighbouring ranks are a tensor group, which splits layers as ``tensor_split`` does. Consecutive tensor groups are
    the stages of a pipeline. Pipelines share each global batch and average their gradients::

        rank                    0  1  2  3  4  5  6  7      data x pipeline x tensor = 2 x 2 x 2
        data_parallel_rank      0  0  0  0  1  1  1  1      which part of the global batch
        stage                   1  1  0  0  1  1  0  0      rank 0 has the last stage
        tensor_parallel_rank    0  1  0  1  0  1  0  1      which part of each split layer

    Any size may be 1. With ``pipeline_parallel_size=1`` each rank runs the whole module, which then need not be a
    chain of layers. Layers are split on the first training batch, for which each rank has the whole module; see
    :class:`.Trials`.

    Args:
        data_parallel_size: number of pipelines. The product of the three sizes is the number of ranks. By default a
            tensor group has 2 ranks, then a pipeline has 2, each if the remaining ranks allow it, and the data axis has
            the rest.
        pipeline_parallel_size: ranks of a pipeline that have different layers.
        tensor_parallel_size: ranks that split the same layers; they have to be on one host.
        plan: the layers to split, as for :class:`TensorSplitStrategy`.
        compression: compress the gradients that pipelines on different hosts exchange, as for :class:`RingDDPStrategy`.
        shared_memory: let ranks of one host reduce gradients, and the sums within split layers, through shared memory.
        options: options of :class:`PipelineStrategy` and of
            :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`.

    Raises:
        ValueError: an option is out of its range; the sizes do not make the ranks; a tensor group would span
            several hosts; before the first step, no layer can be split, or an optimizer needs whole tensors.
    """

    def __init__(
        self,
        *,
        data_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        tensor_parallel_size: int | None = None,
        plan: Plan = "auto",
        compression: str | None = None,
        shared_memory: bool = True,
        **options: Any,
    ) -> None:
        option_checks.check_bools(shared_memory=shared_memory)
        if tensor_parallel_size is not None:
            option_checks.check_number("tensor_parallel_size", tensor_parallel_size, whole=True)
        check_plan(plan)
        self.plan = plan
        self._asked = (data_parallel_size, pipeline_parallel_size, tensor_parallel_size)
        self._transport = GradientTransport(
            compressor=None if compression is None else make_compressor(compression),
            shared_memory=shared_memory,
        )
        super().__init__(
            data_parallel_size=data_parallel_size, pipeline_parallel_size=pipeline_parallel_size, **options
        )
        self._options |= option_checks.own_options(HybridStrategy, locals())

    # The mesh

    @property
    def _sizes(self) -> tuple[int, int]:
        data, pipeline, tensor = self._asked
        left = max(1, self.num_nodes * self.num_processes // math.prod(size or 1 for size in self._asked))
        if tensor is None:
            tensor = left if data and pipeline else 2 - left % 2
            left //= tensor
        if pipeline is None:
            pipeline = left if data else 2 - left % 2
        return pipeline, tensor

    @property
    def pipeline_parallel_size(self) -> int:  # type: ignore[override]
        """Ranks of a pipeline, which have different layers."""
        return self._sizes[0]

    @property
    def tensor_parallel_size(self) -> int:  # type: ignore[override]
        """Ranks that split each layer of a stage."""
        return self._sizes[1]

    @override
    def _check_sizes(self) -> None:
        world, (pipeline, tensor) = self.num_nodes * self.num_processes, self._sizes
        data = self._asked[0] or max(1, world // (pipeline * tensor))
        if data * pipeline * tensor != world:
            given = " times ".join(f"{n}={s}" for n, s in zip(_SIZES, (data, pipeline, tensor), strict=True))
            raise ValueError(
                f"{given} makes {data * pipeline * tensor} ranks, and there are {world}; change one of them"
            )
        if self.num_processes % tensor:
            raise ValueError(
                f"tensor_parallel_size={tensor}: a host has {self.num_processes} ranks, and every split layer would "
                f"wait for the network between hosts; pass a divisor of {self.num_processes}"
            )
        if tensor == 1 and self.plan != "auto":
            raise ValueError(
                f"plan={self.plan!r} with tensor_parallel_size=1: no layer is split; leave it out, or "
                "pass tensor_parallel_size=2"
            )
        if self._transport.compressor is not None and data == 1:
            raise ValueError(
                f"compression={self.options['compression']} with data_parallel_size=1: no gradients travel between "
                "pipelines; leave it out, or pass data_parallel_size=2"
            )
        points = self.pipeline_options.split_points
        if tensor > 1 and points is not None:
            raise ValueError(
                f"split_points={list(points)!r} with tensor_parallel_size={tensor}: a module that is cut by tracing "
                "holds whole layers; leave split_points out, and name an nn.Sequential or nn.ModuleList by module= if "
                "'auto' does not find it, or pass tensor_parallel_size=1"
            )
        if pipeline == 1 and (self.pipeline_options.num_stages_of_rank > 1 or points is not None):
            option = f"split_points={list(points)!r}" if points else f"schedule={self.pipeline_options.schedule!r}"
            raise ValueError(
                f"{option} with pipeline_parallel_size=1: one rank runs the whole module, and has no stages; leave it "
                "out, or pass pipeline_parallel_size=2"
            )
        self._check_pipeline(fewest_stages=1)
