"""A profile as a document, as text, as a timeline and as a page."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightning_multigpu.cli import main
from lightning_multigpu.report import document
from lightning_multigpu.report.document import SCHEMA_VERSION
from lightning_multigpu.report.figures import SvgFigure
from lightning_multigpu.report.profile import profile_document, profile_page, profile_text
from tests.report.examples import record, report_of
from tests.report.profiles import PHASES_S, built, loaded, profile, told, with_all
from tests.report.shape import assert_follows_profile_schema

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def test_times_are_those_of_rank_0() -> None:
    """The clock of rank 1 is 7 s ahead."""
    found = profile()
    for rank in found["ranks"]:
        assert [(step["start_s"], step["end_s"]) for step in rank["steps"]] == [
            (pytest.approx(0.0), pytest.approx(0.125)),
            (pytest.approx(0.125), pytest.approx(0.25)),
        ]
        assert rank["steps"][0]["transfers"][0][3:5] == [pytest.approx(0.09), pytest.approx(0.12)]
        assert rank["phases_s"] == pytest.approx(PHASES_S)
        assert rank["transfers_s"] == pytest.approx(0.03)
    assert found["step_s"] == pytest.approx(0.125)
    [operation] = found["operations"]
    assert (operation["count"], operation["sent_bytes"], operation["seconds"]) == (1, 1000, pytest.approx(0.03))


def test_the_phases_of_a_rank_add_up_to_its_step() -> None:
    """On a busy machine each step has another phase that is long, and medians of phases added up to 15.3 of 18.8 ms."""
    measured = told(0)
    measured["steps"] = [
        told(0, **{phase: 0.5})["steps"][0] for phase in ("data_wait", "forward", "backward", "optimizer")
    ]
    [rank] = built([measured], "s")["ranks"]
    assert sum(rank["phases_s"].values()) == pytest.approx(rank["step_s"])
    assert rank["phases_s"]["forward"] / rank["phases_s"]["backward"] == pytest.approx(0.02 / 0.04)


def test_a_wait_without_transfers_hides_none() -> None:
    """The hidden part was the time of transfers without that of all waits, whatever they were for."""
    measured = told(0, communication=0.05)  # its transfer begins 20 ms earlier
    for step in measured["steps"]:
        step["transfers"][0][4] -= 0.04  # and ends 10 ms after the wait has begun
    [rank] = loaded(built([measured], "s")).ranks
    assert rank.hidden_s == pytest.approx(0.02)


def test_the_document_follows_its_schema() -> None:
    for found in (profile(), with_all()):
        assert_follows_profile_schema(json.loads(json.dumps(found)))


def test_text() -> None:
    text = profile_text.text(loaded(profile()))
    assert "Profile of ring_ddp: 2 ranks, 2 optimizer steps, 125 ms a step (medians)" in text
    header = r"^rank +data wait +forward +backward +communication +optimizer +step, ms +hidden transfers$"
    assert re.search(header, text, re.MULTILINE)
    assert re.search(r"^1 \(host<1>\) +50.0 +20.0 +40.0 +10.0 +5.00 +125 +20.0$", text, re.MULTILINE)
    # 1 kB of gradients in 30 ms, of which each of two ranks sends 1 kB.
    rate = "33.3 kB/s"
    row = rf"^all_reduce \(data, 2 ranks\) +1 +1.00 kB +0.00 B +30.0 ms +{rate} +{rate}"
    assert re.search(rf"{row}$", text, re.MULTILINE)
    assert re.search(r"^aten::mm +7 +3.00 ms$", text, re.MULTILINE)
    assert "1. input: 75.0 ms a step predicted (40 % less)" in text
    pulled = profile()
    pulled["operations"][0] |= {"operation": "pull", "group": "servers"}
    assert re.search(rf"^pull \(servers, 2 ranks\) .* {rate} +-$", profile_text.text(loaded(pulled)), re.MULTILINE)
    healthy = profile_text.text(loaded(profile(data_wait=0.001, communication=0.001)))
    assert healthy.endswith("Nothing was found that would save 5 % of a step.")


def test_a_profile_begins_with_its_verdict_and_the_tree_of_the_step() -> None:
    lines = profile_text.text(loaded(profile())).splitlines()
    assert lines[1] == "The step is limited by input: data wait, 50.0 ms of 125 ms, 40 %."
    assert lines[2].startswith("Load batches beside the training")
    assert lines[4] == "75.0 ms a step predicted (40 % less)"
    assert [line for line in lines if "<-" in line] == ["  data wait      50.0 ms   40 %  <- input"]
    assert "    gradients" not in profile_text.text(loaded(profile(communication=0.001)))[:400]
    assert lines.index("A step of each rank, in ms:") < 24, "a screen"
    texts = _Page(profile_page.page(loaded(profile()))).texts
    assert texts.index(lines[1]) < texts.index("step of rank 0") < texts.index("What would make a step shorter")
    healthy = profile_text.text(loaded(profile(data_wait=0.001, communication=0.001))).splitlines()
    assert healthy[1].startswith("No remedy is known that would save 5 % of a step; its largest part is backward")
    assert not [line for line in healthy if "<-" in line]


def test_a_cause_that_may_be_in_any_phase_has_a_row_of_its_own() -> None:
    found = profile()
    found["findings"][0] |= {"kind": "synchronising calls", "phases": []}
    text = profile_text.text(loaded(found))
    assert "The step is limited by synchronising calls, 50.0 ms of 125 ms, 40 %." in text
    assert re.search(r"^  synchronising calls, within the phases +50.0 ms +40 %  <- synch", text, re.MULTILINE)


def test_transfers_that_nobody_measures_are_named() -> None:
    """Under Lightning's ddp the gradients travel in backward, and the list of transfers seemed to be complete."""
    measured = [{**told(rank), "is_metered": False} for rank in range(2)]
    stock = built(measured, "ddp")
    note = "ddp does not measure its transfers, which count as backward"
    assert note in profile_text.text(loaded(stock))
    assert note in profile_page.page(loaded(stock))
    alone = built(measured[:1], "single_device")
    for metered in (profile(), alone):
        assert "does not measure" not in profile_text.text(loaded(metered)) + profile_page.page(loaded(metered))


