"""Layers that are computed again give the gradients of layers that are not, with the same random numbers."""

import random
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_multigpu.engine.activation_checkpointing import (
    RecomputationError,
    layers_of,
    recomputed,
    recomputing,
    selected_layers,
)
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.step_state import set_random_state

CPU = torch.device("cpu")


class Layer(nn.Module):
    """Draws torch's and Python's random numbers, and makes tensors of the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(3, 3, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.calls = 0

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        self.calls += 1
        y = torch.tanh(self.linear(x * mask)) * (2.0 if random.random() < 0.5 else 0.25)
        return self.norm(self.dropout(y) @ torch.eye(3)).square()


def train(layer: nn.Module, seed: int, again: bool, **kwargs: Any) -> list[Tensor]:
    """Output and gradients; between forward and backward other numbers are drawn, in another default dtype."""
    leaf = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3).requires_grad_()
    x = leaf * 1.0
    set_random_state(seed, CPU)
    torch.set_default_dtype(torch.float64)
    try:
        output = recomputed(layer, layer.forward, (x,), kwargs) if again else layer(x, **kwargs)
    finally:
        torch.set_default_dtype(torch.float32)
    set_random_state(99, CPU)
    (output * torch.arange(12.0).reshape(4, 3)).sum().backward()
    assert leaf.grad is not None
    return [output.detach(), leaf.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_of_one_run(seed: int) -> None:
    mask = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    plain, checkpointed = Layer(), Layer()
    found, expected = train(checkpointed, seed, True, mask=mask), train(plain, seed, False, mask=mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert (plain.calls, checkpointed.calls) == (1, 2)
    torch.testing.assert_close(checkpointed.state_dict(), plain.state_dict(), rtol=0, atol=0)  # one batch is counted


def test_an_input_that_is_changed_in_place_is_still_there() -> None:
    layer = nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Softplus())
    torch.testing.assert_close(train(layer, 3, True), train(layer, 3, False), rtol=0, atol=0)


class Changing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(2 * x[0].add_(1.0).sum() * x)


@pytest.mark.parametrize("hooks", [False, True])
def test_an_input_that_is_changed_in_secret_is_refused(hooks: bool) -> None:
    """Under saved-tensor hooks, which a report counts memory with, its gradients were wrong without a word."""
    unpacked = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor)
    with (
        unpacked if hooks else nullcontext(),
        pytest.raises(PipelineError, match=r"a Changing changes its input in its.*leave it out of activation_ch"),
    ):
        train(Changing(), 1, True)


def test_layers_are_named() -> None:
    chain = Chain("model.blocks", (nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1), nn.ReLU()))
    selected = partial(layers_of, chain.name, chain.named_layers())
    assert selected(False) == selected([]) == frozenset()
    assert selected(True) == {0, 1, 2, 3}
    assert selected([nn.Linear, "Tanh"]) == {0, 1, 2}
    assert selected(["model.blocks.3"]) == {3}
    with pytest.raises(ValueError, match=r"\['Conv'\] names no layer of 'model.blocks'.*Linear, ReLU, Tanh.*blocks.3"):
        selected(["Linear", "Conv"])
    with pytest.raises(ValueError, match=r"activation_checkpointing=\[Conv1d\]"):
        selected([nn.Conv1d])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))  # type: ignore[no-any-return]


class Whole(nn.Module):
    """Blocks in a list, a Sequential within one of them, and parts outside of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([Block(), nn.ModuleList([Block()])])
        self.losses = nn.ModuleList([nn.MSELoss()])
        self.head = nn.Sequential(nn.Linear(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1][0](self.blocks[0](self.first(x))))  # type: ignore[index, no-any-return]


def test_layers_of_a_whole_module_are_selected() -> None:
    module, layers = Whole(), ["blocks.0", "blocks.1.0", "head.0"]
    assert selected_layers(module, True) == layers
    assert selected_layers(module, ["blocks.1.0", "first"]) == ["first", "blocks.1.0"]
    assert selected_layers(module, ["Block", nn.Linear]) == ["first", *layers], "of layers inside each other the outer"
    assert selected_layers(module, []) == []
    words = r"\['Conv'\] names no layer of Whole.*Block, Dropout, Linear.*'blocks.0', 'blocks.1.0', 'head.0'.*or True"
    with pytest.raises(ValueError, match=words):
        selected_layers(module, ["Linear", "Conv"])
    with pytest.raises(ValueError, match=r"=True: no module of Linear is an nn.Sequential or .*such as \[\]"):
        selected_layers(nn.Linear(1, 1), True)


