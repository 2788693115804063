"""What a profile says about pipelines: the section, its table and the picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from lightning_multigpu.planning.pipelines.timeline import (
    HeldBytes,
    StageMemory,
    StageRecord,
    StepTimeline,
    theoretical,
)
from lightning_multigpu.report.document import RunDocument
from lightning_multigpu.report.pipelines import timed_pipelines
from lightning_multigpu.report.text import text
from tests.report.examples import document_of, record
from tests.report.profiles import figures

SVG = "{http://www.w3.org/2000/svg}"


def ranks(
    *, schedule: str = "gpipe", num_ranks: int = 2, stages_per_rank: int = 1, count: int = 3, pipelines: int = 1
) -> list[StageRecord]:
    """Ranks that do what theory says, a second a forward pass; the world's last ones have the first stages."""
    timelines = theoretical(schedule, num_ranks, stages_per_rank, count)
    return [
        StageRecord(
            pipeline=rank // num_ranks,
            position=num_ranks - 1 - rank % num_ranks,
            num_ranks=num_ranks,
            stages_per_rank=stages_per_rank,
            schedule=schedule,
            steps=(StepTimeline(4, count, timelines[num_ranks - 1 - rank % num_ranks]),),
            memory=StageMemory(1_000_000, 20, 3000, 40_000),
            predicted=HeldBytes(1_500_000, 30, 2000),
        )
        for rank in range(pipelines * num_ranks)
    ]


def slower() -> list[StageRecord]:
    """The last backward pass of the first stage takes 2 s more than it should."""
    last, first = ranks()
    [step] = first.steps
    *before, longest = step.timeline
    timeline = (*before, replace(longest, end_s=longest.end_s + 2))
    return [last, replace(first, steps=(replace(step, timeline=timeline),))]


def report(stages: list[StageRecord]) -> RunDocument:
    ranks = enumerate(stages)
    return document_of(*(replace(record(rank), profiled=figures(rank), stages=each) for rank, each in ranks))


def picture_of(stages: list[StageRecord]) -> str:
    return timed_pipelines([(rank, 0, each) for rank, each in enumerate(stages)])[0].picture()


def test_without_a_step_that_was_timed_there_is_no_section() -> None:
    assert "A step of gpipe" not in text(report([replace(each, steps=()) for each in ranks()]))


def rows(shown: str, title: str) -> list[list[str]]:
    """The cells of the table under a title, its head included, and the note below."""
    section = shown[shown.index(title) :].partition("\n\n")[0]
    return [re.split("  +", line) for line in section.splitlines()[1:]]


def test_the_table_has_a_row_for_each_rank() -> None:
    assert rows(text(report(slower())), "A step of gpipe with 3 micro-batches, in ms") == [
        ["rank", "forward", "backward", "idle", "bubble"],
        ["1", "3,000", "8,000", "3,000", "21.4 %"],
        ["0", "3,000", "6,000", "5,000", "35.7 %"],
        ["of 14,000 ms the ranks do not work for 28.6 %; in theory 25.0 %"],
        ["from the first pass to the last: the rest of a step is loading, hooks and the optimizer"],
    ]


def test_weights_apart_have_a_column_and_pipelines_side_by_side_a_number() -> None:
    shown = text(report(ranks(schedule="zero_bubble", stages_per_rank=2, count=4, pipelines=2)))
    for pipeline, first in enumerate("13"):
        head, row, *_ = rows(shown, f"A step of zero_bubble in pipeline {pipeline} with 4 micro-batches, in ms")
        assert "weight" in head
        assert row[0] == first


def boxes(picture: str, panel: int, fill: str) -> list[tuple[float, float, str]]:
    """Of a panel, left edge, width and text of the boxes of a colour, by rank from left to right."""
    root = ElementTree.fromstring(picture)
    titles = [float(text.attrib["y"]) for text in root.iter(f"{SVG}text") if text.attrib["font-weight"] == "bold"]
    borders = [*titles, float(root.attrib["height"])]
    return [
        (float(rect.attrib["x"]), float(rect.attrib["width"]), rect[0].text or "")
        for rect in root.iter(f"{SVG}rect")
        if len(rect) and borders[panel] < float(rect.attrib["y"]) < borders[panel + 1] and rect.attrib["fill"] == fill
    ]


FORWARD, BACKWARD = "#56b4e9", "#e69f00"


def test_the_picture_has_theory_above_what_was_measured_on_one_scale() -> None:
    picture = picture_of(slower())
    titles = [t.text for t in ElementTree.fromstring(picture).iter(f"{SVG}text") if t.attrib["font-weight"] == "bold"]
    assert titles == [
        "gpipe, 3 micro-batches, in theory (the same work in equal stages, messages in no time): bubble 25.0 %",
        "gpipe, 3 micro-batches, as measured: bubble 28.6 %",
    ]
    pixels = 1100 / 14  # a second: the longer of the two steps takes the whole width
    found = boxes(picture, 1, FORWARD)
    assert [(x - 70) / pixels for x, _, _ in found] == pytest.approx([0, 1, 2, 1, 2, 3], abs=1e-3)
    assert [width / pixels for _, width, _ in found] == pytest.approx([1] * 6, abs=1e-3)
    assert found[1][2] == "rank 1, stage 0: forward, micro-batch 1, 1000.000 ms"
    assert boxes(picture, 1, BACKWARD)[2][1] / pixels == pytest.approx(4, abs=1e-3)
    unit_s = 20 / 18  # of the same work, dealt out evenly
    assert [w / pixels for _, w, _ in boxes(picture, 0, FORWARD)] == pytest.approx([unit_s] * 6, abs=1e-3)
    assert [w / pixels for _, w, _ in boxes(picture, 0, BACKWARD)] == pytest.approx([2 * unit_s] * 6, abs=1e-3)
