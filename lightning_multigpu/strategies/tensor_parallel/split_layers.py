"""The split layers of a module: chosen on the first batch, and whole again at the end of the fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Embedding, Module, MultiheadAttention
from torch.optim import Optimizer

from lightning_multigpu._lightning_internals import HOOKS_BEFORE_STEP, is_compiled, plain_optimizer
from lightning_multigpu.engine.optimizer_state import held_states
from lightning_multigpu.engine.parity import proved_split
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.tensor_split.blocks import (
    Applied,
    Block,
    find_blocks,
    kind_of,
    planned_blocks,
)
from lightning_multigpu.engine.tensor_split.layers import is_linear
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.parts import (
    functions_get_whole,
    local,
    make_whole,
    own_state,
    state_of,
    user_line,
)
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.engine.tensor_split.trials import TracelessStep, Trials, rows_of_plan
from lightning_multigpu.engine.training_memory import held_bytes
from lightning_multigpu.placement.table import split_of as shards_of
from lightning_multigpu.planning.split_plan import SplitPlan
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.steps.plugin_methods import PluginMethods

if TYPE_CHECKING:
    from lightning_multigpu.communication.metered_group import MeteredGroup
    from lightning_multigpu.strategies.base import MultiGPUStrategy

Plan = Literal["auto"] | Mapping[str, str]


def check_plan(plan: Plan) -> None:
    """Checks the option ``plan``."""
    if plan != "auto":
        if not isinstance(plan, Mapping) or not plan:
            raise ValueError(f"plan={plan!r}: pass 'auto', or a mapping such as {{'*.up': 'column'}}")
        for style in plan.values():
            option_checks.check_choice("plan", style, ("column", "row", "vocab", "head"))


def check_patterns(plan: Plan, module: Module) -> None:
    """Checks that each pattern of the option ``plan`` matches a module."""
    names = dict(module.named_modules())
    for pattern, style in () if plan == "auto" else plan.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            layers = {kind_of([n]) for n, part in names.items() if is_linear(part) or isinstance(part, Embedding)}
            raise ValueError(
                f"plan: {{{pattern!r}: {style!r}}} matches no module of {type(module).__name__}, whose layers are "
                f"{', '.join(sorted(layers)) or 'none that can be split'}; change the pattern, or leave it out"
            )


def check_uncompiled(module: LightningModule) -> None:
    """Checks that no layer that could be split runs within compiled code."""
    for name, part in module.named_modules():
        is_wrapped = part._compiled_call_impl is not None or "_orig_mod" in part._modules
        compiled = is_wrapped or (part is module and is_compiled(module))
        kinds = (Embedding, MultiheadAttention)
        if compiled and any(is_linear(each) or isinstance(each, kinds) for each in part.modules()):
            raise ValueError(
                f"{name or type(part).__name__} is compiled, and split layers within it wait for other ranks, which "
                "torch.compile cannot follow: compile only what has no nn.Linear or nn.Embedding, or use "
                "strategy='ring_ddp'"
            )


def open_tensor_group(strategy: MultiGPUStrategy, *, shared_memory: bool) -> tuple[TensorGroup, MeteredGroup]:
    """The ranks that split layers, for communication within layers and for everything else, until the run's end."""
    ranks, readers = strategy.groups.new("tensor"), strategy.groups.new("tensor", backend="gloo")
    group = TensorGroup(ranks, meter=strategy.meter, shared_memory=shared_memory, readers=readers)
    strategy.groups.also_cut.append(group.abort)
    strategy._undo.callback(group.close)
    strategy._undo.enter_context(functions_get_whole())
    return group, strategy.metered(ranks, "tensor")


