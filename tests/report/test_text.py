"""A report as text and as a page, and the command that shows it again."""

import html
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_multigpu.callbacks.communication import purpose_of
from lightning_multigpu.cli import main
from lightning_multigpu.report import document
from lightning_multigpu.report.diagnosis import Finding
from lightning_multigpu.report.page import FILE_NAME, page
from lightning_multigpu.report.schema import as_json
from lightning_multigpu.report.text import text
from tests.report.examples import document_of, record, report_of
from tests.report.profiles import ALL_REDUCE, HEALTHY, figures, report, with_all

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


def cells(shown: str, label: str) -> list[str]:
    """The cells of the row that begins with a label."""
    [line] = [line for line in shown.splitlines() if line.startswith(f"{label}  ")]
    return re.split("  +", line)[1:]


def test_every_figure_of_a_run_has_its_row_with_unit() -> None:
    shown = text(document_of(record(0, **FIGURES)))
    assert shown.startswith("ring_ddp: 1 rank on 1 node, 10 optimizer steps\nA step takes 12.5 ms: ranks wait for ")
    assert "communication for 10.0 % of their time" in " ".join(shown.split())
    assert cells(shown, "throughput") == ["5,122", "5,122", "5,122", "samples/s"]
    assert cells(shown, "step time") == ["12.5", "12.5", "12.5", "ms"]
    assert cells(shown, "all-reduce time per step") == ["4.22", "4.22", "4.22", "ms"]
    assert cells(shown, "sent per step and rank") == ["12.3", "12.3", "12.3", "MB"]
    assert cells(shown, "bus bandwidth of the all-reduce") == ["0.123", "0.123", "0.123", "GB/s"]
    assert cells(shown, "use of a rank's own cores") == ["93.2", "93.2", "93.2", "%"]
    assert shown.isascii()
    few = text(report_of(record(0, throughput__samples_per_sec=2.0, communication__sent_bytes=264.0)))
    assert cells(few, "sent per step and rank") == ["264", "264", "264", "bytes"]
    assert not [each for each in ("all-reduce", "wait for communication", "Memory") if each in few]


def test_a_run_that_had_ended_before_has_no_table() -> None:
    """``fit --resume`` of a run at its last epoch printed a table without a row."""
    assert text(document_of(record(0, steps=0))) == "No optimizer step was taken: there is nothing to report"


def test_memory_was_the_hosts_on_a_cpu_and_nobody_could_tell() -> None:
    """A user with four browsers open was told that their model needs 3 GB."""
    found = report_of(record(0, **FIGURES))
    assert cells(text(found), "main memory of the largest process") == ["500", "500", "500", "MB"]
    assert "3.00" not in text(found)
    found["hardware"]["device"] = "cuda"
    assert cells(text(found), "memory in use of a GPU, all processes") == ["3.00", "3.00", "3.00", "GB"]


def test_all_communication_says_what_it_is_and_names_the_costliest_split_layer() -> None:
    split = {purpose_of("all_reduce", f"tensor {name}"): ms for name, ms in (("blocks.0", 1.0), ("blocks.1", 2.0))}
    parts = [{"buffers": 4.0, **split}, {"buffers": 4.0, "all-reduce of gradients": 10.0}]
    records = [replace(record(rank, **FIGURES), communication_ms=part) for rank, part in enumerate(parts)]
    words = "in ms: all-reduce of gradients 5.00, buffers 4.00, inside split layers (most for blocks.1: 1.00) 1.50"
    assert words in text(document_of(*records))


