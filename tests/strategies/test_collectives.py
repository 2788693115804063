"""What strategies answer Lightning with: the same on every rank, whatever goes in."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist

from lightning_multigpu.strategies import collectives
from lightning_multigpu.strategies.base import MultiGPUStrategy
from tests.strategies.tasks import Case, Classifier, eval_loader, make_strategy, make_trainer
from tests.world import World


class _Probe(L.Callback):
    """Calls the strategy's collectives in the middle of a run, when everything is set up."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, MultiGPUStrategy)
        rank = strategy.global_rank
        given = torch.tensor([rank + 1, 10 * rank])
        reduce = strategy.reduce
        self.answers = {
            "mean of integers": reduce(given).tolist(),
            "mean is the default": reduce(torch.tensor(rank + 1.0)).item(),
            "sum": reduce(given, reduce_op="sum").tolist(),
            "none sums": reduce(given, reduce_op=None).tolist(),
            "max": reduce(given, reduce_op="max").tolist(),
            "min as an op": reduce(given, reduce_op=dist.ReduceOp.MIN).tolist(),
            "avg as an op": reduce(given.double(), reduce_op=dist.ReduceOp.AVG).tolist(),
            "booleans": reduce(torch.tensor(rank == 0), reduce_op="sum").item(),
            "bfloat16": reduce(torch.tensor(rank + 1.0, dtype=torch.bfloat16)).dtype,
            "given is unchanged": given.tolist() == [rank + 1, 10 * rank],
            "no tensor": reduce("text"),
            "all": [strategy.reduce_boolean_decision(d) for d in (True, False, rank == 0)],
            "any": [strategy.reduce_boolean_decision(d, all=False) for d in (True, False, rank == 0)],
            "broadcast": strategy.broadcast({"from": rank, "what": [torch.ones(2) * rank]}, src=1),
            "gathered objects": strategy.gather_objects("x" * (rank + 1)),
            "all_gather": strategy.all_gather(torch.tensor([rank, 5])).tolist(),
            "mesh": (strategy.mesh.mesh_dim_names, tuple(strategy.mesh.shape)) if strategy.mesh else None,
            "data": (strategy.data_parallel_rank, strategy.data_parallel_size, strategy.owns_batch),
            "sampler": strategy.distributed_sampler_kwargs,
            "distributed": strategy.is_distributed,
        }
        try:
            reduce(given, reduce_op="median")
        except ValueError as error:
            self.answers["unknown"] = str(error)
        leaf = torch.tensor([float(rank + 1)], requires_grad=True)
        with torch.enable_grad():
            gathered = strategy.all_gather(leaf, sync_grads=True)
            ((rank + 1) * gathered * torch.tensor([[1.0], [10.0]])).sum().backward()
        self.answers["gradient through all_gather"] = leaf.grad.tolist() if leaf.grad is not None else None


def ask() -> dict[str, Any]:
    probe = _Probe()
    trainer = make_trainer(Case(), make_strategy("ring_ddp"), 2, callbacks=[probe], inference_mode=False)
    trainer.validate(Classifier(), eval_loader(), verbose=False)
    return probe.answers


def test_collectives_of_the_base(world2: World) -> None:
    for rank, answer in enumerate(world2.run(ask)):
        assert answer["mean of integers"] == [1.5, 5.0]
        assert answer["mean is the default"] == 1.5
        assert answer["sum"] == answer["none sums"] == [3, 10]
        assert answer["max"] == [2, 10]
        assert answer["min as an op"] == [1, 0]
        assert answer["avg as an op"] == [1.5, 5.0]
        assert answer["booleans"] == 1
        assert answer["bfloat16"] is torch.bfloat16
        assert answer["given is unchanged"]
        assert answer["no tensor"] == "text"
        assert answer["all"] == [True, False, False]
        assert answer["any"] == [True, False, True]
        assert answer["broadcast"]["from"] == 1
        assert answer["broadcast"]["what"][0].tolist() == [1.0, 1.0]
        assert answer["gathered objects"] == ["x", "xx"]
        assert answer["all_gather"] == [[0, 5], [1, 5]]
        assert answer["mesh"] == (("data", "pipeline", "tensor"), (2, 1, 1))
        assert answer["data"] == (rank, 2, True)
        assert answer["sampler"] == {"num_replicas": 2, "rank": rank}
        assert answer["distributed"] is True
        assert "median" in answer["unknown"]
        assert "sum, mean" in answer["unknown"]
        assert answer["gradient through all_gather"] == [[3.0], [30.0]][rank]


class _Voting(L.Callback):
    """Notes the groups through which a vote travels, where the world is taken for one of NCCL."""

    def __init__(self) -> None:
        self.votes: list[bool] = []
        self.through_world: list[bool] = []

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy, own = trainer.strategy, dist.all_reduce

        def noted(*args: Any, group: Any = None, **options: Any) -> Any:
            self.through_world.append(group in (None, dist.group.WORLD))
            return own(*args, group=group, **options)

        with mock.patch.object(dist, "all_reduce", noted):
            self.votes = [
                strategy.reduce_boolean_decision(strategy.global_rank == 0, all=each) for each in (True, False)
            ]


def vote() -> tuple[list[bool], list[bool]]:
    voting = _Voting()
    trainer = make_trainer(Case(), make_strategy("ring_ddp"), 2, callbacks=[voting])
    with mock.patch.object(collectives, "moves_by_nccl", lambda group: group is dist.group.WORLD):
        trainer.validate(Classifier(), eval_loader(), verbose=False)
    return voting.votes, voting.through_world


def test_votes_do_not_travel_through_gpus(world2: World) -> None:
    """A host that asks its GPU after each batch whether to stop launches nothing until the batch has ended."""
    assert world2.run(vote) == [([False, True], [False, False])] * 2
