"""Replicas of a module: what they share with it, what is their own, their threads, and the sum of their gradients."""

import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from lightning_multigpu.engine.one_process.joint_loss import JointLoss, summed
from lightning_multigpu.engine.one_process.module_replicas import ModuleReplicas
from lightning_multigpu.engine.one_process.replica_threads import ReplicaThreads

CPUS = [torch.device("cpu")] * 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))
        self.call = self.scaled

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale  # type: ignore[no-any-return]


def test_the_first_is_the_module_and_the_others_share_its_parameters_alone() -> None:
    module = nn.Sequential(Block(), Block())
    module[1].linear = module[0].linear
    first, *others = ModuleReplicas(module, CPUS).make(3)
    assert first is module
    for replica in others:
        assert [id(parameter) for parameter in replica.parameters()] == [id(each) for each in module.parameters()]
        assert replica[1].linear is replica[0].linear is not module[0].linear
        assert list(replica.state_dict()) == list(module.state_dict())
        replica[0].scale.mul_(2)
    assert module[0].scale.tolist() == [1, 1]


def test_methods_kept_as_attributes_are_those_of_the_replica() -> None:
    module = Block()
    _, second = ModuleReplicas(module, CPUS).make(2)
    module.scale.fill_(7)
    x = torch.ones(1, 2)
    torch.testing.assert_close(second.call(x), module.linear(x))


class HooksItself(nn.Module):
    """Registers a hook in its first forward pass, as models of transformers do to keep hidden states."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_forward_hook(lambda module, inputs, output: None)
        return x


def test_hooks_that_a_step_registers_are_those_of_the_replica() -> None:
    """The replicas shared an empty table of hooks: with two replicas the hook was there twice, and on the module."""
    replicas = ModuleReplicas(HooksItself(), CPUS).make(3)
    for replica in replicas:
        replica(torch.ones(()))
    assert [len(replica._forward_hooks) for replica in replicas] == [1, 1, 1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(2, 2, batch_first=True)
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.recurrent(x)[0])).square().mean()  # type: ignore[no-any-return]


def made_as_on_gpus(module: nn.Module, indices: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", lambda tensor, device, **options: tensor.clone())
        return ModuleReplicas(module, [torch.device("cuda", index) for index in indices]).make(len(indices))


def test_copies_of_parameters_as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs each replica has parameters of its own; here the copies stay in the host's memory."""
    torch.manual_seed(1)
    module, x = Tied().double(), torch.randn(6, 3, 2, dtype=torch.float64)
    module(x).backward()
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    replicas = made_as_on_gpus(module, range(3), monkeypatch)
    assert not {*map(id, replicas[1].parameters())} & {*map(id, module.parameters())}
    assert replicas[1].second.weight is replicas[1].first.weight
    for own, of_module in zip(replicas[1].parameters(), module.parameters(), strict=True):
        assert own.requires_grad == of_module.requires_grad
    with closing(ReplicaThreads(CPUS)) as threads:
        losses = threads.run(list(map(partial, replicas, x.split(2))), "step")
        trained = [[parameter for parameter in replica.parameters() if parameter.requires_grad] for replica in replicas]
        JointLoss(losses, [1 / 3] * 3, trained, threads, nullcontext).value().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.parametrize("indices", [[0, 0], [0, 0, 1, 1], [0, 1, 0]])
def test_replicas_that_share_a_gpu_share_no_memory(indices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """BatchNorm's counter, alone of its dtype, was the module's own: it counted each replica's batch."""
    replicas = made_as_on_gpus(nn.BatchNorm1d(2), indices, monkeypatch)
    for replica in replicas:
        replica(torch.ones(3, 2))
    assert [int(replica.num_batches_tracked) for replica in replicas] == [1] * len(indices)
    places = [tensor.data_ptr() for each in replicas for tensor in (*each.parameters(), *each.buffers())]
    assert len({*places}) == len(places)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_cannot_be_copied_is_named() -> None:
    for part, problem in (
        (torch.jit.script(nn.Linear(2, 2)), r"1 cannot be copied to the devices: it is a ScriptModule"),
        (nn.LazyLinear(2), r"1 \(LazyLinear\) is lazy"),
        (torch.compile(nn.Linear(2, 2), backend="eager"), r"1 cannot be copied to the devices: it is compiled"),
    ):
        with pytest.raises(ValueError, match=f"^{problem}"):
            ModuleReplicas(nn.Sequential(nn.Linear(2, 2), part), CPUS)


def test_gradients_that_share_memory_are_not_changed_in_place() -> None:
    """autograd gives ``p`` and ``q`` of ``p + q`` the same gradient, and that of a sum is one number, expanded."""
    parameters = [torch.zeros(3) for _ in range(4)]
    shared, expanded, own = torch.ones(3), torch.ones(1).expand(3), torch.ones(3)
    found = [[shared, shared, expanded, own], [torch.full((3,), float(n)) for n in (1, 2, 3, 4)]]
    sums = summed(found, parameters)
    assert [each.tolist() for each in sums if each is not None] == [[n + 1.0] * 3 for n in (1, 2, 3, 4)]


def test_parameters_that_only_some_replicas_use() -> None:
    gradient = torch.ones(2)
    sums = summed([[None, None], [gradient, None]], [torch.zeros(2)] * 2)
    assert sums[0] is gradient
    assert sums[1] is None


def test_ctrl_c_waits_for_the_calls_of_the_threads() -> None:
    ended: list[int] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    def call() -> None:
        time.sleep(0.05)
        ended.append(1)

    with closing(ReplicaThreads(CPUS)) as threads:
        with pytest.raises(KeyboardInterrupt):
            threads.run([interrupted, call, call], "training_step")
        assert len(ended) == 2
        assert threads.run([int, int, int], "training_step") == [0] * 3
