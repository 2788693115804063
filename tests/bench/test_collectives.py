"""``bench collectives`` as a user runs it, on real ranks; what it writes; what becomes of faulty back ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_multigpu.bench.collectives import implementations, support
from lightning_multigpu.bench.collectives.collective_run import CollectivePlan, CollectiveResult
from lightning_multigpu.bench.collectives.collective_table import CollectivesTable
from lightning_multigpu.bench.collectives.operations import BY_NAME, OPERATIONS
from lightning_multigpu.cli import main
from lightning_multigpu.report.statistics import Spread
from tests.bench.planted import FAULTY, FORGETFUL, LIAR

QUICK = ("--repetitions=2", "--warm-up=1", "--min-size=1k", "--max-size=16k", "--step-factor=16")


def bench(tmp_path: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    path = tmp_path / "results.json"
    assert main(["bench", "collectives", *arguments, f"--json={path}"]) == status
    document = json.loads(path.read_text())
    assert isinstance(document, dict)
    return document


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (*implementations.IMPLEMENTATIONS, LIAR, FORGETFUL, FAULTY)
    monkeypatch.setattr(implementations, "IMPLEMENTATIONS", rows)


def test_every_operation_on_every_implementation_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = bench(tmp_path, *QUICK, "--link-gbit=400")
    assert list(document) == [
        *("schema_version", "date", "command", "machine", "versions", "ranks", "nodes", "ranks_per_node"),
        *("threads_per_rank", "device", "note", "settings", "results"),
    ]
    assert (document["ranks"], document["nodes"], document["threads_per_rank"]) == (2, 1, 1)
    results = document["results"]
    moving = [operation.name for operation in OPERATIONS if operation.has_size]
    ours = {"all_reduce": ["shared_memory", "ring", "hierarchy", "compressed"]}
    expected = [
        (operation, name, size)
        for operation in moving
        for size in (1024, 16384)
        for name in (*ours.get(operation, []), "gloo")
    ]
    expected += [("barrier", "gloo", 0)]
    assert [(r["operation"], r["implementation"], r["size_bytes"]) for r in results] == expected
    for result in results:
        assert (result["status"], result["reason"], result["wrong"]) == ("ok", None, 0)
        assert (result["dtype"], result["elements"]) == ("float32", result["size_bytes"] // 4)
        time = result["time_us"]
        assert 0 < time["min"] <= time["p25"] <= time["median"] <= time["p75"] <= time["max"]
        assert time["count"] >= 2
        if result["operation"] == "barrier":
            assert result["algbw_gb_per_sec"] is result["busbw_gb_per_sec"] is result["share_of_peak"] is None
            continue
        assert result["algbw_gb_per_sec"] == pytest.approx(result["size_bytes"] / time["median"] / 1e3)
        factor = BY_NAME[result["operation"]].bus_factor(2)
        assert result["busbw_gb_per_sec"] == pytest.approx(factor * result["algbw_gb_per_sec"])
        assert result["share_of_peak"] == pytest.approx(result["busbw_gb_per_sec"] / 50)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert [(row[3], row[4], int(row[0])) for row in rows] == expected


def test_wrong_results_are_counted_and_end_with_status_one(tmp_path: Path, planted: None) -> None:
    """Also what goes wrong after the first call."""
    document = bench(tmp_path, *QUICK, "--max-size=1k", "--backends=liar,forgetful", status=1)
    wrong = {(result["operation"], result["implementation"]): result["wrong"] for result in document["results"]}
    assert 500 < wrong.pop(("all_reduce", "forgetful")) <= 2 * 256, "of 1 KiB on each rank few are right by chance"
    # Also of the barrier: rank 0 was let go before rank 1 had come.
    assert wrong == {(operation.name, "liar"): 1 for operation in OPERATIONS}


def test_a_fault_takes_one_row_and_the_others_go_on(
    tmp_path: Path, planted: None, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["all_reduce", "reduce", "broadcast", "gather", "scatter", "barrier"]
    document = bench(tmp_path, *QUICK, "--backends", "faulty,gloo", "--operations", *names, "--timeout=3")
    by_place = {(r["operation"], r["implementation"], r["size_bytes"]): r for r in document["results"]}
    ended = {
        "reduce": ("crashed", "rank 1: its process was ended by SIGKILL"),
        "broadcast": ("timed out", "no answer within 3 s"),
        "gather": ("failed", "rank 1: RuntimeError: no route"),
        "scatter": ("not supported", "rank 0: NotImplementedError: not on this back end"),
    }
    for name in names:
        for size in (0,) if name == "barrier" else (1024, 16384):
            assert by_place[name, "gloo", size]["status"] == "ok"
        if name in ended:
            row = by_place[name, "faulty", 1024]
            assert (row["status"], row["reason"]) == ended[name]
            assert row["time_us"] is row["wrong"] is row["busbw_gb_per_sec"] is None
            assert (name, "faulty", 16384) not in by_place, "a larger size was tried after all"
    assert by_place["all_reduce", "faulty", 16384]["status"] == by_place["barrier", "faulty", 0]["status"] == "ok"
    assert "not supported: rank 0: NotImplementedError: not on this back end" in capsys.readouterr().out


def test_support_is_found_by_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the rows of a bench, whose faults are those above."""
    names = ["reduce", "broadcast", "all_reduce", "barrier"]
    faults: dict[str, Any] = {"reduce": {"status": "crashed", "reason": "rank 1: gone"}, "all_reduce": {"wrong": 3}}

    def measured(hosts: Any, plan: CollectivePlan) -> Iterator[CollectiveResult]:
        [tried] = plan.implementations
        for operation in plan.operations:
            if tried.has(operation.name):
                fault = faults.get(operation.name, {}) if tried.name == "gloo" else {}
                yield CollectiveResult(operation=operation, implementation=tried.name, size_bytes=1, **fault)

    monkeypatch.setattr(support, "measure", measured)
    document = bench(tmp_path, "--support", "--backends", "gloo", "ring", "mpi", "--operations", *names, status=1)
    cells = {(c["implementation"], c["device"], c["operation"]): c for c in document["results"]}
    assert len(cells) == 3 * 2 * len(names)
    assert [cells["gloo", "cpu", name]["status"] for name in names] == ["crashed", "ok", "wrong", "ok"]
    assert [cells["gloo", "cpu", name]["reason"] for name in names] == ["rank 1: gone", None, "3 wrong elements", None]
    assert [cells["ring", "cpu", name]["status"] for name in names] == [*["not supported"] * 2, "ok", "not supported"]
    if not torch.distributed.is_mpi_available():
        assert cells["mpi", "cpu", "reduce"]["status"] == "not built"
    if not torch.cuda.device_count():
        assert cells["gloo", "cuda", "reduce"]["status"] == "no GPU"
    assert all(cell["supported"] == (cell["status"] == "ok") for cell in cells.values())
    printed = capsys.readouterr().out.splitlines()
    assert ["gloo", "cpu", "crashed", "ok", "wrong", "ok"] in [line.split() for line in printed]
    assert "# gloo, cpu, reduce: rank 1: gone" in printed


