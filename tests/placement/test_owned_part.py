"""Owners of pieces together make the update of one device, with states that are cut and joined by the table."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_multigpu.placement.owned_part import OwnedPart, clip
from lightning_multigpu.placement.table import Layout, Piece, Split, elements, fill, joined_state, part_of_state, placed
from tests.engine.parameter_server.updates import averaged, groups_of, weights

STEPS = 3


def adam(groups: Any) -> Optimizer:
    return optim.AdamW(groups, lr=0.1)


def on_one_device(
    steps: int, state: dict[str, Any] | None = None, *, first: int = 0
) -> tuple[list[nn.Parameter], dict[str, Any]]:
    parameters = weights()
    optimizer = adam(groups_of(parameters))
    if state is not None:
        optimizer.load_state_dict(state)
    for step in range(first, steps):
        for parameter, gradient in zip(parameters, averaged(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return parameters, optimizer.state_dict()


def owner(layout: Layout, number: int) -> tuple[list[nn.Parameter], OwnedPart]:
    parameters = weights()
    part = OwnedPart(adam(groups_of(parameters)))
    for piece in layout.pieces(number):
        parameter = parameters[piece.number]
        value = nn.Parameter(elements(parameter.detach(), piece).clone(), requires_grad=False)
        part.pieces[parameter] = value, piece
    return parameters, part


@torch.no_grad()
def stepped(parameters: list[nn.Parameter], part: OwnedPart, step: int, **options: Any) -> None:
    by_parameter = dict(zip(parameters, averaged(step), strict=True))
    part.read(parameters)
    part.update(
        part.held(), {value: elements(by_parameter[p], piece) for p, (value, piece) in part.pieces.items()}, **options
    )
    for parameter, (value, piece) in part.pieces.items():
        fill(parameter, piece, value.reshape(-1))


@pytest.mark.parametrize("split", ["elements", "tensors", "nothing"])
@pytest.mark.parametrize("num_owners", [1, 2, 5])
def test_owners_update_as_one_device(split: Split, num_owners: int) -> None:
    expected, state = on_one_device(STEPS)
    layout = Layout([parameter.numel() for parameter in expected], num_owners, split)
    parts = []
    for number in range(num_owners):
        parameters, part = owner(layout, number)
        for step in range(STEPS):
            stepped(parameters, part, step)
        for parameter, (_, piece) in part.pieces.items():
            wanted = elements(expected[piece.number].detach(), piece)
            assert torch.equal(elements(parameter.detach(), piece), wanted), "not an element is off by a rounding"
        assert not part.optimizer.state
        assert [len(group["params"]) for group in part.optimizer.param_groups] == [1, 2]
        parts.append(part.numbered_states())
    for number, parameter in enumerate(expected):
        whole = joined_state([states[number] for states in parts if number in states], parameter)
        for name, value in state["state"][number].items():
            assert torch.equal(whole[name], value), name


@pytest.mark.parametrize("num_owners", [1, 3])
def test_states_are_loaded_and_put_in_place(num_owners: int) -> None:
    before, state = on_one_device(1)
    state["param_groups"][0]["lr"] = 0.2
    expected, _ = on_one_device(3, copy.deepcopy(state), first=1)
    layout = Layout([parameter.numel() for parameter in before], num_owners, "elements")
    for number in range(num_owners):
        for loads in (True, False):
            parameters, part = owner(layout, number)
            states = {p: state["state"][index] for index, p in enumerate(parameters)}
            part.load_whole(state["param_groups"], states if loads else {})
            if not loads:
                part.take_states(states)
            for step in (1, 2):
                stepped(parameters, part, step)
            for parameter, (_, piece) in part.pieces.items():
                found = elements(parameter.detach(), piece)
                assert torch.equal(found, elements(expected[piece.number].detach(), piece))
            assert part.optimizer.param_groups[0]["lr"] == 0.2
            part.take_states({parameter: {} for parameter in parameters})
            assert not part.numbered_states()


def test_values_of_one_update_do_not_stay() -> None:
    parameters, part = owner(Layout([parameter.numel() for parameter in weights()], 1, "nothing"), 0)
    called: list[str] = []
    part.optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    part.optimizer.register_step_post_hook(lambda *_: called.append("after"))
    stepped(parameters, part, 0)
    reference, _ = on_one_device(1)
    assert all(torch.equal(a.detach(), b.detach()) for a, b in zip(parameters, reference, strict=True))
    assert not called
    part.optimizer.step()
    assert called == ["before", "after"]
    assert all(value.grad is None for value, _ in part.pieces.values())


@pytest.mark.parametrize(("limits", "expected"), [((1.5, None), [1.5, -1.5]), ((None, 1.0), [0.3, -0.4])])
def test_gradients_are_clipped_by_all_that_is_owned(limits: tuple[Any, Any], expected: list[float]) -> None:
    gradient = torch.tensor([3.0, -4.0], dtype=torch.float64)
    clip([gradient], *limits, lambda squares: 4 * squares)  # of four owners with the same: a norm of 10
    assert gradient.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("place", [lambda t: t, lambda t: t.to(memory_format=torch.channels_last)], ids=["", "last"])
def test_pieces_are_filled_whatever_the_layout_of_the_memory(place: Callable[[Tensor], Tensor]) -> None:
    flat = torch.arange(24.0)
    tensor = place(torch.zeros(2, 3, 2, 2))
    for piece in (Piece(0, 0, 7, 0), Piece(0, 7, 24, 7)):
        fill(tensor, piece, placed(flat, piece, tensor))
        assert torch.equal(elements(tensor, piece), flat[piece.start : piece.stop])
    assert torch.equal(tensor, flat.view(2, 3, 2, 2))
    whole = Piece(0, 0, 24, 0)
    assert placed(flat, whole, tensor).shape == elements(tensor, whole).shape == tensor.shape


def test_a_part_of_a_state_is_a_copy() -> None:
    moment, counter = torch.ones(4), torch.tensor(2.0)
    part = part_of_state({"moment": moment, "step": counter, "kind": "any"}, torch.zeros(4), Piece(0, 1, 3, 0))
    moment.zero_()
    counter.zero_()
    assert (part["moment"].tolist(), float(part["step"]), part["kind"]) == ([1.0, 1.0], 2.0, "any")
