"""Whole copy: a copy of the whole module on the last stage, which trains as one process does."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_multigpu._lightning_internals import attributes_of_lightning
from lightning_multigpu.engine.gradient_check import Gradients, take_gradients
from lightning_multigpu.engine.micro_batches import cloned, moved
from lightning_multigpu.engine.pipeline.stages.layer_interception import LayerInterception
from lightning_multigpu.engine.step_state import is_users, preserved_random_state, seed_of, set_random_state
from lightning_multigpu.planning.numbers import size
from lightning_multigpu.strategies.pipeline.last_stage_outputs import mark
from lightning_multigpu.strategies.steps.dry_run import unlogged_loss

if TYPE_CHECKING:
    from lightning_multigpu.strategies.pipeline.running_pipeline import RunningPipeline

_COPIES = 4
"""Of the model, that have to fit into the memory: weights, their moved values, and the gradients of both ways."""
_SHARED = (Callback, LightningDataModule, DataLoader, Dataset)


class WholeCopy:
    """A copy of the user's module, on the device of the last stage.

    It draws the same random numbers as the stages do for equal micro-batches. It logs nothing.

    Args:
        pipeline: whose module is copied.
        values: by ``id``, the values of tensors that this rank lacks.

    Attributes:
        module: the copy.
        parameters: its parameters by name.
        changed: attributes and buffers that its steps have changed, as users write them.

    Raises:
        Exception: an object in the module cannot be copied.
    """

    def __init__(self, pipeline: RunningPipeline, values: Mapping[int, Tensor]) -> None:
        module, device, chain = pipeline.model.module, pipeline.model.device, pipeline.model.chain
        trainer = module.trainer
        known = (trainer, trainer.strategy, pipeline, chain.tensor_group, *trainer.callbacks)  # type: ignore[attr-defined]
        memo: dict[int, Any] = {id(each): each for each in known}
        for holding in pipeline.model.ownership.holdings:
            if id(holding.tensor) in values:
                value = values[id(holding.tensor)].to(device)
                memo[id(holding.tensor)] = (
                    Parameter(value, holding.tensor.requires_grad) if holding.is_parameter else value
                )
        for value in (value for part in module.modules() for value in vars(part).values()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
            elif isinstance(value, _SHARED):
                memo[id(value)] = value
        self.module, self._chain = copy.deepcopy((module, chain), memo)
        self.module.trainer = trainer
        self.parameters = dict(self.module.named_parameters())
        self.changed: dict[str, None] = {}
        self._pipeline, self._device = pipeline, device
        self._seed: tuple[int, ...] = ()
        self._layers = LayerInterception(self._chain, self._begin_part)

    def free(self) -> None:
        """Gives back the memory: references in cycles keep the copy until Python's garbage collector runs."""
        for tensor in (*self.parameters.values(), *self.module.buffers()):
            tensor.grad, tensor.data = None, tensor.new_empty(0)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes values of parameters and buffers, by their names."""
        own = {**self.parameters, **dict(self.module.named_buffers())}
        with torch.no_grad():
            for name, tensor in own.items():
                if name in state:
                    tensor.copy_(state[name])

    def loss(self, part: Any, others: Sequence[Any], seed: tuple[int, ...]) -> Any:
        """The loss of the step for a copy of ``part``, whose random numbers follow from ``seed``."""
        pipeline, self._seed = self._pipeline, seed
        part = moved(cloned(part), 0, pipeline.options.batch_dim)
        plugin, module = pipeline.strategy.precision_plugin, self.module
        pipeline.in_step = True  # a metric gathers from the last stages, which all run this
        try:
            with preserved_random_state(self._device), self._layers.installed():
                step = partial(unlogged_loss, plugin, module, partial(module.training_step, part, *others))
                return self._layers.run((0, len(self._chain)), step, None)[1]
        finally:
            pipeline.in_step = False

    def backward(
        self,
        parts: Sequence[Any],
        others: Sequence[Any],
        scales: Sequence[float],
        seed: tuple[int, ...],
        order: Sequence[int] | None = None,
    ) -> None:
        """Forward and backward of a batch in parts, each with the factor of its loss; adds to the gradients."""
        before = self._marks()
        for number in range(len(parts)) if order is None else order:
            loss = self.loss(parts[number], others, (*seed, number))
            if scales[number] and isinstance(loss, Tensor):
                (loss * scales[number]).backward()  # type: ignore[no-untyped-call]
        after = self._marks()
        self.changed |= {name: None for name, found in after.items() if name not in before or before[name] != found}

    def taken(self) -> Gradients:
        """The gradients, in host memory; they are taken from the parameters."""
        taken = take_gradients(self.parameters)
        return {name: value.to_dense() if value.is_sparse else value for name, value in taken.items()}

    def _begin_part(self, part: int) -> None:
        set_random_state(seed_of(*self._seed, part), self._device)

    def _marks(self) -> dict[str, Any]:
        """What shows a change of attributes and buffers; torch's own modules keep statistics, and torchmetrics states.

        An object of another class is looked into.
        """
        marks = {}
        for name, part in self.module.named_modules():
            if isinstance(part, Metric) or type(part).__module__.startswith("torch."):
                continue
            for key, value in {**vars(part), **part._buffers}.items():
                if key not in attributes_of_lightning() and key != "forward":
                    inside = vars(value) if is_users(value) else value
                    marks[".".join(filter(None, ("self", name, key)))] = mark(inside)
        return marks


def lacks_memory(pipeline: RunningPipeline) -> str | None:
    """Why a copy of the whole model does not fit on this rank's device; None if it does."""
    needed = _COPIES * sum(holding.tensor.nbytes for holding in pipeline.model.ownership.holdings)
    device = pipeline.model.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return None if needed <= free else f"a copy of the model with its gradients takes {size(needed)} of {size(free)}"
