"""Who has not come to which collective, and who is in different ones, from tables of what was seen of each rank."""

from typing import Any

import pytest

from lightning_multigpu.job.guardian.hang.flight_recorder import AWAITED, ENDED, UNDER_WAY, Entry
from lightning_multigpu.job.guardian.hang.hang_watch import HangWatch, View, hang_report, mismatch
from lightning_multigpu.job.guardian.protocol import decode, encode


def entry(name: str, state: int = AWAITED, *, begun: int | None = None, ranks: str = "") -> Entry:
    """ "data all_reduce 118" as a row of a page."""
    group, operation, number = name.split()
    return Entry(state, begun or int(number), int(number), 63.0, operation, group, ranks)


def view(rank: int, *entries: Entry, **fields: Any) -> View:
    return View(rank, "node1", 42 + rank, 117, **{"place": f"train.py:{rank} in step", **fields}, entries=entries)


WAITS = entry("data all_reduce 118")
BEHIND = entry("data all_reduce 117", ENDED)
IN_WORLD, BEHIND_IN_WORLD = entry("world barrier 9"), entry("world barrier 8", ENDED)


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        pytest.param([view(0, BEHIND), view(1, BEHIND)], [], id="nobody waits"),
        pytest.param(
            [view(0, WAITS), view(1, BEHIND), view(2, WAITS)],
            ["Rank 1 never came to all_reduce #118 of group data."],
            id="one has not come",
        ),
        pytest.param([view(0, IN_WORLD), view(1)], ["Rank 1 never came to barrier #9 of group world."], id="no row"),
        pytest.param(
            [view(0, own="all_reduce"), view(1)], ["Rank 1 never came to all_reduce."], id="the user's own"
        ),
        pytest.param([*(view(rank, own="all_gather") for rank in (0, 1)), view(2)], [], id="own, of a group"),
        pytest.param([view(0, WAITS), view(1, entry("data all_reduce 119", ENDED))], [], id="one has gone on"),
        pytest.param(
            [view(0, entry("pipeline recv 3")), view(1, entry("pipeline recv 2", ENDED))],
            [],
            id="messages to one rank count too",
        ),
        pytest.param(
            [view(0, entry("data all_reduce 5", ranks="0-2:2")), view(1, entry("data all_reduce 5", ranks="1-3:2")),
             view(3, entry("data all_reduce 4", ENDED, ranks="1-3:2"))],
            ["Rank 3 never came to all_reduce #5 of group data."],
            id="groups of one name",
        ),
        pytest.param(
            [view(0, IN_WORLD, entry("data all_reduce 7")), view(1, BEHIND_IN_WORLD)],
            ["Rank 1 never came to barrier #9 of group world.", "Rank 1 never came to all_reduce #7 of group data."],
            id="two threads wait",
        ),
    ],
)  # fmt: skip
def test_ranks_that_never_came(views: list[View], expected: list[str]) -> None:
    by_rank = {view.rank: view for view in views}
    assert mismatch(by_rank) == []
    lines = [line.strip() for line in hang_report(by_rank, waited_s=63, limit_s=60).splitlines()]
    assert lines[0] == "No progress for 63 s (hang_report_s=60). The run goes on; this is only a report."
    assert lines[1 : lines.index(next(line for line in lines if line.startswith("rank  host")))] == expected


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        pytest.param(
            [view(0, WAITS, BEHIND_IN_WORLD), view(1, BEHIND, IN_WORLD), view(2, WAITS, BEHIND_IN_WORLD)],
            [(0, "all_reduce #118 of group data"), (1, "barrier #9 of group world")],
            id="each has not come to the other's",
        ),
        pytest.param(
            [view(0, entry("world all_reduce 7")), *(view(rank, entry("world broadcast 7")) for rank in (1, 2))],
            [(0, "all_reduce #7 of group world"), (1, "broadcast #7 of group world")],
            id="different operations under one number",
        ),
        pytest.param(
            [view(0, entry("data all_reduce 8", begun=9)), view(1, entry("data broadcast 8"))],
            [],
            id="which operation is the older one is not known",
        ),
        pytest.param(
            [view(0, BEHIND, own="all_gather"), view(1, WAITS)],
            [(0, "all_gather"), (1, "all_reduce #118 of group data")],
            id="the user's own on one rank",
        ),
        pytest.param(
            [view(0, IN_WORLD), *(view(rank, own="all_gather") for rank in (1, 2))],
            [],
            id="the ranks of the user's own may be all of its group",
        ),
        pytest.param(
            [view(0, own="recv"), view(1, own="send"), view(2)],
            [],
            id="the user's own messages: a slow third rank ended the run",
        ),
        pytest.param([view(0, WAITS), view(1, BEHIND)], [], id="one works, and may come"),
        pytest.param(
            [view(0, entry("a barrier 2", ranks="0,1")), view(1, entry("b barrier 2", ranks="1,2")), view(2)],
            [],
            id="a chain that ends at a rank that works",
        ),
        pytest.param(
            [view(0, WAITS, BEHIND_IN_WORLD), view(1, entry("data all_reduce 117", UNDER_WAY), IN_WORLD)],
            [],
            id="a thread is still at an earlier collective of the group",
        ),
        pytest.param(
            [view(0, entry("pipeline all_gather 118")), view(1, IN_WORLD)], [], id="a group that counts messages too"
        ),
    ],
)
def test_ranks_in_different_collectives(views: list[View], expected: list[tuple[int, str]]) -> None:
    assert mismatch({view.rank: view for view in views}) == expected


def test_the_table_shows_first_who_does_not_wait() -> None:
    views = [view(0, WAITS), view(1, BEHIND, place=""), view(2)]
    lines = hang_report({view.rank: view for view in views}, waited_s=63.4, limit_s=60).splitlines()
    assert [line.split()[:5] for line in lines[2:]] == [
        ["rank", "host", "pid", "step", "waits"],
        ["1", "node1", "43", "117", "-"],
        ["2", "node1", "44", "117", "-"],
        ["0", "node1", "42", "117", "all_reduce"],
    ]
    assert lines[3].endswith("does not answer: it is stopped, or in C code that holds Python's lock")
    assert lines[5].endswith("all_reduce #118 of group data for 63 s  train.py:0 in step")


def test_a_view_travels_between_hosts() -> None:
    sent = view(3, *[entry(f"{'g' * 20}{i} all_reduce 5", ranks="0-62:2") for i in range(28)], place="\0" * 160)
    watch: Any = HangWatch(None, None, None, None)  # type: ignore[arg-type]
    watch.receive("host", decode(encode("views", views=[sent] * 24, quiet=[(3, 1.0)])), 5.0)
    assert watch._of_others["host"] == ({3: 4.0}, {3: sent})
