"""A module that is built in parts has the values of one that is built as a whole, and the memory of its parts only."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.construction import Construction
from lightning_multigpu.engine.placeholder import Placeholder


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(3, 4))
        after = nn.Parameter(torch.empty(4, 40))
        after.no_decay = True  # type: ignore[attr-defined]
        self.after = after
        nn.init.trunc_normal_(self.after, std=0.5)
        nn.init.trunc_normal_(self.before, mean=1.0, a=1.5, b=4.0)
        self.register_buffer("noise", torch.rand(5))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(3, 3))
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.a.weight = self.b.weight = weight


class Redrawn(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Embedding(5, 4, padding_idx=2), nn.Linear(4, 4))
        self.apply(self.draw)

    def draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.orthogonal_(module.weight)
            nn.init.normal_(module.weight[1])


class FromTemplate(nn.Linear):
    """Takes values from a module that does not stay."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.load_state_dict(nn.Linear(3, 4).state_dict())


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(20, 30),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2),
    "lstm": lambda: nn.LSTM(4, 4, num_layers=2),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 5)),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose1d(2, 2, 3)),
    "drawn": Drawn,
    "tied": Tied,
    "redrawn": Redrawn,
    "from a template": FromTemplate,
}


def build(builder: Callable[[], nn.Module], is_held: Callable[[str], bool]) -> nn.Module:
    construction = Construction()
    with torch.random.fork_rng(devices=[]), construction.dry_run():
        placeholders = builder()
    assert all(isinstance(parameter, Placeholder) for parameter in placeholders.parameters())
    names = {id(tensor): name for name, tensor in (*placeholders.named_parameters(), *placeholders.named_buffers())}
    with construction.building(lambda tensor: id(tensor) not in names or is_held(names[id(tensor)])):
        return builder()


@pytest.mark.parametrize("name", BUILDERS)
def test_values_are_those_of_one_device(name: str) -> None:
    torch.manual_seed(3)
    whole = BUILDERS[name]()
    expected = torch.rand(4)
    names = list(whole.state_dict())
    for part in range(3):
        held = {entry for index, entry in enumerate(names) if index % 3 != part}
        torch.manual_seed(3)
        built = build(BUILDERS[name], held.__contains__)
        assert torch.equal(torch.rand(4), expected), "random states are where they would be"
        assert list(built.state_dict()) == names
        for entry, tensor in (*built.named_parameters(), *built.named_buffers()):
            assert tensor.requires_grad is whole.state_dict(keep_vars=True)[entry].requires_grad
            assert isinstance(tensor, Placeholder) == (entry not in held)
            if entry in held:
                torch.testing.assert_close(tensor, whole.state_dict()[entry], rtol=0, atol=0)
        if isinstance(built, Drawn):
            assert built.after.no_decay is True, "attributes of parameters stay"
        if isinstance(built, Tied):
            assert built.a.weight is built.b.weight, "shared parameters stay shared"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((2, 1), r"does not make Linear.weight of shape \(2, 2\) as it did"),
        ((1, 2), r"makes Linear.weight of shape \(2, 2\) where it made nothing"),
    ],
)
def test_another_module_the_second_time(sizes: tuple[int, int], words: str) -> None:
    before, remaining = nn.init._no_grad_trunc_normal_, list(sizes)
    with pytest.raises(PipelineError, match=words):
        build(lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(remaining.pop(0)))), lambda name: True)
    assert nn.init._no_grad_trunc_normal_ is before, "torch is as before"
    assert not isinstance(nn.Linear(2, 2).weight, Placeholder)
