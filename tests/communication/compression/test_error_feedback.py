"""Errors are kept by parameter, also by a part of one; test_all_reduce has tensors that change."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_multigpu.communication.compression import GradientPiece
from lightning_multigpu.communication.compression.error_feedback import ErrorFeedback
from tests.communication.shared import errors_of

A, B, C = GradientPiece("a", (2, 2)), GradientPiece("b", (3,)), GradientPiece("c", (5,))


def leave(feedback: ErrorFeedback, *pieces: GradientPiece, errors: list[float]) -> Tensor:
    """A tensor passes and leaves errors; returns those that were to be added to it."""
    before, after = feedback.begin(pieces)
    found = before.clone()
    after.copy_(torch.tensor(errors))
    return found


def test_a_step_that_is_not_accepted_leaves_everything_as_it_was() -> None:
    feedback = ErrorFeedback()
    leave(feedback, A, errors=[1, 2, 3, 4])
    leave(feedback, B, errors=[5, 6, 7])
    feedback.end_step(accept=True)
    leave(feedback, A, errors=[float("nan")] * 4)
    feedback.end_step(accept=False)
    assert errors_of(feedback, (A, B)).tolist() == [1, 2, 3, 4, 5, 6, 7]
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


def test_errors_follow_parts_of_parameters() -> None:
    feedback = ErrorFeedback()
    leave(feedback, GradientPiece("c", (5,), 0, 3), errors=[1, 2, 3])
    leave(feedback, GradientPiece("c", (5,), 3, 5), B, errors=[4, 5, 6, 7, 8])
    feedback.end_step(accept=True)
    assert leave(feedback, GradientPiece("c", (5,), 0, 3), errors=[1, 2, 3]).tolist() == [1, 2, 3]
    assert leave(feedback, GradientPiece("c", (5,), 3, 5), B, errors=[4, 5, 6, 7, 8]).tolist() == [4, 5, 6, 7, 8]
    feedback.end_step(accept=True)
    assert errors_of(feedback, (C,)).tolist() == [1, 2, 3, 4, 5]
    assert leave(feedback, GradientPiece("c", (5,), 1, 4), errors=[0, 0, 0]).tolist() == [2, 3, 4]
    assert errors_of(feedback, (C,)).tolist() == [1, 2, 3, 4, 5]
    assert leave(feedback, C, errors=[0] * 5)[:1].tolist() == [1]


def test_scaling_reaches_errors_wherever_they_are() -> None:
    feedback = ErrorFeedback()
    leave(feedback, A, B, errors=[1] * 7)
    feedback.end_step(accept=True)
    leave(feedback, A, errors=[1] * 4)  # those of B belong to no tensor now
    feedback.end_step(accept=True)
    feedback.scale(0.5)
    assert errors_of(feedback, (A, B)).tolist() == [0.5] * 7