class SplitLayers:
    """The layers of a module that are split over a tensor group, from the first batch to the end of a fit.

    ``plan`` is as for :class:`.TensorSplitStrategy`.
    """

    def __init__(self, module: Module, group: TensorGroup, plan: Plan) -> None:
        self.split: list[tuple[Block, Applied]] | None = None  # by decide
        self._module = module
        self._group = group
        self._plan = plan
        self._gathered: set[str] = set()
        self._update = ExitStack()
        group.on_gather = self._note

    # The split

    def decide(self, step: TracelessStep, optimizers: Iterable[Optimizer], *, rtol: float | None = None) -> SplitPlan:
        """Splits the module by its first training batch; a collective of all ranks.

        Returns the plan, with the memory of the first ranks that ``step.gather`` returns. The states of the optimizers
        are split too. With an ``rtol`` gradients of a step are compared, see :func:`.proved_split`.

        Raises:
            ValueError: no layer can be split, the plan does not fit, an optimizer needs whole tensors, or split layers
                have other gradients.
        """
        optimizers, module, num_ranks = list(optimizers), self._module, self._group.size
        held = held_bytes(module.parameters(), optimizers)
        trials = Trials(step)
        with nullcontext("") if rtol is None else proved_split(step, rtol=rtol) as obstacle:
            trials.run(self._blocks)
            ranks = step.gather(held_bytes(module.parameters(), optimizers))[:num_ranks]
            plan = SplitPlan(num_ranks, rows_of_plan(module, trials.split, trials.left), held, ranks)
            self._check(plan)
        if obstacle:
            rank_zero_info(obstacle)
        self.split = trials.split
        for optimizer in optimizers:
            for parameter, state in held_states(plain_optimizer(optimizer)).items():
                own_state(parameter, state)  # this rank's parts of it
        self.check_optimizers(optimizers)
        return plan

    def _blocks(self, called: Mapping[str, int]) -> list[Block]:
        found = find_blocks(self._module, called)
        if self._plan == "auto":
            return found
        check_patterns(self._plan, self._module)
        roles: dict[str, str] = {}
        for name, _ in self._module.named_modules():
            style = next((style for pattern, style in self._plan.items() if fnmatchcase(name, pattern)), None)
            if style is not None:
                roles[name] = style
        return planned_blocks(self._module, roles, found)

    def _check(self, plan: SplitPlan) -> None:
        reasons = "; ".join(f"{each.names}: {each.reason}" for each in plan.blocks if each.reason)
        if reasons and self._plan != "auto":
            raise ValueError(f"plan={self._plan!r} does not work. {reasons}")
        if all(each.reason for each in plan.blocks):
            raise ValueError(
                "tensor_split has found no layer to split. It looks for pairs of nn.Linear, attention with an "
                "attribute that counts its heads, nn.MultiheadAttention, and embeddings with their heads, and keeps "
                f"what computes on parts. {reasons or 'It has found none of these'}. Name layers yourself: "
                "TensorSplitStrategy(plan={'*.first': 'column', '*.second': 'row'}), or use strategy='ring_ddp'"
            )

    def check_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Raises ValueError for an optimizer that may need whole tensors, and gets parts."""
        for optimizer in optimizers:
            plain = plain_optimizer(optimizer)
            if shards_of(plain) != "elements" and any(split_of(p) for g in plain.param_groups for p in g["params"]):
                raise ValueError(
                    f"{type(plain).__name__} may need whole tensors, and it gets parts under tensor_split: use an "
                    "optimizer of torch that works element by element, such as AdamW or SGD, or strategy='ring_ddp'"
                )

    def _note(self, layer: str, operation: str) -> None:
        """Says once for each line of the user's code what it gathers."""
        if self.split is not None and (line := user_line()) not in self._gathered:
            self._gathered.add(line)
            rank_zero_info(f"tensor_split gathers values of {layer} for {operation} ({line})")

    def make_whole(self, optimizers: Iterable[Optimizer]) -> None:
        """Makes the layers on every rank whole, except placeholders; a collective of the tensor group."""
        assert self.split is not None
        for optimizer in optimizers:
            states = held_states(plain_optimizer(optimizer))
            for key, state in states.items():
                states[key] = self._whole_state(key, state)
        for name, parameter in self._module.named_parameters():
            if split_of(parameter) is not None and not isinstance(parameter, Placeholder):
                parameter.grad = None
                make_whole(parameter, self._whole(parameter, local(parameter), name))
        for _, applied in reversed(self.split):
            applied.restore()

    # Checkpoints

    def whole_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """``module.state_dict()`` with whole parameters, from that with parts; a collective of the tensor group."""
        whole = dict(state)
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if name in state:
                whole[name] = self._whole(parameter, local(state[name]), name)
        return whole

    def whole_optimizer_state(self, optimizer: Optimizer, found: Mapping[str, Any]) -> dict[str, Any]:
        """An optimizer's ``state_dict()`` with whole states, from that with parts; a collective of the group."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = {n: self._whole_state(parameters[n], state) for n, state in found["state"].items()}
        return {**found, "state": states}

    def follow_updates(self, plugin: Precision, before: Callable[[], None]) -> PluginMethods:
        """Has an optimizer's own step read its state as it is, from the end of the hooks before it.

        ``plugin`` calls these hooks, within :meth:`stepping`, and ``before`` is called at their end.
        """
        hooks = getattr(plugin, HOOKS_BEFORE_STEP)

        def then_update(*args: Any) -> None:
            hooks(*args)
            before()
            for parameter in self._module.parameters():
                local(parameter)  # raises if a view of what was gathered has changed, and no rank's part with it
            self._update.enter_context(torch._C.DisableTorchFunctionSubclass())

        methods: dict[str, Any] = {HOOKS_BEFORE_STEP: then_update}
        return PluginMethods(plugin, **methods)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Within the block an optimizer steps; its own step, which comes last, sees parts."""
        with ExitStack() as self._update:
            yield

    def shown_state(self, parameter: Tensor, state: Any) -> Any:
        """A parameter's state for who reads it now; the optimizer's own step reads parts."""
        is_step = not torch._C._is_torch_function_enabled()
        return state if is_step or self._group.shows_parts else state_of(parameter, state)

    def _whole_state(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self._whole(parameter, value, name)
            if isinstance(value, Tensor) and value.shape == local(parameter).shape
            else value
            for name, value in state.items()
        }

    def _whole(self, parameter: Tensor, part: Tensor, name: str) -> Tensor:
        """The whole tensor from each rank's ``part``, split like the parameter; on the part's device."""
        split = split_of(parameter)
        if split is None:
            return part
        return split.gather(part.detach().to(parameter.device), self._group, name).to(part.device, copy=True)