def gradients(module: nn.Module, again: bool) -> dict[str, Tensor]:
    torch.manual_seed(2)
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    with recomputing(selected_layers(module, again), module):
        loss = module(x).square().sum()
    drawn = torch.rand(3)
    loss.backward()
    assert not torch.equal(torch.rand(3), drawn), "backward has set the random state back"
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def test_a_whole_module_trains_as_without() -> None:
    """Random numbers are drawn again, and go on behind backward as if they had not been; so hooks run again."""
    torch.manual_seed(1)
    module = Whole()
    calls: list[str] = []
    module.blocks[0].register_forward_pre_hook(lambda *_: calls.append("layer"))
    module.blocks[0].inner.register_forward_hook(lambda *_: calls.append("inside"))  # type: ignore[union-attr]
    expected, numbers = gradients(module, False), torch.rand(3)
    module.zero_grad()
    torch.testing.assert_close(gradients(module, True), expected, rtol=0, atol=0)
    assert torch.equal(torch.rand(3), numbers)
    assert calls == ["layer", "inside"] * 3
    assert not any("_compiled_call_impl" in vars(part) for part in module.modules()), "the module is as it was"
    with recomputing(["blocks.0"], module), torch.no_grad():
        module(torch.zeros(1, 3))


class Named(nn.Linear):
    def forward(self, x: Tensor, *, name: str, layer: int, own: Tensor) -> Tensor:
        return super().forward(x) * own


def test_arguments_of_a_layer_may_have_any_name() -> None:
    module = nn.Sequential(Named(3, 3))
    with recomputing(["0"], module):
        module[0](torch.ones(1, 3), name="first", layer=0, own=torch.ones(3)).sum().backward()


def test_a_layer_in_two_containers_is_computed_again_once() -> None:
    """It was patched for each of them, and then refused as if a checkpoint were around it."""
    shared = nn.Linear(3, 3)
    module = nn.ModuleDict({"first": nn.Sequential(shared), "second": nn.Sequential(shared, nn.Linear(3, 1))})
    layers = selected_layers(module, True)
    assert layers == ["first.0", "second.1"]
    with recomputing(layers, module):
        module["second"](module["first"](torch.ones(1, 3))).sum().backward()


class Counting(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_layers_that_cannot_be_computed_again_are_refused() -> None:
    module = nn.Sequential(Counting())
    with (
        pytest.raises(RecomputationError, match=r"Counting changes its buffer 'calls' .*leave it out of activation_ch"),
        recomputing(["0"], module),
    ):
        module(torch.ones(1, 3))
    module = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3))
    compiled = nn.ModuleDict({"net": torch.compile(module, backend="eager")})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"^net is compiled as a whole.*layer.compile\(\)"):
        selected_layers(compiled, [nn.Linear])


@pytest.mark.parametrize("reentrant", [True, False])
def test_within_torchs_own_checkpoint_gradients_are_the_same(reentrant: bool) -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), nn.Linear(3, 3))
    found = []
    for recomputation in (nullcontext(), recomputing(["0", "1"], module)):
        x = torch.ones(4, 3, requires_grad=True)
        torch.manual_seed(0)
        with recomputation:
            checkpoint(module, x, use_reentrant=reentrant).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in module.parameters())])
        module.zero_grad()
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_compiled_layers_are_computed_again() -> None:
    module = nn.Sequential(Block(), nn.Linear(3, 1))
    expected = gradients(module, False)
    module.zero_grad()
    runs = []
    module[0]._compiled_call_impl = lambda x: runs.append(1) or module[0]._call_impl(x)  # type: ignore[assignment, func-returns-value]
    torch.testing.assert_close(gradients(module, True), expected, rtol=0, atol=0)
    assert len(runs) == 2
