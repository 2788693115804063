"""Errors are kept by parameter, whatever tensors the parameters come in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_multigpu.communication.compression import GradientPiece
from lightning_multigpu.communication.compression.error_feedback import ErrorFeedback

A, B, C = GradientPiece("a", (2, 2)), GradientPiece("b", (3,)), GradientPiece("c", (5,))


def leave(feedback: ErrorFeedback, *pieces: GradientPiece, errors: list[float]) -> Tensor:
    """A tensor passes and leaves errors; returns those that were to be added to it."""
    before, after = feedback.begin(pieces)
    found = before.clone()
    after.copy_(torch.tensor(errors))
    return found


def test_errors_of_a_step_come_back_in_the_next() -> None:
    feedback = ErrorFeedback()
    assert not leave(feedback, A, errors=[1, 2, 3, 4]).any()
    feedback.end_step(accept=True)
    assert leave(feedback, A, errors=[5, 6, 7, 8]).tolist() == [1, 2, 3, 4]
    feedback.end_step(accept=True)
    assert leave(feedback, A, errors=[0, 0, 0, 0]).tolist() == [5, 6, 7, 8]


def test_a_step_that_is_not_accepted_leaves_everything_as_it_was() -> None:
    feedback = ErrorFeedback()
    leave(feedback, A, errors=[1, 2, 3, 4])
    leave(feedback, B, errors=[5, 6, 7])
    feedback.end_step(accept=True)
    before = feedback.state()
    leave(feedback, A, errors=[float("nan")] * 4)
    feedback.end_step(accept=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in feedback.state().items())
    assert leave(feedback, A, errors=[0, 0, 0, 0]).tolist() == [1, 2, 3, 4]
    assert leave(feedback, B, errors=[0, 0, 0]).tolist() == [5, 6, 7]


def test_a_tensor_that_does_not_come_keeps_its_errors() -> None:
    feedback = ErrorFeedback()
    leave(feedback, A, errors=[1, 2, 3, 4])
    feedback.end_step(accept=True)
    feedback.end_step(accept=True)
    assert leave(feedback, A, errors=[0, 0, 0, 0]).tolist() == [1, 2, 3, 4]


def test_a_tensor_that_comes_twice_within_a_step_adds_its_errors_once() -> None:
    feedback = ErrorFeedback()
    leave(feedback, A, errors=[1, 2, 3, 4])
    assert leave(feedback, A, errors=[0, 0, 0, 9]).tolist() == [1, 2, 3, 4]
    feedback.end_step(accept=True)
    assert leave(feedback, A, errors=[0, 0, 0, 0]).tolist() == [0, 0, 0, 9]


def test_errors_follow_their_parameters_into_other_tensors() -> None:
    feedback = ErrorFeedback()
    leave(feedback, A, B, errors=[1, 2, 3, 4, 5, 6, 7])
    leave(feedback, C, errors=[8, 9, 10, 11, 12])
    feedback.end_step(accept=True)
    before = feedback.state()
    assert leave(feedback, C, A, errors=[0] * 9).tolist() == [8, 9, 10, 11, 12, 1, 2, 3, 4]
    assert all(torch.equal(before[name], tensor) for name, tensor in feedback.state().items())
    assert leave(feedback, B, errors=[0] * 3).tolist() == [5, 6, 7]


def test_errors_follow_parts_of_parameters() -> None:
    feedback = ErrorFeedback()
    leave(feedback, GradientPiece("c", (5,), 0, 3), errors=[1, 2, 3])
    leave(feedback, GradientPiece("c", (5,), 3, 5), B, errors=[4, 5, 6, 7, 8])
    feedback.end_step(accept=True)
    assert leave(feedback, GradientPiece("c", (5,), 0, 3), errors=[1, 2, 3]).tolist() == [1, 2, 3]
    assert leave(feedback, GradientPiece("c", (5,), 3, 5), B, errors=[4, 5, 6, 7, 8]).tolist() == [4, 5, 6, 7, 8]
    feedback.end_step(accept=True)
    assert feedback.state()["c"].tolist() == [1, 2, 3, 4, 5]
    assert leave(feedback, GradientPiece("c", (5,), 1, 4), errors=[0, 0, 0]).tolist() == [2, 3, 4]
    assert feedback.state()["c"].tolist() == [1, 2, 3, 4, 5]
    assert leave(feedback, C, errors=[0] * 5)[:1].tolist() == [1]


def test_state_is_by_name_in_the_parameters_shapes() -> None:
    feedback = ErrorFeedback()
    leave(feedback, B, A, errors=[5, 6, 7, 1, 2, 3, 4])
    assert not any(tensor.any() for tensor in feedback.state().values()), "the step has not ended"
    feedback.end_step(accept=True)
    state = feedback.state()
    assert {name: tensor.tolist() for name, tensor in state.items()} == {"a": [[1, 2], [3, 4]], "b": [5, 6, 7]}
    assert list(state) == ["a", "b"]


def test_a_loaded_state_is_a_copy_and_takes_the_place_of_what_was_there() -> None:
    feedback = ErrorFeedback()
    leave(feedback, A, B, errors=[1] * 7)
    feedback.end_step(accept=True)
    state = {"c": torch.arange(5, dtype=torch.float64), "a": torch.full((2, 2), 2.0)}
    feedback.load(state)
    state["a"].zero_()
    assert feedback.state()["c"].dtype == torch.float32
    assert leave(feedback, B, C, A, errors=[0] * 12).tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 2, 2, 2, 2]


def test_scaling_reaches_errors_wherever_they_are() -> None:
    feedback = ErrorFeedback()
    feedback.load({"a": torch.ones(2, 2), "b": torch.ones(3)})
    leave(feedback, A, errors=[1] * 4)
    feedback.end_step(accept=True)
    feedback.scale(0.5)
    assert {name: tensor.unique().tolist() for name, tensor in feedback.state().items()} == {"a": [0.5], "b": [0.5]}


def test_another_models_state_is_named() -> None:
    feedback = ErrorFeedback()
    feedback.load({"a": torch.ones(4, 4)})
    with pytest.raises(ValueError, match=r"'a' has shape \(4, 4\), the parameter has \(2, 2\)"):
        feedback.begin((A,))
