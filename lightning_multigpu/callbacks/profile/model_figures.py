"""Trial steps on the first batch: the readiness of gradients, and the layers that a pipeline can cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_multigpu.communication.metering.clocks import clock_of
from lightning_multigpu.engine.activation_checkpointing import layers_of
from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.hugging_face import models_in_stages
from lightning_multigpu.engine.micro_batches import cloned, first_part, moved
from lightning_multigpu.engine.pipeline.measuring.layer_costs import layer_costs
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.step_state import without_gradients
from lightning_multigpu.engine.training_memory import held_bytes
from lightning_multigpu.planning.pipelines.stage_costs import ChainFigures, MeasuredParts, PartCost
from lightning_multigpu.report.rank_figures import ModelFigures, ReadyGradient
from lightning_multigpu.strategies.pipeline.pipeline_checks import check_callbacks, check_module, check_optimizers
from lightning_multigpu.strategies.pipeline.pipeline_options import PipelineOptions
from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy
from lightning_multigpu.strategies.steps.dry_run import check_takes_batch, traceless, unlogged_loss, without_trace

_SMALL = 8
"""The small batch whose layers are timed is the first of so many parts."""


def model_figures(
    trainer: pl.Trainer, batch: Any, batch_idx: int, pipeline_options: PipelineOptions | None
) -> ModelFigures:
    """The figures of the trainer's module on one device, which stays as it is.

    Raises:
        ValueError: there are several ranks, or the training step takes batches by itself.
        Exception: whatever the training step raises.
    """
    module = trainer.lightning_module
    if trainer.world_size > 1:
        raise ValueError(f"for_plan=True on {trainer.world_size} ranks: profile the model on one device")
    check_takes_batch(module)
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    trial = _Trial(trainer, [batch_idx] if takes_index else [])
    chain, refused = None, ""
    gradients = trial.gradients(batch)
    try:
        chain = trial.chain(batch, pipeline_options or PipelineStrategy(schedule="1f1b").pipeline_options)
    except (ValueError, PipelineError, RuntimeError) as error:
        refused = str(error)
    return ModelFigures(samples=leading_size(batch) or 0, gradients=gradients, chain=chain, refused=refused)


class _Trial:
    def __init__(self, trainer: pl.Trainer, others: list[Any]) -> None:
        self._trainer, self._module, self._others = trainer, trainer.lightning_module, others
        self._device = trainer.strategy.root_device

    def _step(self, batch: Any) -> Any:
        """The loss of a training step on a copy of the batch."""
        call, plugin = self._module.training_step, self._trainer.precision_plugin
        return unlogged_loss(plugin, self._module, lambda: call(cloned(batch), *self._others))

    def gradients(self, batch: Any) -> list[ReadyGradient]:
        """The gradients in the order in which they are ready; none where the step runs backward, or has no loss."""
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        ready: list[tuple[int, Any]] = []
        clock = clock_of(self._device)

        def note(parameter: Tensor) -> None:
            ready.append((parameter.nbytes, clock.mark()))

        with traceless(self._module), without_gradients(trained):
            loss = self._step(batch)
            if not self._module.automatic_optimization or not isinstance(loss, Tensor):
                return []
            loss.backward()  # type: ignore[no-untyped-call]  # which warms up
            handles = [p.register_post_accumulate_grad_hook(note) for p in trained]  # type: ignore[no-untyped-call]
            loss = self._step(batch)
            start = clock.mark()
            loss.backward()
            end = clock.mark()
            for handle in handles:
                handle.remove()
        clock.wait(end)
        whole_s = clock.seconds(start, end)
        return [ReadyGradient(size, min(1.0, clock.seconds(start, mark) / whole_s)) for size, mark in ready]

    def chain(self, batch: Any, options: PipelineOptions) -> ChainFigures:
        """The layers that a pipeline with these options cuts.

        Raises:
            ValueError, PipelineError: a pipeline cannot train the module.
        """
        module, trainer, optimizers = self._module, self._trainer, self._trainer.optimizers
        check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
        check_module(module)
        check_optimizers(optimizers)
        points = options.split_points
        options = replace(options, schedule="1f1b", stages_per_rank=None)
        chain = options.chain(module, 2 if points is None else len(points) + 1, self._device)
        recompute = layers_of(chain.name, chain.named_layers(), options.activation_checkpointing)
        ownership = Ownership(module, chain, [(0, len(chain))], 0, 1, device=self._device)
        batch = moved(batch, options.batch_dim, 0)
        measured: list[MeasuredParts] = []
        for number in dict.fromkeys((min(_SMALL, leading_size(batch) or 1), 1)):
            part = first_part(batch, number)

            def step(part: Any = part) -> Any:
                return self._step(moved(part, 0, options.batch_dim))

            with models_in_stages(module), without_trace(module):
                costs = layer_costs(ownership, step, 0, recompute)
            parts = [costs.get(number, PartCost()) for number in range(len(chain) + 2)]
            measured.append(MeasuredParts(samples=leading_size(part) or 1, parts=parts))
        # With a rank for the ends and one between them, what all three hold is everywhere.
        holdings = Ownership(module, chain, [(0, 1), (1, len(chain) - 1), (len(chain) - 1, len(chain))], 0, 3)
        first, last = holdings.at_ends()
        everywhere = [h.tensor for h in holdings.common() if h.is_outside and len(h.holders) == 3]
        of_parts = [first, *chain.own_parameters(), last]
        return ChainFigures(
            name=chain.name,
            measured=measured,
            held=[held_bytes(own, optimizers) for own in of_parts],
            everywhere=held_bytes(everywhere, optimizers),
            recompute=sorted(recompute),
            balance=options.balance,
            num_stages=0 if points is None else len(chain),
        )
