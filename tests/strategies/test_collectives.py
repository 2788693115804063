"""What strategies answer Lightning with: the same on every rank, whatever goes in."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback

from lightning_multigpu.strategies import collectives
from tests.strategies.tasks import Case, Classifier, eval_loader, make_strategy, make_trainer
from tests.world import World


def within_a_run(check: Callable[[Any], object]) -> None:
    """Calls the function with the strategy in the middle of a run, when everything is set up."""
    probe = LambdaCallback(on_validation_start=lambda trainer, module: check(trainer.strategy))
    trainer: L.Trainer = make_trainer(Case(), make_strategy("ring_ddp"), 2, callbacks=[probe], inference_mode=False)
    trainer.validate(Classifier(), eval_loader(), verbose=False)


def answers(strategy: Any) -> None:
    rank, reduce = strategy.global_rank, strategy.reduce
    given = torch.tensor([rank + 1, 10 * rank])
    assert reduce(given).tolist() == [1.5, 5.0]
    assert reduce(torch.tensor(rank + 1.0)).item() == 1.5
    for op, expected in (("sum", [3, 10]), (None, [3, 10]), ("max", [2, 10]), (dist.ReduceOp.MIN, [1, 0])):
        assert reduce(given, reduce_op=op).tolist() == expected
    assert reduce(given.double(), reduce_op=dist.ReduceOp.AVG).tolist() == [1.5, 5.0]
    assert reduce(torch.tensor(rank == 0), reduce_op="sum").item() == 1
    assert reduce(torch.tensor(rank + 1.0, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert given.tolist() == [rank + 1, 10 * rank]
    assert reduce("text") == "text"
    with pytest.raises(ValueError, match=r"median.*sum, mean"):
        reduce(given, reduce_op="median")
    decide = strategy.reduce_boolean_decision
    assert [decide(d) for d in (True, False, rank == 0)] == [True, False, False]
    assert [decide(d, all=False) for d in (True, False, rank == 0)] == [True, False, True]
    sent = strategy.broadcast({"from": rank, "what": [torch.ones(2) * rank]}, src=1)
    assert (sent["from"], sent["what"][0].tolist()) == (1, [1.0, 1.0])
    assert strategy.gather_objects("x" * (rank + 1)) == ["x", "xx"]
    assert strategy.all_gather(torch.tensor([rank, 5])).tolist() == [[0, 5], [1, 5]]
    assert (strategy.data_parallel_rank, strategy.data_parallel_size) == (rank, 2)
    assert strategy.run_view().owns_batch()
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": rank}
    assert strategy.is_distributed is True
    leaf = torch.tensor([float(rank + 1)], requires_grad=True)
    with torch.enable_grad():
        gathered = strategy.all_gather(leaf, sync_grads=True)
        ((rank + 1) * gathered * torch.tensor([[1.0], [10.0]])).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == [3.0, 30.0][rank]


def test_collectives_of_the_base(world2: World) -> None:
    world2.run(within_a_run, answers)


def votes(strategy: Any) -> None:
    through_world, own = [], dist.all_reduce

    def noted(*args: Any, group: Any = None, **options: Any) -> Any:
        through_world.append(group in (None, dist.group.WORLD))
        return own(*args, group=group, **options)

    with mock.patch.object(dist, "all_reduce", noted):
        found = [strategy.reduce_boolean_decision(strategy.global_rank == 0, all=each) for each in (True, False)]
    assert (found, through_world) == ([False, True], [False, False])


def votes_where_the_world_is_one_of_nccl() -> None:
    with mock.patch.object(collectives, "moves_by_nccl", lambda group: group is dist.group.WORLD):
        within_a_run(votes)


def test_votes_do_not_travel_through_gpus(world2: World) -> None:
    """A host that asks its GPU after each batch whether to stop launches nothing until the batch has ended."""
    world2.run(votes_where_the_world_is_one_of_nccl)
