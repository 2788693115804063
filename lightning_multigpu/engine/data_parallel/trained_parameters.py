"""The parameters whose gradients are averaged, and their changes by a module's hooks during training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_multigpu.communication.digest import compared
from lightning_multigpu.communication.metered_group import MeteredGroup

Gather = Callable[[Any], list[Any]]
"""Gathers an object of every rank, in rank order."""


def not_ignored(module: Module, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Those of the module's parameters or buffers that it does not exclude from DDP."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return [(name, value) for name, value in named if name not in ignored]


class TrainedParameters:
    """The parameters of a module, and which of them required gradients when this object was made."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._parameters = list(self._names)
        self._required = [parameter.requires_grad for parameter in self._parameters]
        self._optimized: list[int] | None = None
        self._nodes = _nodes(self._parameters)
        self._versions: list[int] = []
        shared: list[tuple[str, Any]] = not_ignored(module, [(name, p) for p, name in self._names.items()])
        self.averaged = {p: name for name, p in shared if p.requires_grad}
        self._others: list[Parameter] = [p for _, p in shared if not p.requires_grad]

    def has_changed(self, optimizers: Iterable[Optimizer]) -> bool:
        """True if parameters have been unfrozen, frozen, added or replaced since this object was made.

        A new layer counts as soon as an optimizer has its parameters; until then it is not trained.
        ``parameter.set_()``, as in ``register_parametrization``, counts too: it drops the hooks of gradients, and like
        each other change outside of a step it gives the parameter another version.
        """
        optimized = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        if optimized != self._optimized:
            self._optimized = optimized
            if list(map(id, self._module.parameters())) != list(map(id, self._parameters)):
                return True
        if [p.requires_grad for p in self._parameters] == self._required and self._versions == self._versions_now():
            return False
        return _nodes(self._parameters) != self._nodes

    def stepped(self) -> None:
        """Notes that an optimizer has changed the parameters."""
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # of split parameters these are the parts
            return [parameter._version for parameter in self._parameters]

    def share_changes(self, optimizers: Iterable[Optimizer], group: MeteredGroup, gather: Gather) -> None:
        """Gives all ranks of the group the first one's values of parameters that are new; a collective.

        Raises:
            RuntimeError: on all ranks, if they have not frozen, unfrozen and added the same parameters.
            ValueError: a parameter of an optimizer does not belong to the module.
        """
        before = dict(zip(self._parameters, self._required, strict=True))
        changes = {
            name: "trained" if parameter.requires_grad else "frozen"
            for name, parameter in self._module.named_parameters()
            if before.get(parameter) != parameter.requires_grad
        }
        _check_alike(changes, gather, "do not train the same parameters")
        check_belong(self._module, optimizers)
        new = [parameter.detach() for parameter in self._module.parameters() if parameter not in self._names]
        group.broadcast_tensors(new, src=group.first_rank)

    def without_gradient(self) -> list[str]:
        """Names of averaged parameters that have no gradient."""
        return [name for parameter, name in self.averaged.items() if parameter.grad is None]

    def missed(self, optimizers: Iterable[Optimizer], gather: Gather) -> list[Parameter]:
        """Optimized parameters whose gradients nobody averages; a collective where there are any.

        They were unfrozen within the step, or frozen while batches were being accumulated.

        Raises:
            RuntimeError: on all ranks, if they are not the same.
        """
        found = [parameter for parameter in self._others if parameter.grad is not None]
        optimized = {id(parameter) for parameter in _of(optimizers)} if found else set()
        missed = [parameter for parameter in found if id(parameter) in optimized]
        if missed:
            changes = {self._names[parameter]: "trained" for parameter in missed}
            _check_alike(changes, gather, "have no gradients of the same parameters")
        return missed


def _check_alike(changes: dict[str, str], gather: Gather, what: str) -> None:
    if found := compared(changes, gather, what):
        raise RuntimeError(f"{found}\nUnfreeze, freeze and add layers on all ranks before the same batch")


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        return torch.empty(0)


