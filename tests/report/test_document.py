"""The report as a document: its contents, its schema, and that it is written whole or not at all."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_multigpu.report.document import build, read, write, write_bytes
from lightning_multigpu.report.schema import ReportError, as_json
from tests.report.examples import ABOUT, FACTS, constant, document_of, record, report_of


def metrics(rate: float, used_bytes: float) -> dict[str, Any]:
    return {"throughput/samples_per_sec": constant(rate), "device/memory_used_bytes": constant(used_bytes)}


def test_a_report_of_two_hosts() -> None:
    report = report_of(
        record(1, node=1, host="beta", throughput__samples_per_sec=3.0, device__memory_used_bytes=7.0),
        record(0, node=0, host="alpha", throughput__samples_per_sec=2.0, device__memory_used_bytes=9.0),
        bucket_cap_mb=1,
    )
    assert report == {
        "schema_version": 2,
        "strategy": {"name": "ring_ddp", "options": {"bucket_cap_mb": 1}},
        "world": {"size": 2, "nodes": 2, "hosts": ["alpha", "beta"]},
        **ABOUT,
        "versions": {"torch": "2.13.0"},
        "steps": 10,
        "ranks": [
            {"rank": 0, "host": "alpha", "metrics": metrics(2.0, 9.0)},
            {"rank": 1, "host": "beta", "metrics": metrics(3.0, 7.0)},
        ],
        "aggregate": {"metrics": metrics(5.0, 9.0)},
    }


def test_nodes_with_one_host_name_are_still_nodes_and_a_figure_that_no_rank_has_is_absent() -> None:
    report = report_of(record(0, node=0), record(1, node=1))
    assert report["world"] == {"size": 2, "nodes": 2, "hosts": ["alpha", "alpha"]}
    assert report["aggregate"]["metrics"] == {}


def test_a_lost_rank_of_an_asynchronous_run_has_no_record() -> None:
    """Its updates count for the figures of the servers; each other rank has made steps of its own."""
    workers = [{"rank": rank, "updates": 3, "staleness": {"median": 1, "p95": 1, "max": 2}} for rank in range(3)]
    records = [replace(record(rank, steps=10 + rank), step_samples=8) for rank in (0, 2)]
    servers = {"servers": [], "workers": workers}
    report = build(records, FACTS, strategy={}, versions={}, aggregations={}, parameter_servers=servers)
    assert [rank.rank for rank in report.ranks] == [0, 2]
    assert report.steps == 22
    assert "global_batch" not in as_json(report)


def test_a_report_has_the_rights_that_the_umask_leaves(tmp_path: Path) -> None:
    """Everybody could read it, whatever the umask was."""
    before = os.umask(0o077)
    try:
        write_bytes(b"{}", tmp_path / "report")
    finally:
        os.umask(before)
    assert (tmp_path / "report").stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_written_leaves_the_old_report(tmp_path: Path) -> None:
    path = tmp_path / "new" / "multigpu_report.json"
    old = document_of(record(0))
    write(as_json(old), path)
    for new, message in (
        (as_json(document_of(record(0), options={"hook": object()})), "not JSON serializable"),
        (as_json(document_of(record(0, throughput__samples_per_sec=float("nan")))), "not JSON compliant"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            write(new, path)
    with pytest.raises(TypeError):  # with the file open, as on a full disk
        write_bytes(None, path)  # type: ignore[arg-type]
    assert read(path) == old
    assert os.listdir(path.parent) == [path.name]


def test_only_json_of_this_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "multigpu_report.json"
    for text, message in (
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),  # a RecursionError
        ("\udcff", "no JSON"),  # no UTF-8
        ("9" * 5000, "no JSON"),
        (json.dumps({"schema_version": "x" * 10**6}), "schema_version='x{30,80}: only"),
        ("[]", "schema_version=None"),
        (json.dumps({**report_of(record(0)), "schema_version": 1}), "schema_version=1: only version 2 can be read"),
    ):
        path.write_text(text, errors="surrogateescape")
        with pytest.raises(ReportError, match=message):
            read(path)