def test_a_profile_begins_with_its_verdict_and_the_tree_of_the_step() -> None:
    lines = text(report()).splitlines()
    assert lines[0] == "ring_ddp: 2 ranks on 1 node, 10 optimizer steps, 125 ms a step (median of 2)"
    assert lines[1] == "The step is limited by input: data wait, 50.0 ms of the 125 ms of rank 0, 40 %."
    assert lines[2].startswith("Load batches beside the training")
    assert lines[4] == "75.0 ms a step predicted (40 % less)"
    assert [line for line in lines if "<-" in line] == ["  data wait      50.0 ms   40 %  <- input"]
    assert "1. input: 75.0 ms a step predicted (40 % less)" in lines
    assert lines.index("A step of each rank, in ms:") < 24, "a screen"
    texts = _Page(page(report())).texts
    assert texts.index(lines[1]) < texts.index("step of rank 0") < texts.index("What would make a step shorter")
    small = report(figures(0, {"communication": 0.001}, waits_s={"gradients": 0.001}))
    assert "    gradients" not in text(small).partition("A step of each")[0]
    healthy = text(report(figures(0, HEALTHY))).splitlines()
    assert healthy[1].startswith("No remedy is known that would save 5 % of a step; its largest part is backward")
    assert not [line for line in healthy if "<-" in line]
    assert healthy[-1] == "Nothing was found that would save 5 % of a step."


def test_the_tree_is_that_of_the_rank_that_the_verdict_is_about() -> None:
    """The verdict told of one rank's straggling, and the tree of the other's step, which was longer by chance."""
    ranks = figures(0, {**HEALTHY, "communication": 0.052}), figures(1, {**HEALTHY, "forward": 0.07})
    lines = text(report(*ranks)).splitlines()
    assert lines[1].startswith("The step is limited by straggler: forward, 70.0 ms of the 117 ms of rank 1")
    assert next(line for line in lines if line.startswith("step of")).startswith("step of rank 1")
    assert re.search(r"^  forward +70.0 ms +60 %  <- straggler$", "\n".join(lines), re.MULTILINE)
    alike = [replace(each, phases_s={**each.phases_s, "forward": 0.02}) for each in ranks]
    waits_longer = replace(alike[0], phases_s={**HEALTHY, "forward": 0.019, "communication": 0.001, "backward": 0.04})
    found = report(waits_longer, alike[1])
    assert found.profile is not None
    assert found.profile.shown.rank == 1, "the rank that computes for longest"


def test_a_cause_that_may_be_in_any_phase_has_a_row_of_its_own() -> None:
    found = report()
    cause = Finding(
        kind="synchronising calls", rank=1, saving_s=0.05, step_s=0.075, evidence="", remedy="Keep tensors."
    )
    shown = text(replace(found, profile=replace(found.profile, findings=[cause])))  # type: ignore[type-var]
    assert "The step is limited by synchronising calls, 50.0 ms of the 125 ms of rank 1, 40 %." in shown
    assert re.search(r"^  synchronising calls, within the phases +50.0 ms +40 %  <- synch", shown, re.MULTILINE)


def test_the_figures_of_each_rank() -> None:
    shown = text(report())
    header = r"^rank +data wait +forward +backward +communication +optimizer +step, ms +hidden transfers$"
    assert re.search(header, shown, re.MULTILINE)
    assert re.search(r"^1 \(host<1>\) +50.0 +20.0 +40.0 +10.0 +5.00 +125 +20.0$", shown, re.MULTILINE)
    # 1 kB of gradients in 30 ms, of which each of two ranks sends 1 kB.
    rate = "33.3 kB/s"
    assert cells(shown, "all_reduce (data, 2 ranks)") == ["1", "1.00 kB", "0.00 B", "30.0 ms", rate, rate]
    pulled = text(report(figures(0, transfers=[replace(ALL_REDUCE, operation="pull", group="servers")])))
    assert cells(pulled, "pull (servers, 2 ranks)")[-2:] == [rate, "-"]
    assert not [word for word in ("Memory", "whole run", "taleness", "micro-batches") if word in shown]


def test_transfers_that_nobody_measures_are_named() -> None:
    """Under Lightning's ddp the gradients travel in backward, and the list of transfers seemed to be complete."""
    unmetered = [figures(rank, is_metered=False, transfers=[]) for rank in range(2)]
    note = "ddp does not measure its transfers, which count as backward"
    assert note in text(report(*unmetered, strategy="ddp"))
    for metered in (report(), report(unmetered[0], strategy="single_device")):
        assert "does not measure" not in text(metered)