def test_text_of_all_that_can_be_measured() -> None:
    text = profile_text.text(loaded(with_all()))
    assert "of 90.0 ms the ranks do not work for 33.3 %; in theory 33.3 %" in text
    assert re.search(r"^rank +parameters +gradients +optimizer +device peak +activations$", text, re.MULTILINE)
    assert re.search(r"^1 +4.00 MB +4.00 MB +8.00 MB +19.0 MB +4.00 MB$", text, re.MULTILINE)
    assert re.search(r"^samples a second +179 +160 +200$", text, re.MULTILINE)  # both ranks together
    assert re.search(r"^utilization +60 % +70 % +80 %$", text, re.MULTILINE)
    assert re.search(r"^1 +8 +1 +20 +20$", text, re.MULTILINE), "staleness"
    assert "Memory near the limit:\n   the GPU of rank 0 had 19.5 MB of 20.0 MB in use" in text
    assert "imbalance of shards" in text
    assert "launch-bound" in text
    crowded = built([{**told(rank), "threads": 8} for rank in range(2)], "s")
    assert "Threads:\n   2 ranks with 8 threads each are 16 threads for 2 cores" in profile_text.text(loaded(crowded))
    nothing = profile_text.text(loaded(profile()))
    assert not [word for word in ("Memory", "whole run", "staleness", "micro-batches") if word in nothing]


def test_long_names_of_folders_are_cut_where_they_are_alike() -> None:
    figure = SvgFigure(1.0, str)
    for name in ("pipeline_interleaved", "pipeline_zero_bubble"):
        figure.row(f"/scratch/experiments/{name}")
        assert f"…{name[1:]}<title>/scratch/experiments/{name}</title>" in figure.part_of_page("meaning")


def test_a_timeline_has_no_more_boxes_than_can_be_seen() -> None:
    """10,000 transfers a step made pages of megabytes for each rank."""
    figure = SvgFigure(1.0, str)
    for row in range(2):
        figure.row(str(row))
        for part in range(10_000):
            figure.box(part / 10_000, (part + 1) / 10_000, "#000", "thin")
        figure.box(0.5, 0.6, "#000", "long one", top=17)
        figure.box(0.52, 0.53, "#000", "within it", top=17)
    shown = figure.part_of_page("meaning")
    assert shown.count("long one") == shown.count("within it") == 2
    assert 2 * 1_000 < shown.count("thin") < 2 * 4_000


class _Page:
    """Tags, texts and addresses of a page."""

    def __init__(self, page: str) -> None:
        self.tags = re.findall(r"<(\w+)", page)
        self.addresses = re.findall(r'(?:href|src)="([^"]*)"', page)
        self.texts = [html.unescape(text) for text in re.findall(r">([^<]+)<", page)]


def test_the_page_needs_nothing_else_and_escapes_names() -> None:
    """It has the sections of the text."""
    page = profile_page.page(loaded(with_all()))
    parsed = _Page(page)
    assert "script" not in parsed.tags
    assert parsed.addresses == []
    assert "url(" not in page
    assert parsed.tags.count("svg") == page.count('role="img" aria-label=') == 4
    assert {"0 (host<0>)", "Staleness of updates", "aten::mm", "input", "algbw", "busbw"} <= {*parsed.texts}
    assert "rank 1: activations, 4.00 MB" in parsed.texts
    assert "rank 0, stage 0: forward, micro-batch 1, 10.000 ms" in parsed.texts
    assert "By the clocks of the hosts, from the start of the first rank" in page
    assert "on the GPU" not in parsed.texts, "there is none"


