"""The note that a failed rank leaves, and what others make of it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_multigpu.communication.failure_board import FailureBoard, RankFailedError, RankFailure
from tests.world import World, init_group, rank


class PickyError(Exception):
    """Cannot be pickled: its constructor wants more than pickle passes."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} {number}")


def raised(error: Exception) -> RankFailure:
    try:
        raise error
    except Exception as caught:
        return RankFailure.of(caught, rank=3, step=7)


def test_the_same_exception_is_raised_elsewhere() -> None:
    failure = raised(KeyError("weights"))
    again = failure.exception()
    assert isinstance(again, KeyError)
    assert again.args == ("weights",)
    (note,) = again.__notes__
    assert "rank 3" in note
    assert "last completed step 7" in note
    assert "in raised" in note, "the traceback of the failed rank"


def test_an_exception_that_cannot_travel_is_named() -> None:
    again = raised(PickyError("spoilt", 4)).exception()
    assert isinstance(again, RankFailedError)
    assert "PickyError: spoilt 4" in str(again)


def test_a_failure_that_is_no_ranks() -> None:
    failure = RankFailure(None, "node7", None, None, "its link is cut", "", None)
    assert failure.describe() == "the job (host node7) failed: its link is cut"


def first_word() -> tuple[bool, str, str, int]:
    init_group()
    board = FailureBoard.open("127.0.0.1", None)
    watcher = board.watcher()
    empty = watcher.first() is None
    mine = RankFailure.of(ValueError(f"on {rank()}"), rank=rank(), step=None)
    stands = board.report(mine)
    seen = watcher.first()
    board.acknowledge()
    dist.barrier()
    assert seen is not None
    answer = empty, stands.what, seen.what, board.acknowledged()
    dist.barrier()  # rank 0 keeps the board until everybody has read it
    return answer


def test_the_first_failure_stands(world2: World) -> None:
    results = world2.run(first_word)
    assert {stands for _, stands, _, _ in results} in ({"raised ValueError: on 0"}, {"raised ValueError: on 1"})
    assert all(stands == seen and count == 2 for _, stands, seen, count in results)
    assert any(empty for empty, *_ in results)


@pytest.mark.parametrize(("step", "told"), [(None, ""), (0, ", no step completed"), (5, ", last completed step 5")])
def test_the_last_step_is_told_where_it_is_known(step: int | None, told: str) -> None:
    text = RankFailure(1, "here", 42, step, "was ended by SIGKILL", "").describe()
    assert text == f"rank 1 (host here, pid 42{told}) was ended by SIGKILL"