def test_text_of_all_that_can_be_measured() -> None:
    shown = text(with_all())
    assert "of 90.0 ms the ranks do not work for 33.3 %; in theory 33.3 %" in shown
    assert re.search(r"^rank +parameters +gradients +optimizer +activations +device peak$", shown, re.MULTILINE)
    assert re.search(r"^1 +4.00 MB +4.00 MB +8.00 MB +4.00 MB +19.0 MB$", shown, re.MULTILINE)
    assert cells(shown, "throughput")[0] == "179", "both ranks together"
    assert re.search(r"^1 +8 +1 +20 +20$", shown, re.MULTILINE), "staleness"
    assert "launch-bound" in shown


class _Page:
    """Tags, texts and addresses of a page."""

    def __init__(self, page: str) -> None:
        self.tags = re.findall(r"<(\w+)", page)
        self.addresses = re.findall(r'(?:href|src)="([^"]*)"', page)
        self.texts = [html.unescape(found) for found in re.findall(r">([^<]+)<", page)]


def test_the_page_needs_nothing_else_and_escapes_names() -> None:
    """It has the sections of the text."""
    shown = page(with_all())
    parsed = _Page(shown)
    assert "script" not in parsed.tags
    assert parsed.addresses == []
    assert "url(" not in shown
    assert parsed.tags.count("svg") == 1
    assert {"0 (host<0>)", "Staleness of updates", "input", "algbw", "busbw"} <= {*parsed.texts}
    assert 'style="width: 30.30%; background: #d55e00" title="data wait"' in shown, "50 of 165 ms"
    assert "rank 0, stage 0: forward, micro-batch 1, 10.000 ms" in parsed.texts


def test_the_command_shows_a_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document.write(as_json(report()), tmp_path / document.FILE_NAME)
    for path in (tmp_path, tmp_path / document.FILE_NAME):
        assert main(["report", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(text(report()))
    assert f"written to {tmp_path / FILE_NAME}" in printed
    assert (tmp_path / FILE_NAME).read_text() == page(report())


def test_what_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "add RunReport or ProfilerReport of lightning_multigpu.callbacks" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: there is no such folder" in capsys.readouterr().err


WRITTEN = as_json(report())
PROFILE = WRITTEN["profile"]
PIPELINE = {"ranks": [0], "schedule": "gpipe", "stages_per_rank": 1, "num_micro_batches": 1, "timelines": [[]]}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"schema_version": 9}, "schema_version=9"),
        ({"schema_version": document.SCHEMA_VERSION, "steps": 3}, "the document has no 'date'"),
        ({**WRITTEN, "aggregate": {"metrics": {"throughput/step_ms": {}}}}, "RunReport writes it .KeyError: 'median'"),
        ({**WRITTEN, "parameter_servers": {"workers": [1]}}, "RunReport writes it .TypeError"),
        ({**WRITTEN, "profile": {**PROFILE, "findings": "x\ny" * 1000}}, "findings is .* and not an array"),
        ({**WRITTEN, "profile": {**PROFILE, "step_s": 10**400}}, "step_s is 10{50,80} and not"),
        ({**WRITTEN, "profile": {**PROFILE, "step_s": 1e308}}, "RunReport writes it .OverflowError"),
        ({**WRITTEN, "profile": {**PROFILE, "ranks": []}}, "a finding of a rank that it lacks"),
        ({**WRITTEN, "profile": {**PROFILE, "pipelines": [PIPELINE]}}, "ValueError: the timelines have no forward"),
    ],
)
def test_a_file_with_other_contents_is_named_in_one_line(
    contents: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback of the pack, of the length of what the file held; or of the arithmetic that its values led to."""
    document.write(contents, tmp_path / document.FILE_NAME)
    assert main(["report", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
    assert str(tmp_path) in line
    assert len(line) < 500


def test_a_file_sends_the_terminal_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names in a file that somebody had sent coloured the terminal, or set its title."""
    hostile = {"strategy": {"name": "\x1b]0;t\x07\x9b31m[/b]", "options": {}}}
    document.write({**WRITTEN, **hostile}, tmp_path / document.FILE_NAME)
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "\ufffd]0;t\ufffd\ufffd31m[/b]" in printed
    assert not set("\x1b\x07\x9b") & set(printed)
