"""The pieces of a traced module give together what the module gives; what cannot be cut is refused with the reason."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.traced_chain import TracedChain
from lightning_multigpu.engine.pipeline.stages.layer_interception import Activations, LayerInterception
from lightning_multigpu.engine.training_memory import SavedActivations

CPU = torch.device("cpu")
POINTS = ["net.b", "net.c"]
Forward = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    def __init__(self, forward: Forward | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.c.weight = self.a.weight
        self.norm = nn.BatchNorm1d(4)
        self.inactive = nn.Linear(4, 4)
        self.constant = torch.arange(4.0)
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.own_forward = forward

    def forward(self, x: Tensor, number: float = 1.0, *, mask: Tensor | None = None) -> Any:
        if self.own_forward is not None:
            return self.own_forward(self, x)
        first = torch.relu_(self.a(x))
        y = self.norm(self.b(first)) * number + self.constant + first
        y = y if mask is None else y * mask
        z = self.c(y * self.scale)
        z = torch.dropout(z, 0.5, True) if self.training else z + self.inactive.bias
        return [z + first, {"first": first, "kind": "pair", "none": None}]


class Outer(nn.Module):
    def __init__(self, forward: Forward | None = None) -> None:
        super().__init__()
        self.net = Net(forward)
        self.head = nn.Linear(4, 1)


def chain_of(outer: Outer, points: list[str] = POINTS, name: str = "auto") -> TracedChain:
    return TracedChain(outer, name, points, CPU)


def run(net: Net, *, number: float = 1.5, samples: int = 5) -> list[Tensor]:
    torch.manual_seed(3)
    x, mask = torch.randn(samples, 4), torch.rand(4) > 0.3
    out, further = net(x, number, mask=mask)
    assert further["kind"] == "pair"
    assert further["none"] is None
    loss = out.square().sum() + further["first"].sum()
    if loss.requires_grad:
        loss.backward()
    return [out, further["first"]]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def test_pieces_compute_what_the_module_computes() -> None:
    outer = Outer()
    reference = copy.deepcopy(outer)
    chain = chain_of(outer)
    for samples, number, mode in ((5, 1.5, True), (3, 1.5, True), (5, 1.5, False), (5, 0.5, True), (5, 1.5, True)):
        outer.train(mode)
        reference.train(mode)
        with chain.entered():
            found = run(outer.net, samples=samples, number=number)
        for mine, theirs in zip(found, run(reference.net, samples=samples, number=number), strict=True):
            assert torch.equal(mine, theirs)
    torch.testing.assert_close(gradients(outer), gradients(reference), rtol=1e-6, atol=1e-7)
    assert dict(outer.named_buffers()).keys() == dict(reference.named_buffers()).keys()
    for name, buffer in outer.named_buffers():
        assert torch.equal(buffer, reference.get_buffer(name)), name


def test_what_training_and_evaluation_use_is_known_from_the_first() -> None:
    """Also in a step whose activations are counted, of which the trace keeps none."""
    outer = Outer()
    chain = chain_of(outer)
    outer.eval()
    saved = SavedActivations([])
    with torch.inference_mode(), saved.counted():
        chain.arrange(lambda: run(outer.net), will_train=True)
    assert saved.peak_bytes == 0
    assert not any(part.training for part in outer.modules())
    assert "norm.num_batches_tracked" in chain.layers[1].names
    assert "inactive.bias" in chain.layers[2].names


def test_tensors_that_move_between_stages_are_refused() -> None:
    def moves(net: Net, x: Tensor) -> Tensor:
        x = net.a(x) if len(x) == 2 else x + 1
        x = net.b(x)
        return net.c.bias + (x if len(x) == 2 else nn.functional.linear(x, net.b.weight))

    outer = Outer(moves)
    chain = chain_of(outer, ["net.b"], "net")
    chain.arrange(lambda: outer.net(torch.zeros(2, 4)), will_train=True)
    outer.net.own_forward = lambda net, x: net.b(net.inactive(nn.functional.linear(x, net.b.weight)))
    words = r"stage 0 uses 'net.b.weight' .* that used it before are: 1; move"
    with chain.entered(), pytest.raises(PipelineError, match=words):
        outer.net(torch.zeros(3, 4))


def test_statistics_of_a_new_mode_are_refused_on_one_stage_only() -> None:
    outer = Outer(lambda net, x: net.b(net.norm(net.a(x)) if net.training else net.a(x)))
    chain = chain_of(outer, ["net.b"], "net")
    outer.eval()
    chain.arrange(lambda: outer.net(torch.zeros(3, 4)), will_train=False)
    outer.train()
    with chain.entered(), pytest.raises(PipelineError, match=r"stage 0 uses 'net.norm.running_mean' .* are: none"):
        outer.net(torch.zeros(3, 4))


def without_grad(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = net.b(net.a(x))
    return net.c(x)


def writes_argument(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    x.add_(1)
    return net.b(x + y)


def writes_view(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    column = y[:, 0]
    z = net.b(x)
    column.add_(z.sum())
    return y * column.sum() + z


def writes_shared(net: Net, x: Tensor) -> Tensor:
    net.scale.add_(1)
    return net.b(net.a(x)) * net.scale


def statistics_twice(net: Net, x: Tensor) -> Tensor:
    mean, var = net.norm.running_mean, net.norm.running_var
    x = nn.functional.batch_norm(net.a(x), mean, var, training=True)
    return nn.functional.batch_norm(net.b(x), mean, var, training=True)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda net, x: net.b(net.a(x) if x.sum() > 0 else x), "export cannot trace .* of Net: .* depend on values"),
        (lambda net, x: net.b(net.a(x) * random.random()), "Python's random or of NumPy"),
        (lambda net, x: net.b(net.b(net.a(x))), "calls the split points 'b', 'b', and stages begin in the order 'b'"),
        (lambda net, x: net.a(x), "calls the split points not at all"),
        (without_grad, r"cut into 1 pieces, and the split points 'b' make 2"),
        (writes_argument, "changes an argument in place .*work on a copy"),
        (writes_view, "shares its memory, is needed too"),
        (writes_shared, r"stage 0 changes 'scale' in place, and the stages \[0, 1\] use it"),
        (statistics_twice, r"changes 'norm.running_mean' in place, and the stages \[0, 1\] use it"),
        (lambda net, x: (net.a(x), net.b(x))[1], "nothing that is computed before split point 1 is "),
        (lambda net, x: net.a(x).sum().item() * net.b(x), "gives a SymFloat that is needed after it, "),
    ],
)
def test_what_cannot_be_cut_is_refused(forward: Forward, message: str) -> None:
    outer = Outer(forward)
    with pytest.raises(PipelineError, match=message):
        chain_of(outer, ["net.b"]).arrange(lambda: outer.net(torch.zeros(2, 4)), will_train=True)


def test_points_that_a_step_does_not_run_in_their_order_are_refused() -> None:
    outer = Outer()
    for step, words in (
        (lambda: run(outer.net), "calls the split points 'b', 'c', and stages begin in the order 'c', 'b'"),
        (lambda: None, "the step returned without calling 'net'"),
    ):
        with pytest.raises(PipelineError, match=words):
            chain_of(outer, POINTS[::-1]).arrange(step, will_train=True)


def test_what_arrives_may_be_changed_in_place() -> None:
    """Also if it is needed unchanged for its own gradient: what has arrived is a leaf that wants one."""

    def changes(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        z = net.b(y)
        y.relu_()
        return z + net.c(y)

    outer = Outer(changes)
    chain = chain_of(outer, ["net.b", "net.c"])
    chain.arrange(lambda: outer.net(torch.zeros(2, 4)), will_train=True)
    x = torch.randn(3, 4)
    expected = outer.net(x)
    arrived = Activations((), ())
    for stage in range(3):
        stage_layers = LayerInterception(chain)
        with stage_layers.installed():
            left, result = stage_layers.run((stage, stage + 1), lambda: outer.net(x), lambda received=arrived: received)
        if left:
            leaves = tuple(tensor.detach().requires_grad_() for tensor in Activations.of(result).tensors)
            arrived = Activations(Activations.of(result).structure, leaves)
    assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("points", "name", "message"),
    [
        (["net.d"], "auto", "split_points names 'net.d', which is no part of the module"),
        (["head"], "net", "split_points names 'head', which is not within module='net'"),
        (["net.b"], "nets", "module names 'nets', which is no part of the module"),
    ],
)
def test_names_that_do_not_exist_are_refused(points: list[str], name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain_of(Outer(), points, name)


def test_a_backward_hook_within_a_traced_module_is_refused() -> None:
    """It was left out of the pieces, and gradients were those without the hook."""
    outer = Outer()
    outer.net.a.register_full_backward_hook(lambda module, given, out: None)
    with pytest.raises(ValueError, match=r"'net.a' has a backward hook.*remove it, or split a chain"):
        chain_of(outer)


@pytest.mark.parametrize(
    ("points", "name"),
    [(["net.b"], "net"), (["net.b", "head"], ""), (["net.b", "net.c"], "net"), (["blocks.1", "blocks.2"], "")],
)
def test_the_smallest_module_with_a_forward_pass_is_cut(points: list[str], name: str) -> None:
    outer = Outer()
    outer.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    assert chain_of(outer, points).name == (name or "Outer")
