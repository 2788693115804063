"""What a profile says about pipelines: the section, its table and the picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from typing import Any

import pytest

from lightning_multigpu.planning.pipelines.timeline import (
    HeldBytes,
    StageMemory,
    StageRecord,
    StepTimeline,
    theoretical,
)
from lightning_multigpu.report.profile import profile_text
from lightning_multigpu.report.profile.pipelines import timed_pipelines
from lightning_multigpu.report.profile.profile_document import MeasuredRank
from lightning_multigpu.report.schema import from_json
from tests.report.profiles import built, loaded, told

SVG = "{http://www.w3.org/2000/svg}"


def ranks(
    *, schedule: str = "gpipe", num_ranks: int = 2, stages_per_rank: int = 1, count: int = 3, pipelines: int = 1
) -> list[dict[str, Any]]:
    """Ranks that do what theory says, a second a forward pass; the world's last ones have the first stages."""
    timelines = theoretical(schedule, num_ranks, stages_per_rank, count)
    found = []
    for rank in range(pipelines * num_ranks):
        position = num_ranks - 1 - rank % num_ranks
        stages = StageRecord(
            pipeline=rank // num_ranks,
            position=position,
            num_ranks=num_ranks,
            stages_per_rank=stages_per_rank,
            schedule=schedule,
            steps=(StepTimeline(4, count, timelines[position]),),
            memory=StageMemory(1_000_000, 20, 3000, 40_000),
            predicted=HeldBytes(1_500_000, 30, 2000),
        )
        found.append({**told(rank), "stages": asdict(stages)})
    return found


def slower() -> list[dict[str, Any]]:
    """The last backward pass of the first stage takes 2 s more than it should."""
    found = ranks()
    found[1]["stages"]["steps"][0]["timeline"][-1]["end_s"] += 2
    return found


def picture_of(measured: list[dict[str, Any]]) -> str:
    return timed_pipelines([from_json(MeasuredRank, rank) for rank in measured])[0].picture()


def test_ranks_come_by_position_with_what_they_did() -> None:
    [pipeline] = built(ranks(), "gpipe")["pipelines"]
    first, last = pipeline.pop("ranks")
    assert pipeline == {
        "schedule": "gpipe", "num_micro_batches": 3, "wall_s": 12.0, "bubble": 0.25, "theoretical_bubble": 0.25
    }  # fmt: skip
    seconds = {"forward": 3.0, "backward": 6.0, "weight": 0.0, "send": 0.0, "receive": 0.0, "idle": 3.0}
    assert first == {"rank": 1, "seconds": seconds, "bubble": 0.25}
    assert last["rank"] == 0


def test_without_a_step_that_was_timed_there_is_no_section() -> None:
    measured = ranks()
    for rank in measured:
        rank["stages"]["steps"] = []
    for found in (built(measured, "gpipe"), built([told(0)], "single_device")):
        assert "pipelines" not in found
        assert "A step of gpipe" not in profile_text.text(loaded(found))


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the table under a title, its head included, and the note below."""
    section = text[text.index(title) :].partition("\n\n")[0]
    return [re.split("  +", line) for line in section.splitlines()[1:]]


def test_the_table_has_a_row_for_each_rank() -> None:
    text = profile_text.text(loaded(built(slower(), "gpipe")))
    assert rows(text, "A step of gpipe with 3 micro-batches, in ms") == [
        ["rank", "forward", "backward", "idle", "bubble"],
        ["1", "3,000", "8,000", "3,000", "21.4 %"],
        ["0", "3,000", "6,000", "5,000", "35.7 %"],
        ["of 14,000 ms the ranks do not work for 28.6 %; in theory 25.0 %"],
        ["from the first pass to the last: the rest of a step is loading, hooks and the optimizer"],
    ]


def test_weights_apart_have_a_column_and_pipelines_side_by_side_a_number() -> None:
    found = built(ranks(schedule="zero_bubble", stages_per_rank=2, count=4, pipelines=2), "zero_bubble")
    assert [[rank["rank"] for rank in pipeline["ranks"]] for pipeline in found["pipelines"]] == [[1, 0], [3, 2]]
    text = profile_text.text(loaded(found))
    for pipeline, first in enumerate("13"):
        head, row, *_ = rows(text, f"A step of zero_bubble in pipeline {pipeline} with 4 micro-batches, in ms")
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


FORWARD, BACKWARD, WEIGHT = "#56b4e9", "#e69f00", "#009e73"


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


def test_later_stages_are_darker_and_weights_have_their_colour() -> None:
    picture = picture_of(ranks(schedule="zero_bubble", stages_per_rank=2, count=4))
    assert len(boxes(picture, 1, WEIGHT)) == 16
    assert "numbers: micro-batches; darker: later stages of the rank<" in picture
    shades: dict[str, set[str]] = {}
    for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect"):
        if len(rect):
            stage = (rect[0].text or "").split("stage ")[1].split(":")[0]
            shades.setdefault(stage, set()).add(rect.attrib["fill-opacity"])
    assert shades["0"] == shades["1"] != shades["2"] == shades["3"]
    assert all(len(of_stage) == 1 for of_stage in shades.values())
