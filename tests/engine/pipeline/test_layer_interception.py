"""Intercepted stages compute together what the module computes; modules that are no chain are refused."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.chain import find_chain
from lightning_multigpu.engine.pipeline.stages.layer_interception import (
    Activations,
    LayerInterception,
    map_only,
    tensors_of,
)
from lightning_multigpu.engine.placeholder import Placeholder

Forward = Callable[["Model", Tensor], Any]
X = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 2.0]])


class Layer(nn.Module):
    """Takes a mask too, and hands on a pair, as some decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, mask: Tensor, further: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.linear(x * mask) + (0 if further is None else further)
        return y, y.sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(3, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(4, 1)


def plain(module: Model, x: Tensor) -> Tensor:
    mask = (x[:, :1] > 0).to(x.dtype)
    x = module.embedding(x)
    for layer in module.layers:
        x, _ = layer(x, mask=mask)
    return module.head(x).sum()


def through(
    module: Model, x: Tensor, *, indices: Sequence[int] = range(4), between: Any = lambda taken, given: given
) -> Tensor:
    """Runs some of the layers; ``between`` computes with what a layer has taken and given."""
    x = module.embedding(x)
    for index in indices:
        x = between(x, module.layers[index](x, mask=torch.ones(()))[0])
    return module.head(x).sum()


residual = partial(through, between=lambda taken, given: taken + given)
in_place = partial(through, between=lambda taken, given: given.add_(1))
skipping = partial(through, indices=(0, 2, 3))
ending_early = partial(through, indices=(0, 1, 2))


def twice(module: Model, x: Tensor) -> Tensor:
    return plain(module, x) + plain(module, x)


def mapped(module: Model, x: Tensor) -> Tensor:
    return torch.func.vmap(partial(plain, module))(x[:, None]).sum()  # type: ignore[no-any-return]


def all_outputs(module: Model, x: Tensor) -> Tensor:
    x, outputs = module.embedding(x), []
    for layer in module.layers:
        x, _ = layer(x, mask=torch.ones(()))
        outputs.append(x)
    return module.head(sum(outputs)).sum()


def skip_connection(module: Model, x: Tensor) -> Tensor:
    x, first = module.embedding(x), None
    for layer in module.layers:
        x, _ = layer(x, mask=torch.ones(()), further=first)
        first = x if first is None else first
    return module.head(x).sum()


def by_stages(forward: Forward, cuts: tuple[int, ...]) -> Any:
    module = Model()
    chain = find_chain(module, "auto", 2)
    received: Activations | None = None
    for start, stop in zip((0, *cuts), (*cuts, 4), strict=True):
        stage = LayerInterception(chain)
        receive = None if received is None else lambda carried=received: carried
        with stage.installed():
            left, result = stage.run((start, stop), lambda: forward(module, X), receive)
        assert left == (stop < 4)
        received = Activations.of(result) if left else None
    return result


def test_values_are_asked_for_as_the_first_layer_needs_them() -> None:
    module = Model()
    said: list[str] = []
    chain = find_chain(module, "auto", 2)
    first, second = LayerInterception(chain), LayerInterception(chain, lambda part: said.append(f"part {part}"))
    with first.installed():
        _, handed_on = first.run((0, 2), lambda: plain(module, X), None)
    sent = Activations.of(handed_on)
    empty = Activations(sent.structure, tuple(torch.full_like(tensor, torch.nan) for tensor in sent.tensors))

    def values() -> tuple[Tensor, ...]:
        said.append("values")
        return sent.tensors

    module.embedding.register_forward_hook(lambda *_: said.append("embedded"))
    module.layers[0].register_forward_pre_hook(lambda layer, args, kwargs: said.append("before"), with_kwargs=True)
    module.layers[1].register_forward_hook(lambda *_: said.append("a hook of another stage's layer"))
    module.layers[2].register_forward_hook(lambda *_: said.append("a hook"))
    with second.installed():
        _, result = second.run((2, 4), lambda: plain(module, X), lambda: empty, values)
    hooks = ["before", "a hook of another stage's layer", "part 3", "values", "a hook"]
    assert said == ["part 0", "embedded", *hooks, "part 4", "part 5"]
    torch.testing.assert_close(result, plain(Model(), X))


@pytest.mark.parametrize("cuts", [(1,), (2,), (1, 2, 3)])
def test_stages_compute_together_what_the_module_computes(cuts: tuple[int, ...]) -> None:
    torch.testing.assert_close(by_stages(plain, cuts), plain(Model(), X))


def keeping(module: Model, x: Tensor) -> Tensor:
    """Uses what a hook has kept, as models of Hugging Face do that return hidden states."""
    kept: list[Tensor] = []
    hook = module.layers[0].register_forward_hook(lambda layer, args, output: kept.append(output))
    try:
        return plain(module, x) + sum(output[0].mean() for output in kept)
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (keeping, "layers.0"),
        (residual, "layers.1 is not the output of layer layers.0.*residual"),
        (in_place, "layers.0 is changed in place"),
        (twice, "twice.*keep the result of the first call"),
        (mapped, r"layers.0 is called within a transform of torch.func \(vmap"),
        (skipping, "calls layers.2 where layers.1 was due"),
        (ending_early, "ended after layer layers.2 without running layers.3"),
        (all_outputs, "what the step returns depends on the output of layer layers.0"),
        (skip_connection, "takes the output of layer layers.0 as an input"),
    ],
)
def test_what_is_no_chain_is_refused(forward: Forward, words: str) -> None:
    """Within a stage too. Transforms ended with torch's raw texts, such as that a tensor may have escaped from vmap."""
    within_a_stage = [()] if forward in (residual, in_place, twice, skipping, ending_early) else []
    for cuts in ((1,), (2,), (1, 2, 3), *within_a_stage):
        with pytest.raises(PipelineError, match=words):
            by_stages(forward, cuts)


