"""Errors are kept by the key of a tensor; test_all_reduce has tensors that change."""

from lightning_multigpu.communication.compression.all_reduce import ErrorFeedback


def leave(feedback: ErrorFeedback, key: str, *errors: float) -> list[float]:
    """A tensor passes and leaves errors; returns those that were to be added to it."""
    before, after = feedback.begin(key, len(errors))
    found = before.tolist()
    for number, error in enumerate(errors):
        after[number] = error
    return found


def test_errors_come_back_in_the_next_step_scaled() -> None:
    feedback = ErrorFeedback()
    assert leave(feedback, "a", 1, 2) == [0, 0]
    assert leave(feedback, "a", 0, 9) == [1, 2], "the second time within a step"
    leave(feedback, "b", 5)
    feedback.end_step(accept=True)
    feedback.scale(0.5)
    assert (leave(feedback, "a", 0, 0), leave(feedback, "b", 0)) == ([0, 4.5], [2.5])


def test_a_tensor_that_does_not_come_or_has_another_size_begins_anew() -> None:
    """Buckets that torch makes anew; those of before would stay in memory."""
    feedback = ErrorFeedback()
    leave(feedback, "a", 1, 2)
    feedback.end_step(accept=True)
    assert leave(feedback, "a", 1) == [0]
    feedback.end_step(accept=True)
    feedback.end_step(accept=True)
    assert leave(feedback, "a", 1) == [0]
