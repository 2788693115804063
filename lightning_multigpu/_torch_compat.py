"""Newer parts of torch for older ones, each with the version that makes it needless; and what has no public name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch import eager_transforms, vmap
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d as c10d
from torch.optim import optimizer as optimizers

# torch 2.13 keeps the order of a new group's ranks if asked; torch 2.11 always sorts them.
CAN_KEEP_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters


def new_group_in_order(
    ranks: list[int], *, timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """``dist.new_group`` that keeps the order of ``ranks``: the first of them is the group's rank 0.

    ``sort_ranks=False`` does all of it where torch 2.13 is the oldest. Without it, this is what torch's
    ``_new_group_with_tag`` does after it has sorted the ranks: the helper takes them in any order, and so does NCCL,
    which orders the ranks of a split by their place in the group.
    """
    group: dist.ProcessGroup
    if ranks == sorted(ranks):
        group = dist.new_group(ranks, timeout=timeout, backend=backend)
        return group
    if CAN_KEEP_ORDER:
        group = dist.new_group(ranks, timeout=timeout, backend=backend, sort_ranks=False)
        return group
    world, me = c10d._get_default_group(), dist.get_rank()
    world_backend, store = c10d._world.pg_map[world]
    kind = dist.Backend(backend or world_backend)
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(me) if me in ranks else None,
        ranks,
        kind,
        store,
        c10d._process_group_name(ranks, use_hashed_name=False),
        timeout=timeout or c10d._get_default_timeout(kind),
        device_id=world.bound_device_id,
    )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


# Public, and without a warning, from torch 2.14 on.
set_group_timeout: Callable[[timedelta, dist.ProcessGroup], None] = getattr(dist, "set_timeout", c10d._set_pg_timeout)


# As torch's own DistributedDataParallel does it, in C++: a row of small tensors in one call.
flattened: Callable[[Sequence[Tensor]], Tensor] = _flatten_dense_tensors
unflattened: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]] = _unflatten_dense_tensors


def forget_failed_worlds() -> None:
    """Before the default group is made: ranks find each other by its name, a number that counts failed attempts too."""
    c10d._world.group_count = 0


def job_store() -> dist.TCPStore:  # type: ignore[name-defined]
    """The store at the job's main address, for which torch has no public name; any key is free but torch's own.

    Raises:
        RuntimeError: the process groups were made through another kind of store.
    """
    store = c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        raise RuntimeError(
            f"the process group was made through a {type(store).__name__}, which parameter servers cannot join: make "
            "it with init_method='env://' or 'tcp://...', or leave it to the Trainer"
        )
    return store


def make_schedule(
    make: Callable[..., Any], stages: Any, num_micro_batches: int, *, num_stages: int, **options: Any
) -> Any:
    """A schedule of torch, also for fewer micro-batches than stages; can go where torch 2.11 is the oldest.

    torch 2.9 refuses them for one stage a rank. For several it runs turn by turn, with too few turns before a rank's
    second stage.
    """
    from torch.distributed.pipelining.schedules import ScheduleLoopedBFS, _PipelineScheduleRuntime

    try:
        schedule = make(stages, num_micro_batches, **options)
    except ValueError:
        if num_micro_batches >= num_stages:
            raise
        schedule = make(stages, num_stages, **options)
        schedule._n_microbatches = num_micro_batches
    if isinstance(schedule, ScheduleLoopedBFS) and not isinstance(schedule, _PipelineScheduleRuntime):
        schedule.pipeline_order = _in_turns(schedule.pipeline_order, num_stages)
    return schedule


def _in_turns(orders: dict[int, list[Any]], num_stages: int) -> dict[int, list[Any]]:
    """The same passes of each rank, in the same order, each in a later turn than the pass that it waits for."""
    left = {rank: [each for each in order if each is not None] for rank, order in orders.items()}
    table: dict[int, list[Any]] = {rank: [] for rank in orders}
    done: set[tuple[str, int, int]] = set()
    while any(left.values()):
        turn = set()
        for rank, passes in left.items():
            table[rank].append(None)
            if passes:
                stage, of, micro_batch, *_ = passes[0]
                kind = str(of)  # "F" or "B"
                before = stage - 1 if kind == "F" else stage + 1
                if before in (-1, num_stages) or (kind, before, micro_batch) in done:
                    turn.add((kind, stage, micro_batch))
                    table[rank][-1] = passes.pop(0)
        assert turn
        done |= turn
    return table


def update_together(kind: type[Tensor]) -> None:
    """Has torch's optimizers update parameters of this class on GPUs all at once, as they do ``nn.Parameter``.

    torch has no public way; DTensor enters itself into the same list.
    """
    optimizers._foreach_supported_types.append(kind)


def is_transformed(values: Iterable[Any] = ()) -> bool:
    """Whether a transform of torch.func (vmap, grad, ...) runs, or one of the tensors has a forward-mode derivative."""
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:
        return False
    tensors = (value for value in values if isinstance(value, Tensor))
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)  # type: ignore[no-untyped-call]


ENTRANCES = tuple(
    (module, name)
    for module, name in ((eager_transforms, "_wrap_for_grad"), (vmap, "_add_batch_dim"))
    if hasattr(module, name)
)
"""Functions that get each tensor which enters a transform of torch.func, and take a subclass for a plain tensor."""


def step_without_outputs(schedule: Any, target: torch.Tensor | None) -> None:
    """Runs a step of a pipeline's schedule, which merges no outputs; can go where torch 2.11 is the oldest."""
    if "return_outputs" in inspect.signature(schedule.step).parameters:
        schedule.step(target=target, return_outputs=False)
    else:
        schedule._merge_outputs = lambda chunks: None
        schedule.step(target=target)
