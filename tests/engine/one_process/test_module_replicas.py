"""Replicas of a module: what they share with it, and what is their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_multigpu.engine.one_process.module_replicas import ModuleReplicas

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


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_cannot_be_copied_is_named() -> None:
    for part, problem in (
        (torch.jit.script(nn.Linear(2, 2)), "it is a ScriptModule"),
        (nn.LazyLinear(2), "it is lazy"),
        (torch.compile(nn.Linear(2, 2), backend="eager"), "it is compiled"),
    ):
        with pytest.raises(ValueError, match=f"^1 cannot be copied to the devices: {problem}"):
            ModuleReplicas(nn.Sequential(nn.Linear(2, 2), part), CPUS)