def test_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, quick = tmp_path / "slow", tmp_path / "quick"
    document.write(profile(), slow / profile_document.FILE_NAME)
    other = profile("sync_ps", data_wait=0.001, communication=0.001)
    for rank in other["ranks"]:
        rank["whole_run"] = {"throughput/samples_per_sec": (160.0, 160.0, 180.0)}
    document.write(other, quick / profile_document.FILE_NAME)
    assert main(["report", str(slow), str(quick)]) == 0
    printed = capsys.readouterr().out
    row = rf"{slow} +- +125 ms +input +50.0 ms +20.0 ms +40.0 ms +10.0 ms +5.00 ms +ring_ddp$"
    assert re.search(row, printed, re.MULTILINE)
    row = rf"{quick} +320 +67.0 ms +nothing found +1.00 ms +20.0 ms +40.0 ms +1.00 ms +5.00 ms +sync_ps$"
    assert re.search(row, printed, re.MULTILINE)
    assert "is fastest" not in printed, "one of them does not say"
    shutil.copy(quick / profile_document.FILE_NAME, slow)
    assert main(["report", str(slow), str(quick)]) == 0
    fastest = f"{slow} is fastest: 320 samples/s, 1.00 times those of {quick}."
    assert capsys.readouterr().out.startswith(fastest)
    (test := tmp_path / "test").mkdir()
    assert main(["report", str(slow), str(test), str(quick)]) == 0, "a run of test has no profile"
    told = capsys.readouterr()
    assert told.out.startswith(fastest)
    assert f"{test}: no profile.json, left out" in told.err
    document.write(profile(), slow / profile_document.FILE_NAME)
    assert main(["report", str(slow / profile_document.FILE_NAME)]) == 0
    assert "Profile of ring_ddp" in capsys.readouterr().out
    assert (slow / profile_page.FILE_NAME).read_text() == profile_page.page(loaded(profile()))


def test_what_is_no_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "add ProfilerReport or RunReport of lightning_multigpu.callbacks" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: there is no such folder" in capsys.readouterr().err


def test_a_run_without_a_profile_shows_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document.write(report_of(record(0)), tmp_path / document.FILE_NAME)
    assert main(["report", str(tmp_path)]) == 0
    assert "ring_ddp: 1 rank on 1 node" in capsys.readouterr().out
    document.write(profile(), tmp_path / profile_document.FILE_NAME)
    assert main(["report", str(tmp_path)]) == 0
    assert re.search(r"1 rank on 1 node.*Profile of ring_ddp", capsys.readouterr().out, re.DOTALL)


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        (profile_document.FILE_NAME, {"schema_version": 9}, "schema_version=9"),
        (profile_document.FILE_NAME, {**profile(), "findings": "x\ny" * 1000}, "is not as ProfilerReport writes it"),
        (profile_document.FILE_NAME, {**profile(), "step_s": 10**400}, "step_s is 10{50,80} and not"),
        (profile_document.FILE_NAME, {**profile(), "step_s": 1e308}, "ProfilerReport writes it .OverflowError"),
        (document.FILE_NAME, {"schema_version": SCHEMA_VERSION, "steps": 3}, "is not as RunReport writes it"),
        (
            document.FILE_NAME,
            {**report_of(record(0)), "aggregate": {"metrics": {"throughput/step_ms": {}}}},
            "RunReport writes it .KeyError: 'median'",
        ),
    ],
    ids=["version", "profile", "an integer", "a float", "report", "a statistic"],
)
def test_a_file_with_other_contents_is_named_in_one_line(
    name: str, contents: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback of the pack, of the length of what the file held; or of the arithmetic that its values led to."""
    document.write(contents, tmp_path / name)
    assert main(["report", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
    assert str(tmp_path) in line
    assert len(line) < 500
    assert main(["report", str(tmp_path), str(tmp_path / name)]) == 2


def test_a_file_sends_the_terminal_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names in a file that somebody had sent coloured the terminal, or set its title."""
    hostile = {"strategy": {"name": "\x1b]0;t\x07\x9b31m[/b]", "options": {}}}
    document.write({**report_of(record(0)), **hostile}, tmp_path / document.FILE_NAME)
    document.write({**profile(), **hostile}, tmp_path / profile_document.FILE_NAME)
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\ufffd]0;t\ufffd\ufffd31m[/b]") >= 2
    assert not set("\x1b\x07\x9b") & set(printed)


def test_a_browser_shows_the_page_on_a_small_screen(tmp_path: Path) -> None:
    if BROWSER is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no browser: apt-get install chromium")
    page = tmp_path / "report.html"
    # The page is not wider than the window, and no figure is empty: the browser says so in its title.
    probe = (
        "<script>addEventListener('load', () => { const boxes = [...document.querySelectorAll('svg rect')];"
        "document.title = `${document.documentElement.scrollWidth <= innerWidth} "
        "${boxes.filter(box => box.getBoundingClientRect().width > 0).length} ${boxes.length}`; })</script>"
    )
    page.write_text(profile_page.page(loaded(with_all())).replace("</body>", f"{probe}</body>"))
    common = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=400,900"]
    common += ["--disable-dev-shm-usage"]  # a container's is small
    common += [f"--user-data-dir={tmp_path}/user", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    finished = subprocess.run([*common, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=300)
    [title] = re.findall("<title>(true.*|false.*)</title>", finished.stdout)
    assert title == "true 49 49", "fits the window, boxes with a width, all boxes"
    assert "CONSOLE" not in finished.stderr