def _nodes(parameters: Sequence[Tensor]) -> tuple[Any, ...]:
    """The nodes of the graph that accumulate the gradients, and have their hooks; None for frozen parameters."""
    with torch.enable_grad():
        joined: Tensor = _Joined.apply(*parameters)  # type: ignore[no-untyped-call]
    return () if joined.grad_fn is None else joined.grad_fn.next_functions


def unused_error(missing: Sequence[str], strategy: str) -> RuntimeError:
    """The error of a step whose loss does not depend on parameters that the other ranks wait for, by their names."""
    if not missing:
        return RuntimeError(
            "all parameters have gradients, but one has lost the hook that sends its gradient: set_() was called on it "
            "within the step, which register_parametrization does too. Do this before the step, in "
            "on_train_epoch_start or on_train_batch_start"
        )
    listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return RuntimeError(
        f"the loss of this step does not depend on {listed}, whose gradients the other ranks wait "
        f"for. If that is intended, use {strategy}(find_unused_parameters=True); freeze layers before the step, in "
        "on_train_epoch_start or on_train_batch_start"
    )


def check_has_shapes(module: Module) -> None:
    """Raises ValueError for a lazy layer: ranks compare, split and send parameters before the first batch."""
    for name, part in module.named_modules():
        if any(is_lazy(tensor) for tensor in [*part.parameters(False), *part.buffers(False)]):
            raise ValueError(
                f"{name or type(part).__name__} ({type(part).__name__}) is lazy, its parameters have no shapes yet: "
                "run one batch through it in __init__ or configure_model, or use a layer that names its input's size"
            )


def check_belong(module: Module, optimizers: Iterable[Optimizer]) -> None:
    """Checks that every parameter of the optimizers belongs to the module, so that ranks keep it equal.

    Raises:
        ValueError: one does not.
    """
    own = set(module.parameters())
    for number, optimizer in enumerate(optimizers):
        for parameter in _of([optimizer]):
            if parameter.requires_grad and parameter not in own:
                raise ValueError(
                    f"optimizer {number} ({type(optimizer).__name__}) trains a parameter of shape "
                    f"{tuple(parameter.shape)} that is not in {type(module).__name__}.parameters(): its gradients "
                    "would differ from rank to rank. Make it a part of the module: self.name = nn.Parameter(...), and "
                    "nn.ModuleList instead of a list of layers"
                )


def check_owned(optimizers: Iterable[Optimizer], owned: Collection[Optimizer]) -> None:
    """Raises ValueError for an optimizer that is not among those whose states have owners, if there are any."""
    for number, optimizer in enumerate(optimizers):
        if owned and optimizer not in owned:
            raise ValueError(
                f"optimizer {number} ({type(optimizer).__name__}) was set during a fit, and the strategy "
                "divides the states of optimizers when a fit starts: change its param_groups, or "
                "start another fit with it, or use strategy='ring_ddp'"
            )


def check_embeddings(module: Module) -> None:
    """Checks that no embedding changes its weights in its forward pass, by the samples of its rank or replica.

    Raises:
        ValueError: one does.
    """
    for name, part in module.named_modules():
        if isinstance(part, Embedding | EmbeddingBag) and part.max_norm is not None:
            weight, norms = f"self.{name}.weight", f"{part.norm_type:g}, 0, {part.max_norm:g}"
            raise ValueError(
                f"self.{name} = nn.{type(part).__name__}(..., max_norm={part.max_norm:g}) shortens the rows of its own "
                "samples in each forward pass, and each rank or replica has other samples: they would train different "
                "weights. Leave max_norm out, and shorten all rows in on_train_batch_start, under torch.no_grad(): "
                f"{weight}.copy_(torch.renorm({weight}, {norms}))"
            )


def _of(optimizers: Iterable[Optimizer]) -> Iterable[Parameter]:
    return (parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"])
