"""``bench collectives`` as a user runs it, on real ranks; what it writes; what becomes of faulty back ends."""

import json
from argparse import ArgumentTypeError
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_multigpu.bench.collectives import collective_run
from lightning_multigpu.bench.collectives.collective_run import CollectivePlan, CollectiveResult
from lightning_multigpu.bench.collectives.implementations import IMPLEMENTATIONS
from lightning_multigpu.bench.collectives.operations import BY_NAME, OPERATIONS
from lightning_multigpu.cli import main
from lightning_multigpu.commands.benches import bench_collectives
from lightning_multigpu.commands.benches.bench_collectives import entry, line, size_bytes, summary
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
    monkeypatch.setattr(bench_collectives, "IMPLEMENTATIONS", (*IMPLEMENTATIONS, LIAR, FORGETFUL, FAULTY))


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


def test_a_refusal_takes_one_row_and_a_lost_rank_ends_the_bench(
    tmp_path: Path, planted: None, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["gather", "scatter", "all_reduce", "broadcast", "barrier"]
    document = bench(tmp_path, *QUICK, "--backends=faulty,gloo", "--operations", *names, "--timeout=3", status=1)
    rows = {
        (r["operation"], r["implementation"], r["size_bytes"]): (r["status"], r["reason"]) for r in document["results"]
    }
    ok = dict.fromkeys([(name, "gloo", size) for name in names[:3] for size in (1024, 16384)], ("ok", None))
    ok |= dict.fromkeys([("all_reduce", "faulty", size) for size in (1024, 16384)], ("ok", None))
    assert rows == {
        **ok,
        ("gather", "faulty", 1024): ("failed", "rank 1: RuntimeError: no route"),
        ("scatter", "faulty", 1024): ("not supported", "rank 0: NotImplementedError: not on this back end"),
        ("broadcast", "faulty", 1024): ("failed", "rank 1: no answer within 3 s"),
    }
    [failed] = [r for r in document["results"] if r["operation"] == "gather" and r["implementation"] == "faulty"]
    assert failed["time_us"] is failed["wrong"] is failed["busbw_gb_per_sec"] is None
    assert "not supported: rank 0: NotImplementedError: not on this back end" in capsys.readouterr().out


def test_support_is_found_by_trying(tmp_path: Path, planted: None, capsys: pytest.CaptureFixture[str]) -> None:
    """New ranks try what is left after a crash."""
    names = ["reduce", "scatter", "all_reduce", "barrier"]
    backends = ("faulty", "ring", "forgetful", "mpi")
    document = bench(tmp_path, "--support", "--backends", *backends, "--operations", *names)
    cells = {(c["implementation"], c["device"], c["operation"]): c for c in document["results"]}
    assert len(cells) == len(backends) * 2 * len(names)
    of_faulty = [(cells["faulty", "cpu", name]["status"], cells["faulty", "cpu", name]["reason"]) for name in names]
    assert of_faulty == [
        ("failed", "rank 1: its process was ended by SIGKILL"),
        ("not supported", "rank 0: NotImplementedError: not on this back end"),
        *[("ok", None)] * 2,
    ]
    assert [cells["ring", "cpu", name]["status"] for name in names] == [*["not supported"] * 2, "ok", "not supported"]
    if not torch.distributed.is_mpi_available():
        assert cells["mpi", "cpu", "reduce"]["status"] == "not built"
    if not torch.cuda.device_count():
        assert cells["ring", "cuda", "reduce"]["status"] == "no GPU"
    assert all(cell["supported"] == (cell["status"] == "ok") for cell in cells.values())
    printed = capsys.readouterr().out.splitlines()
    assert ["faulty", "cpu", "failed", "not", "supported", "ok", "ok"] in [line.split() for line in printed]
    assert "# faulty, cpu, reduce: rank 1: its process was ended by SIGKILL" in printed


def test_wrong_results_are_no_support(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(hosts: Any, plan: CollectivePlan) -> Iterator[CollectiveResult]:
        yield CollectiveResult(operation=BY_NAME["gather"], implementation="gloo", size_bytes=1, wrong=3)

    monkeypatch.setattr(collective_run, "measure", measured)
    gloo = [each for each in IMPLEMENTATIONS if each.name == "gloo"]
    cell = collective_run.support(Any, gloo, [BY_NAME["gather"]], 1.0)[0]  # type: ignore[arg-type]
    assert (cell["supported"], cell["status"], cell["reason"]) == (False, "wrong", "3 wrong elements")


class TestTable:
    ROW = CollectiveResult(
        operation=BY_NAME["all_reduce"],
        implementation="ring",
        size_bytes=28 * 10**6,
        numel=14 * 10**6,
        seconds=Spread(1e-3, 0.5e-3, 1.5e-3, 0.1e-3, 2e-3, 9),
    )

    def test_row_and_share_of_the_peak(self) -> None:
        """28 MB in 1 ms are a bus bandwidth of 28 x 6/4 = 42 GB/s; four adapters of 100 Gbit/s are 50 GB/s."""
        row = entry(self.ROW, 4, "bfloat16", 400)
        assert line(row).split() == [
            *("28000000", "14000000", "bfloat16", "all_reduce", "ring"),
            *("1000.0", "500.0", "1500.0", "28.000", "42.000", "0", "84.0", "%"),
        ]
        slower, failed = {**row, "size_bytes": 10, "busbw_gb_per_sec": 41.0}, {**row, "busbw_gb_per_sec": None}
        expected = "# all_reduce, ring: busbw 42.0 of 50.0 GB/s = 84 % (at 28.0 MB)"
        assert summary([slower, row, failed], 400) == [expected]


WRITTEN = {"512": 512, "512b": 512, "64k": 65536, "64 KiB": 65536, "64kB": 64000, "1.5m": 3 << 19, "1g": 1 << 30}


def test_sizes_are_read() -> None:
    assert {text: size_bytes(text) for text in WRITTEN} == WRITTEN
    for text in ("", "0", "-1k", "64q", "k", "1.5", "1..5k", "inf"):
        with pytest.raises(ArgumentTypeError, match="such as 64k or 1MiB"):
            size_bytes(text)
