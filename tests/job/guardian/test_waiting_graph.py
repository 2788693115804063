"""Who waits for whom, told from tables of what was read of each rank."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_multigpu.job.guardian.hang.flight_recorder import (
    AWAITED,
    DEVICE,
    ENDED,
    UNDER_WAY,
    Entry,
)
from lightning_multigpu.job.guardian.hang.hang_reports import full_stacks, hang_report
from lightning_multigpu.job.guardian.hang.stacks import Frame, Stacks
from lightning_multigpu.job.guardian.hang.waiting_graph import View, calls, deadlock, lasting, verdict
from lightning_multigpu.job.guardian.protocol import decode, encode

MAIN, RING = 7, 8
SITE = "/venv/lib/python3.11/site-packages/"
IN_STEP = (
    Frame("/home/me/train.py", 42, "training_step"),
    Frame(SITE + "lightning/pytorch/trainer/trainer.py", 1, "fit"),
)
IN_BACKWARD = (
    Frame(SITE + "torch/autograd/graph.py", 9, "_engine_run_backward"),
    Frame(SITE + "lightning/pytorch/strategies/strategy.py", 213, "backward"),
    Frame(SITE + "lightning/pytorch/trainer/trainer.py", 1, "fit"),
)


def entry(name: str, *, state: int = AWAITED, begun: int | None = None, thread: int = RING, ranks: str = "") -> Entry:
    """ "data all_reduce 118" as a row of a page."""
    group, operation, number = name.split()
    return Entry(group, ranks, state, begun or int(number), int(number), operation, 63.0, thread, "")


def own_call(operation: str, line: int) -> tuple[Frame, ...]:
    return (
        Frame(SITE + "torch/distributed/distributed_c10d.py", 3252, operation),
        Frame(SITE + "torch/distributed/c10d_logger.py", 83, "wrapper"),
        Frame("/home/me/train.py", line, "training_step"),
        Frame(SITE + "lightning/pytorch/trainer/trainer.py", 1, "fit"),
    )


def view(rank: int, *entries: Entry, main: tuple[Frame, ...] = IN_STEP, **fields: Any) -> View:
    return View(rank, "node1", 4242 + rank, 117, entries, Stacks("dump", main), main_thread=MAIN, **fields)


WAITS = entry("data all_reduce 118")
BEHIND = entry("data all_reduce 117", state=ENDED)


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        pytest.param([view(0, BEHIND), view(1, BEHIND)], [], id="nobody waits"),
        pytest.param(
            [view(0, WAITS, main=IN_BACKWARD), view(1, BEHIND), view(2, WAITS, main=IN_BACKWARD)],
            [
                "Ranks 0 and 2 wait in all_reduce #118 of group data for 63 s; "
                "rank 1 has not come: it is at me/train.py:42 in training_step"
            ],
            id="one has not come",
        ),
        pytest.param(
            [view(0, entry("world barrier 9", thread=MAIN)), view(1)],
            [
                "Rank 0 waits in barrier #9 of group world (me/train.py:42 in training_step) for 63 s; "
                "rank 1 has not come: it is at me/train.py:42 in training_step"
            ],
            id="the main thread's place, and a rank without a row of the group",
        ),
        pytest.param(
            [view(0, entry("data all_reduce 118", thread=DEVICE)), view(1, BEHIND, main=IN_BACKWARD)],
            [
                "Rank 0 waits in all_reduce #118 of group data (me/train.py:42 in training_step) for 63 s; "
                "rank 1 has not come: it is at lightning/pytorch/strategies/strategy.py:213 in backward"
            ],
            id="the main thread spins in .item() while the device waits",
        ),
        pytest.param(
            [view(0, entry("world all_reduce 7")), *(view(rank, entry("world broadcast 7")) for rank in (1, 2))],
            [
                "Rank 0 waits in all_reduce #7 of group world; "
                "ranks 1 and 2 wait in broadcast #7 of group world for 63 s"
            ],
            id="different collectives under one number",
        ),
        pytest.param(
            [view(0, entry("metrics all_gather 5", thread=MAIN)), view(1, WAITS, main=IN_BACKWARD)],
            [
                "Rank 0 waits in all_gather #5 of group metrics (me/train.py:42 in training_step) for 63 s; "
                "rank 1 has not come: it is in another collective, all_reduce #118 of group data",
                "Rank 1 waits in all_reduce #118 of group data for 63 s; rank 0 has not come: it is in another "
                "collective, all_gather #5 of group metrics (me/train.py:42 in training_step)",
            ],
            id="a collective that only some call, the others are in the gradients",
        ),
        pytest.param(
            [view(0, main=own_call("all_reduce", 10)), view(1, WAITS, main=IN_BACKWARD)],
            [
                "Rank 1 waits in all_reduce #118 of group data for 63 s; rank 0 has not come: it is in another "
                "collective, all_reduce, called at me/train.py:10 in training_step",
                "Rank 0 waits in all_reduce, called at me/train.py:10 in training_step; "
                "rank 1 has not come: it is in another collective, all_reduce #118 of group data",
            ],
            id="a user's own collective on one rank only",
        ),
        pytest.param(
            [view(0, WAITS), view(1, WAITS)],
            [
                "Ranks 0 and 1 wait in all_reduce #118 of group data for 63 s; "
                "all ranks of the group have come: their messages are slow or lost"
            ],
            id="all have come",
        ),
        pytest.param(
            [view(0, WAITS), view(1, entry("data all_reduce 119", state=ENDED))],
            [
                "Rank 0 waits in all_reduce #118 of group data for 63 s; "
                "rank 1 has come and gone on: it is at me/train.py:42 in training_step"
            ],
            id="one has gone on",
        ),
        pytest.param(
            [view(0, entry("control all_gather 4")), view(1, entry("control all_gather 4", state=UNDER_WAY))],
            [
                "Rank 0 waits in all_gather #4 of group control for 63 s; "
                "rank 1 has come, and does not wait: it is at me/train.py:42 in training_step"
            ],
            id="one has come and does something else",
        ),
        pytest.param(
            [view(0, WAITS), view(1, BEHIND, gone="it has finished")],
            ["Rank 0 waits in all_reduce #118 of group data for 63 s; rank 1 has not come: it has finished"],
            id="one has finished",
        ),
        pytest.param(
            [view(0, WAITS), view(1, BEHIND, main=())],
            ["Rank 0 waits in all_reduce #118 of group data for 63 s; rank 1 has not come: dump"],
            id="one shows no stack, but says why",
        ),
        pytest.param(
            [view(0, entry("data all_reduce 5", ranks="0-2:2")), view(1, entry("data all_reduce 5", ranks="1-3:2")),
             view(3, entry("data all_reduce 5", ranks="1-3:2"))],
            [
                "Rank 0 waits in all_reduce #5 of group data for 63 s; nothing is known of rank 2",
                "Ranks 1 and 3 wait in all_reduce #5 of group data for 63 s; "
                "all ranks of the group have come: their messages are slow or lost",
            ],
            id="groups of one name, with members of their own",
        ),
        pytest.param(
            [view(0, entry("data all_reduce 8", begun=9)), view(1, entry("data all_reduce 7"))],
            [
                "Rank 1 waits in all_reduce #7 of group data for 63 s; rank 0 has come and gone on: it is in another "
                "collective, all_reduce #8 of group data",
                "Rank 0 waits in all_reduce #8 of group data for 63 s; rank 1 has not come: it is in another "
                "collective, all_reduce #7 of group data",
            ],
            id="different numbers of one group",
        ),
    ],
)  # fmt: skip
def test_verdict(views: list[View], expected: list[str]) -> None:
    assert verdict(views) == expected
    assert verdict(reversed(views)) == expected, "the order in which hosts answer means nothing"


SIGTERM_NEWS = (
    *own_call("broadcast", 1)[:2],
    Frame(SITE + "lightning/pytorch/loops/training_epoch_loop.py", 265, "_broadcast_sigterm_tensor"),
    IN_STEP[1],
)
NEWS_PLACE = "lightning/pytorch/loops/training_epoch_loop.py:265 in _broadcast_sigterm_tensor"


def in_world(number: int = 9, **fields: Any) -> Entry:
    return entry(f"world barrier {number}", thread=MAIN, **fields)


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        pytest.param(
            [view(0, WAITS, in_world(8, state=ENDED), main=IN_BACKWARD), view(1, BEHIND, in_world())],
            "rank 0 in all_reduce #118 of group data (lightning/pytorch/strategies/strategy.py:213 in backward); "
            "rank 1 in barrier #9 of group world (me/train.py:42 in training_step)",
            id="each has not come to the other's",
        ),
        pytest.param(
            [view(0, entry("world all_reduce 7")), *(view(rank, entry("world broadcast 7")) for rank in (1, 2))],
            "rank 0 in all_reduce #7 of group world (me/train.py:42 in training_step); "
            "ranks 1 and 2 in broadcast #7 of group world (me/train.py:42 in training_step)",
            id="different collectives under one number",
        ),
        pytest.param(
            [view(0, in_world()), *(view(rank, in_world(8, state=ENDED), main=SIGTERM_NEWS) for rank in (1, 2))],
            f"rank 0 in barrier #9 of group world (me/train.py:42 in training_step); "
            f"ranks 1 and 2 in broadcast, called at {NEWS_PLACE}",
            id="a collective of all ranks that only stacks show",
        ),
        pytest.param(
            [view(0, in_world()), *(view(rank, main=own_call("all_gather", 7)) for rank in (1, 2))],
            "",
            id="the ranks of the user's own collective may be all of its group",
        ),
        pytest.param(
            [view(0, BEHIND, main=own_call("all_gather", 7)), view(1, WAITS, main=IN_BACKWARD)],
            "rank 0 in all_gather, called at me/train.py:7 in training_step; rank 1 in all_reduce #118 of group data "
            "(lightning/pytorch/strategies/strategy.py:213 in backward)",
            id="the user's own on one rank",
        ),
        pytest.param([view(0, WAITS), view(1, BEHIND)], "", id="one works, and may come"),
        pytest.param(
            [view(0, entry("a barrier 2", ranks="0,1")), view(1, entry("b barrier 2", ranks="1,2")), view(2)],
            "",
            id="a chain that ends at a rank that works",
        ),
        pytest.param(
            [
                view(0, WAITS, in_world(8, state=ENDED)),
                view(1, entry("data all_reduce 117", state=UNDER_WAY), in_world()),
            ],
            "",
            id="a thread is still at an earlier collective of the group",
        ),
        pytest.param(
            [view(0, entry("pipeline all_gather 118")), view(1, in_world())], "", id="a group that counts messages too"
        ),
    ],
)  # fmt: skip
def test_deadlock(views: list[View], expected: str) -> None:
    assert deadlock(views, lasting=range(3), at_least_s=5) == expected
    assert deadlock(views, lasting=(), at_least_s=70) == "", "it may have changed while other ranks were looked at"


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({}, {}, {0}),
        ({}, {"cpu_ticks": 11}, set()),
        ({"cpu_ticks": -1}, {}, set()),
        ({"main": own_call("barrier", 8)}, {}, set()),
        ({"main": IN_STEP}, {}, set()),
        ({"step": 116}, {}, set()),
        ({"entries": (BEHIND,)}, {"entries": (WAITS,)}, set()),
        ({"gone": "it has finished"}, {}, set()),
    ],
)
def test_a_call_that_lasts(before: dict[str, Any], now: dict[str, Any], found: set[int]) -> None:
    """Two looks show the same call, the page has not changed, and the thread has used no processor."""

    def seen(fields: dict[str, Any]) -> View:
        fields = dict(fields)
        return view(0, main=fields.pop("main", own_call("barrier", 7)))._replace(**fields)

    assert lasting([seen(before)], [seen(now)]) == found
    assert lasting([], [seen(now)]) == set()


def test_the_noted_collective_of_the_main_thread_is_not_counted_twice() -> None:
    """torch's own frame is at the end of its stack as well."""
    noted = entry("world all_reduce 7", thread=MAIN)
    assert [call.number for call in calls(view(0, noted, main=own_call("all_reduce", 3)))] == [7]
    on_device = entry("world all_reduce 7", thread=DEVICE)
    assert [call.number for call in calls(view(0, on_device, main=own_call("all_reduce", 3)))] == [7]
    ring = entry("data all_reduce 7", thread=RING)
    assert [call.number for call in calls(view(0, ring, main=own_call("all_reduce", 3)))] == [7, 0]