class TestTable:
    TABLE = CollectivesTable(world_size=4, dtype=torch.bfloat16, link_gbit=400)
    ROW = CollectiveResult(
        operation=BY_NAME["all_reduce"],
        implementation="ring",
        size_bytes=28 * 10**6,
        numel=14 * 10**6,
        seconds=Spread(1e-3, 0.5e-3, 1.5e-3, 0.1e-3, 2e-3, 9),
    )

    def test_row_and_share_of_the_peak(self) -> None:
        """28 MB in 1 ms are a bus bandwidth of 28 x 6/4 = 42 GB/s; four adapters of 100 Gbit/s are 50 GB/s."""
        assert self.TABLE.row(self.ROW).split() == [
            *("28000000", "14000000", "bfloat16", "all_reduce", "ring"),
            *("1000.0", "500.0", "1500.0", "28.000", "42.000", "84.0", "%", "0"),
        ]
        [line] = self.TABLE.summary([self.ROW])
        assert line.startswith("# all_reduce, ring: busbw 42 of 50 GB/s = 84 % (at ")

    def test_summary_takes_the_fastest_size(self) -> None:
        slower = CollectiveResult(**{**vars(self.ROW), "size_bytes": 10})
        failed = CollectiveResult(**{**vars(self.ROW), "seconds": None, "status": "failed", "reason": "why"})
        assert self.TABLE.summary([slower, self.ROW, failed]) == self.TABLE.summary([self.ROW])
