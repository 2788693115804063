"""The table that people see."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from lightning_multigpu.callbacks.communication import purpose_of
from lightning_multigpu.report.run_table import show
from tests.report.examples import record, report_of


def printed(report: dict[str, Any], *, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal)
    show(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if label in line]
    return [cell.strip() for cell in line.strip("|").split("|")]


FIGURES = {
    "throughput__samples_per_sec": 5122.4,
    "throughput__step_ms": 12.49,
    "communication__all_reduce_ms": 4.219,
    "communication__exposed_ms": 1.249,
    "communication__sent_bytes": 12_345_678.0,
    "communication__busbw_gb_per_sec": 0.1234,
    "device__utilization_percent": 93.21,
    "device__memory_used_bytes": 3e9,
    "device__process_rss_bytes": 5e8,
}


def test_every_figure_has_its_row_with_unit() -> None:
    text = printed(report_of(record(0, **FIGURES)))
    assert "ring_ddp: 1 rank on 1 node, 10 optimizer steps" in text
    assert cells(text, "throughput") == ["throughput", "5,122", "5,122", "5,122", "samples/s"]
    assert cells(text, "step time") == ["step time", "12.5", "12.5", "12.5", "ms"]
    assert cells(text, "all-reduce time")[1:] == ["4.22", "4.22", "4.22", "ms"]
    assert cells(text, "exposed communication")[1:] == ["1.25", "1.25", "1.25", "ms"]
    assert cells(text, "sent per step and rank")[1:] == ["12.3", "12.3", "12.3", "MB"]
    assert cells(text, "bus bandwidth")[1:] == ["0.123", "0.123", "0.123", "GB/s"]
    assert cells(text, "use of a rank's own cores")[1:] == ["93.2", "93.2", "93.2", "%"]
    assert "ranks wait for communication for 10.0 % of their time" in text


def test_a_run_that_had_ended_before_has_no_table() -> None:
    """``fit --resume`` of a run at its last epoch printed a table without a row."""
    assert printed(report_of(record(0, steps=0))) == "No optimizer step was taken: there is nothing to report\n"


def test_memory_was_the_hosts_on_a_cpu_and_nobody_could_tell() -> None:
    """A user with four browsers open was told that their model needs 3 GB."""
    report = report_of(record(0, **FIGURES))
    text = printed(report)
    assert cells(text, "main memory of the largest process")[1:] == ["500", "500", "500", "MB"]
    assert "3.00" not in text
    report["hardware"] = {**report["hardware"], "device": "cuda"}
    assert cells(printed(report), "memory in use of a GPU, all processes")[1:] == ["3.00", "3.00", "3.00", "GB"]


def test_all_communication_says_what_it_is_beside_the_all_reduce() -> None:
    parts = [{"all-reduce of gradients": 4.0, "buffers": 2.0}, {"all-reduce of gradients": 5.0}]
    records = [replace(record(rank, **FIGURES), communication_ms=part) for rank, part in enumerate(parts)]
    text = printed(report_of(*records))
    assert "all communication, means in ms: all-reduce of gradients 4.50, buffers 1.00" in text


def test_communication_inside_split_layers_is_one_part_that_names_the_costliest() -> None:
    split = {purpose_of("all_reduce", f"tensor {name}"): ms for name, ms in (("blocks.0", 1.0), ("blocks.1", 2.0))}
    report = report_of(replace(record(0, **FIGURES), communication_ms={"buffers": 4.0, **split}))
    parts = "means in ms: buffers 4.00, inside split layers (most for blocks.1: 2.00) 3.00"
    assert parts in " ".join(printed(report).split())


def test_a_figure_that_is_absent_has_no_row() -> None:
    text = printed(report_of(record(0, throughput__samples_per_sec=2.0)))
    assert "all-reduce" not in text
    assert "wait for communication" not in text


def test_a_pipe_gets_plain_characters_and_a_terminal_gets_lines() -> None:
    report = report_of(record(0, **FIGURES))
    assert printed(report).isascii()
    assert "\x1b[" in printed(report, terminal=True)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.00"),
        (0.0000626, "0.0000626"),
        (12.345, "12.3"),
        (1234567.0, "1,234,567"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value: float, shown: str) -> None:
    text = printed(report_of(record(0, communication__busbw_gb_per_sec=value)))
    assert cells(text, "bus bandwidth")[1] == shown


def test_small_sizes_stay_bytes() -> None:
    text = printed(report_of(record(0, communication__sent_bytes=264.0)))
    assert cells(text, "sent per step and rank")[1:] == ["264", "264", "264", "bytes"]
