"""Checks on GPUs are those of ``python -m benchmarks.gpu``: ``pytest -m gpu`` runs them where there is a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import sharing
from benchmarks.gpu.card import Card
from benchmarks.gpu.table import Check, NotPossibleError, Place, run_table, summary
from tests.world import init_group, rank

CPU = Card("cpu", 1, "gloo")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    card, _ = sharing.tried(Card.found("cuda"))
    made = Place(card)
    yield made
    made.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("check", program.all_checks(), ids=lambda check: check.name)
def test_on_a_gpu(check: Check, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in place.card.variables.items():
        monkeypatch.setenv(name, value)
    try:
        with place.of(check):
            check.function(place)
    except NotPossibleError as error:
        pytest.skip(str(error))


def _rank_alone() -> int:
    return rank()


def _one_rank_never_comes() -> None:
    init_group()
    if rank() == 0:
        dist.barrier()
    else:
        time.sleep(60)


def _fails() -> None:
    raise ValueError("a reason\nand more")


def _cannot(place: Place) -> str:
    raise NotPossibleError("too few of them")


def _on_ranks(function: object, place: Place) -> str:
    return str(place.run(2, function))  # type: ignore[arg-type]


def test_a_check_that_hangs_or_fails_leaves_the_others_alone() -> None:
    lines: list[str] = []
    functions = {"holds": _rank_alone, "hangs": _one_rank_never_comes, "fails": _fails, "holds again": _rank_alone}
    checks = [
        Check(
            row="machine",
            column=column,
            function=partial(_on_ranks, function),
            ranks=2,
            deadline_s=2.0 if column == "hangs" else 60.0,
        )
        for column, function in functions.items()
    ]
    checks.append(Check(row="machine", column="cannot", function=_cannot))
    checks.append(Check(row="other", column="needs", function=_cannot, needs="CPUs have none"))
    results = run_table(checks, CPU, lanes=1, say=lines.append)
    assert [result.verdict for result in results] == ["held", "failed", "failed", "held", *["not possible"] * 2]
    assert [result.text for result in results[2:]] == ["ValueError: a reason", "[0, 1]", "too few of them",
                                                       "CPUs have none"]  # fmt: skip
    assert results[1].text.startswith("hangs: rank(s) ")
    text = summary(results, checks)
    assert "2 held, 2 failed, 2 not possible, 0 not run" in text
    assert len(lines) == len(checks)
    assert "_one_rank_never_comes" in lines[1], "the stacks of ranks that hang"


def test_checks_that_time_kernels_run_alone() -> None:
    running: set[str] = set()
    beside: dict[str, int] = {}

    def look(column: str, place: Place) -> str:
        running.add(column)
        time.sleep(0.1)
        beside[column] = len(running)
        time.sleep(0.1)
        running.discard(column)
        return ""

    columns = [f"{index}" for index in range(6)]
    checks = [Check(row="machine", column=c, function=partial(look, c), alone=c in ("2", "3")) for c in columns]
    assert {result.verdict for result in run_table(checks, CPU, lanes=3, say=lambda line: None)} == {"held"}
    assert beside["2"] == beside["3"] == 1
    assert max(beside.values()) > 1


def test_no_check_begins_when_the_time_is_over() -> None:
    check = Check(row="machine", column="late", function=_cannot)
    (result,) = run_table([check], CPU, lanes=1, limit_s=-1.0, say=lambda line: None)
    assert (result.verdict, result.text) == ("not run", "the time was over (-1 s)")


def test_the_program_on_cpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line of the program runs on CPUs too; this is one row of two checks, and its file."""
    for name, value in CPU.variables.items():
        monkeypatch.setenv(name, value)
    chosen = ("as one process", "busy streams, offloaded optimizer")
    checks = [check for check in program.all_checks() if check.row == "ddp_sharded" and check.column in chosen]
    monkeypatch.setattr(program, "all_checks", lambda: checks)
    assert program.main(["--device", "cpu", "--no-figures", "--results", str(tmp_path / "gpu.txt")]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "gpu.txt").read_text() == printed
    assert "1 held, 0 failed, 1 not possible, 0 not run" in printed
    assert program.main(["--device", "cpu", "--only", "nothing"]) == 2
    assert "the rows are ddp_sharded" in capsys.readouterr().err


def test_every_strategy_has_a_row() -> None:
    from lightning_multigpu.registry import STRATEGIES

    assert {row.name for row in STRATEGIES} <= {check.row for check in program.all_checks()}
    names = [check.name for check in program.all_checks()]
    assert len(names) == len(set(names))


def test_ranks_share_a_card_where_there_are_too_few() -> None:
    one, four = Card("cuda", 1, "gloo"), Card("cuda", 4, "nccl")
    assert one.devices(2) == [torch.device("cuda", 0)] * 2
    assert (one.backend_of(1), one.backend_of(2), four.backend_of(4)) == ("nccl", "gloo", "nccl")
    assert four.devices(2) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert [one.slowness(2), four.slowness(4), Card("cuda", 1, "nccl").slowness(4), CPU.slowness(4)] == [1, 1, 4, 1]


def test_a_card_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=r"torch finds no GPU on this machine; pass --device=cpu"):
        Card.found("cuda")


def test_nccl_that_refuses_to_share_a_card_leaves_gloo() -> None:
    """Whatever the reason: here there is no card at all."""
    if torch.cuda.is_available():
        pytest.skip("there is one")
    claimed = Card("cuda", 1, "nccl")
    card, refusal = sharing.tried(claimed)
    assert (card.backend, card.backend_of(2)) == ("gloo", "gloo")
    assert "Error: " in refusal
    for other in (Card("cuda", 4, "nccl"), Card("cuda", 1, "gloo"), CPU):
        assert sharing.tried(other) == (other, "")
