"""What a profile says about pipelines: the section, its table and the picture."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from lightning_multigpu.planning.pipelines.timeline import StageRecord, StepTimeline, theoretical
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


def test_the_picture_has_theory_above_what_was_measured_on_one_scale() -> None:
    """Forward boxes are 1 s wide; backward of the first stage 2 s, but for its last."""
    root = ElementTree.fromstring(timed_pipelines([(rank, 0, each) for rank, each in enumerate(slower())])[0].picture())
    titles = [each for each in root.iter(f"{SVG}text") if each.attrib["font-weight"] == "bold"]
    assert [title.text for title in titles] == [
        "gpipe, 3 micro-batches, in theory (the same work in equal stages, messages in no time): bubble 25.0 %",
        "gpipe, 3 micro-batches, as measured: bubble 28.6 %",
    ]
    pixels = 1100 / 14  # a second: the longer of the two steps takes the whole width
    boxes = [each for each in root.iter(f"{SVG}rect") if len(each)]
    at_s, seconds = ([float(each.attrib[name]) / pixels for each in boxes] for name in ("x", "width"))
    forward = [i for i, each in enumerate(boxes) if ": forward" in (each[0].text or "")]
    unit_s = 20 / 18  # of the same work, dealt out evenly
    assert [seconds[i] for i in forward] == pytest.approx([unit_s] * 6 + [1] * 6, abs=1e-3)
    assert [at_s[i] - 70 / pixels for i in forward[6:]] == pytest.approx([0, 1, 2, 1, 2, 3], abs=1e-3)
    assert max(seconds[len(boxes) // 2 :]) == pytest.approx(4, abs=1e-3)
    assert boxes[forward[7]][0].text == "rank 1, stage 0: forward, micro-batch 1, 1000.000 ms"