def test_report_shows_first_who_does_not_wait() -> None:
    views = [view(0, WAITS, main=IN_BACKWARD), view(1, BEHIND), view(2, gone="it has finished", main=())]
    text = hang_report(views, waited_s=63.4, limit_s=60, file="/runs/hang-node1.txt")
    lines = text.splitlines()
    assert lines[0] == "No progress for 63 s (hang_report_s=60). The run goes on; this is only a report."
    assert lines[1].startswith("  Rank 0 waits in all_reduce #118 of group data for 63 s; rank 1 has not come:")
    at = [text.index(f"Rank {rank} (host node1, pid {4242 + rank}, last completed step 117)") for rank in range(3)]
    assert at[1] < at[2] < at[0]
    assert "    me/train.py:42 in training_step" in lines
    assert lines[-1].endswith("/runs/hang-node1.txt")


def test_many_ranks_and_deep_stacks_are_cut_on_the_terminal_and_whole_in_the_file() -> None:
    deep = tuple(Frame(f"{SITE}torch/nn/modules/module.py", line, "_call_impl") for line in range(50))
    views = [view(rank, WAITS, main=(*deep, *IN_STEP)) for rank in range(40)]
    text = hang_report(views, waited_s=63, limit_s=60, file=None)
    assert "24 more ranks are not shown" in text
    assert len(text.splitlines()) < 16 * 10 + 30
    assert "training_step" in text, "the user's own line is never cut"
    assert full_stacks(views).count("--- rank ") == 40


def test_a_view_travels_between_hosts() -> None:
    deep = tuple(Frame("\0" * 200, line, "\0" * 50) for line in range(500))
    sent = view(3, *[entry(f"group{i} all_reduce 5", ranks="0-62:2") for i in range(15)], main=deep)
    sent = sent._replace(stacks=Stacks("\0" * 100_000, deep))
    received = View.from_message(decode(encode("view", view=sent.to_message()))["view"])
    assert received._replace(stacks=sent.stacks) == sent
    assert received.stacks.main == deep[: len(received.stacks.main)]
    assert len(received.stacks.main) >= 20
    assert isinstance(received.stacks.main[0], Frame)