def test_a_checkpoint_around_a_layer_is_refused() -> None:
    """Its backward called the layer again, and the message was that another layer was due."""
    module = Model()
    stage = LayerInterception(find_chain(module, "layers", 2))

    def step() -> Tensor:
        x = module.embedding(torch.ones(2, 3))
        for layer in module.layers:
            x = checkpoint(lambda y, layer=layer: layer(y, mask=torch.ones(()))[0], x, use_reentrant=False)
        return module.head(x).sum()

    with stage.installed():
        _, loss = stage.run((0, 4), step, None)
        with pytest.raises(PipelineError, match=r"layers.3 is called outside of .*activation_checkpointing=True"):
            loss.backward()


def test_layers_are_as_before_afterwards() -> None:
    module = Model()
    x = torch.ones(2, 3)
    expected = plain(module, x)
    stage = LayerInterception(find_chain(module, "layers", 2))
    with pytest.raises(PipelineError), stage.installed():
        stage.run((0, 2), lambda: residual(module, x), None)
    assert not any({"forward", "_compiled_call_impl"} & set(vars(layer)) for layer in module.layers)
    assert plain(module, x) == expected
    # Layers are wired once, and again where their forward is another in a later step.
    module.layers[1].forward = lambda y, mask: (y * mask, y.sum())  # type: ignore[method-assign,assignment]

    def by_forward() -> Tensor:
        y = module.embedding(x)
        for layer in module.layers:
            y, _ = layer.forward(y, mask=torch.ones(()))
        return module.head(y).sum()  # type: ignore[no-any-return]

    again = by_forward()
    with stage.installed():
        assert stage.run((0, 4), by_forward, None)[1] == again != expected


def linears(*sizes: int, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(size, size, bias=bias) for size in sizes))


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"small": linears(2, 2), "blocks": nn.ModuleList([linears(4), linears(4), linears(4)])}, "blocks"),
        # A teacher with a bias more was split, and the student that trains was on one stage.
        ({"teacher": linears(4, 4).requires_grad_(False), "student": linears(4, 4, bias=False)}, "student"),
        ({"outer": nn.Sequential(linears(2, 2), nn.ReLU())}, "outer"),
    ],
    ids=["most parameters", "a student rather than its teacher", "an outer container"],
)
def test_auto_takes(parts: dict[str, nn.Module], name: str) -> None:
    assert find_chain(nn.ModuleDict(parts), "auto", 2).name == name


@pytest.mark.parametrize(
    ("name", "stages", "words"),
    [
        ("auto", 5, r"with 5 layers or more.*'layers' \(4 layers\)"),
        ("layers", 5, "4 layers for 5 stages"),
        ("head", 2, "is a Linear; it must be"),
        ("blocks", 2, "is no part of the module.*'layers'"),
    ],
)
def test_a_chain_that_cannot_be_found_is_named(name: str, stages: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_chain(Model(), name, stages)


Pair = namedtuple("Pair", "first second")
A, B, C = torch.ones(1), torch.nn.Parameter(torch.ones(2)), Placeholder(torch.ones(3), "a layer")

VALUE: Any = [
    OrderedDict(b=B, a=[A]),
    (A, [B, {"c": C, "n": None}], 1.5, A),
    Pair(A, (B, Pair(C, None))),
    [(), [], {}, True, "text", None],
]


def test_finds_and_replaces_what_torch_does() -> None:
    assert [*map(id, tensors_of(VALUE))] == [id(leaf) for leaf in tree_leaves(VALUE) if isinstance(leaf, Tensor)]
    for kind in (Tensor, Placeholder):
        replaced = map_only(kind, lambda tensor: ("new", id(tensor)), VALUE)
        assert repr(replaced) == repr(tree_map_only(kind, lambda tensor: ("new", id(tensor)), VALUE))
