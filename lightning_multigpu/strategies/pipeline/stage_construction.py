"""``configure_model`` on the ranks of a pipeline: each builds the layers that it will hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_multigpu._lightning_internals import collect_rng_states, set_rng_states
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.pipeline.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.splitting.construction import Construction
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.stages.step_state import preserved_random_state, preserved_state

if TYPE_CHECKING:
    import lightning.pytorch as pl

Bounds = list[tuple[int, int]]
_CPU = torch.device("cpu")


@contextmanager
def built_by_stages(
    module: pl.LightningModule,
    precision: Precision,
    split: Callable[[pl.LightningModule], tuple[Chain, Bounds]],
    position: int,
    num_ranks: int,
    device: torch.device = _CPU,
) -> Iterator[Bounds]:
    """Within the block ``module.configure_model()`` leaves only the values that the rank at ``position`` will hold.

    It has been called once before then, for which the module and random states are put back.

    Args:
        module: the user's module.
        precision: the Trainer's plugin, which decides on dtypes.
        split: finds the layers and cuts them into stages.
        position: of this rank in the pipeline.
        num_ranks: of the pipeline.
        device: where the module is built.

    Yields:
        The layers of each stage.

    Raises:
        ValueError: the module cannot be built so.
    """
    construction = Construction()
    with _explained(module):
        with preserved_state(module), isolate_rng(include_cuda=False), preserved_random_state(device):
            with precision.module_init_context(), construction.dry_run():
                module.configure_model()
            chain, bounds = split(module)
            holdings = Ownership(module, chain, bounds, position, num_ranks).holdings
            held = {id(h.tensor): position in h.holders for h in holdings}
        with construction.building(lambda tensor: held.get(id(tensor), True)):
            del chain, holdings
            yield bounds


def share_random_states(broadcast: Callable[[Any], Any], device: torch.device) -> None:
    """Gives every rank the random states of rank 0: torch's, Python's, NumPy's, and that of its own GPU."""
    on_gpu = device.type == "cuda"
    mine = (collect_rng_states(include_cuda=False), torch.cuda.get_rng_state(device) if on_gpu else None)
    states, gpu_state = broadcast(mine)
    set_rng_states(states)
    if on_gpu:
        torch.cuda.set_rng_state(gpu_state, device)


@contextmanager
def _explained(module: pl.LightningModule) -> Iterator[None]:
    name = type(module).__name__
    try:
        yield
    except PipelineError as error:
        raise ValueError(
            f"{name}.configure_model() cannot be run stage by stage: {error}. It is called twice, and must make the "
            f"same tensors each time without looking at the values of layers; else build them in {name}.__init__, "
            "which needs the host's memory for the whole model on every rank"
        ) from error


def share_values(ownership: Ownership, world: MeteredGroup, peers: MeteredGroup) -> bool:
    """Gives all ranks the same values, each those that it holds; a collective of the world.

    Args:
        ownership: who holds what.
        world: all ranks.
        peers: the ranks that hold the same layers, one of each pipeline; the first one's count where rank 0 has none.

    Returns:
        Whether every rank had all values.

    Raises:
        ValueError: on all ranks, if one has no values of what it is to hold, and rank 0 neither.
    """
    found = world.gather_objects((ownership.is_whole(), ownership.lacking()))
    if found[0][0]:
        ownership.share_values(world, 0)
        return all(is_whole for is_whole, _ in found)
    for rank, (_, lacking) in enumerate(found):
        if lacking:
            raise ValueError(
                f"rank {rank} has no values of {_few(lacking)}, which it is to hold: configure_model() makes them from "
                "values of layers on other ranks; make them independently of each other"
            )
    ownership.share_held(world, peers)
    return False


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
