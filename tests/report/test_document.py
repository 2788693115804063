"""The report as a document: what is in it, that it is checked, that it is written whole or not at all."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_multigpu.report.document import build, read, write
from lightning_multigpu.report.schema import ReportError, validate
from tests.report.examples import constant, record, report_of


def test_a_report_of_two_hosts() -> None:
    report = report_of(
        record(1, node=1, host="beta", throughput__samples_per_sec=3.0, device__memory_used_bytes=7.0),
        record(0, node=0, host="alpha", throughput__samples_per_sec=2.0, device__memory_used_bytes=9.0),
        bucket_cap_mb=1,
    )
    assert report == {
        "schema_version": 1,
        "strategy": {"name": "ring_ddp", "options": {"bucket_cap_mb": 1}},
        "world": {"size": 2, "nodes": 2, "hosts": ["alpha", "beta"]},
        "versions": {"torch": "2.13.0"},
        "steps": 10,
        "ranks": [
            {
                "rank": 0,
                "host": "alpha",
                "metrics": {"throughput/samples_per_sec": constant(2.0), "device/memory_used_bytes": constant(9.0)},
            },
            {
                "rank": 1,
                "host": "beta",
                "metrics": {"throughput/samples_per_sec": constant(3.0), "device/memory_used_bytes": constant(7.0)},
            },
        ],
        "aggregate": {
            "metrics": {"throughput/samples_per_sec": constant(5.0), "device/memory_used_bytes": constant(9.0)}
        },
    }
    assert validate(report) == report


def test_nodes_with_one_host_name_are_still_nodes() -> None:
    world = report_of(record(0, node=0), record(1, node=1))["world"]
    assert world == {"size": 2, "nodes": 2, "hosts": ["alpha", "alpha"]}


def test_a_figure_that_no_rank_has_is_absent() -> None:
    assert report_of(record(0))["aggregate"]["metrics"] == {}


@pytest.mark.parametrize("ranks", [[], [1], [0, 0], [0, 2]])
def test_every_rank_has_one_record(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="one record of each rank from 0 on"):
        build([record(rank) for rank in ranks], strategy="s", options={}, versions={}, aggregations={})


def test_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "multigpu_report.json"
    report = report_of(record(0, throughput__samples_per_sec=2.0))
    write(report, path)
    assert read(path) == report
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o644


def test_what_cannot_be_written_leaves_the_old_report(tmp_path: Path) -> None:
    path = tmp_path / "multigpu_report.json"
    old = report_of(record(0))
    write(old, path)
    with pytest.raises(TypeError):
        write(report_of(record(0), hook=object()), path)
    assert read(path) == old
    assert os.listdir(tmp_path) == [path.name]


def broken(report: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    damaged = copy.deepcopy(report)
    target: Any = damaged
    for step in place[:-1]:
        target = target[step]
    if value is ...:
        del target[place[-1]]
    else:
        target[place[-1]] = value
    return damaged


SAMPLES = ("ranks", 0, "metrics", "throughput/samples_per_sec")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("schema_version",), 2, "schema_version=2: only version 1 can be read"),
        (("schema_version",), ..., "schema_version=None"),
        (("steps",), ..., "report: steps missing"),
        (("steps",), 1.5, r"steps=1\.5: must be a whole number, at least 0"),
        (("steps",), True, "steps=True: must be a whole number"),
        (("more",), 1, "report: more unknown; known: aggregate, pipeline, ranks"),
        (("strategy", "name"), "", "strategy.name='': must be a text"),
        (("strategy", "options"), [], r"strategy.options=\[\]: must be an object"),
        (("world", "size"), 0, "world.size=0: must be a whole number, at least 1"),
        (("world", "size"), 2, "ranks has 1 entries, world.size says 2"),
        (("world", "hosts"), [], "world.hosts has 0 entries, world.nodes says 1"),
        (("world", "hosts", 0), 3, r"world.hosts\[0\]=3"),
        (("versions", "torch"), None, "versions.torch=None"),
        (("ranks",), {}, "ranks={}: must be a list"),
        (("ranks", 0, "rank"), 1, r"ranks\[0\].rank=1: ranks come in order"),
        ((*SAMPLES, "p95"), ..., "p95 missing"),
        ((*SAMPLES, "p95"), float("nan"), "p95=nan: must be a finite number, or the key be absent"),
        ((*SAMPLES, "p95"), None, "p95=None: must be a finite number"),
        (("aggregate", "metrics", "speed"), {}, "aggregate.metrics: 'speed' is no key"),
    ],
)
def test_a_document_that_breaks_the_schema_says_where(place: tuple[Any, ...], value: Any, message: str) -> None:
    report = report_of(record(0, throughput__samples_per_sec=2.0))
    with pytest.raises(ReportError, match=message):
        validate(broken(report, place, value))


def test_text_is_read_as_json() -> None:
    report = report_of(record(0))
    assert validate(json.dumps(report)) == report
    with pytest.raises(ReportError, match="no JSON"):
        validate("{")
    with pytest.raises(ReportError, match="must be an object"):
        validate("[]")
