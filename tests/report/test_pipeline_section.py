"""What a report says about pipelines: the section, its schema, the tables and the picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import pytest

from lightning_multigpu.planning.pipelines.timeline import (
    HeldBytes,
    StageMemory,
    StageRecord,
    StepTimeline,
    theoretical,
)
from lightning_multigpu.report.document import RankRecord
from lightning_multigpu.report.pipeline_section import PipelineReport
from lightning_multigpu.report.schema import as_json
from tests.report.examples import record, report_of
from tests.report.shape import assert_follows_schema
from tests.report.test_run_table import printed

SVG = "{http://www.w3.org/2000/svg}"


def ranks(
    *, schedule: str = "gpipe", num_ranks: int = 2, stages_per_rank: int = 1, count: int = 3, pipelines: int = 1
) -> list[RankRecord]:
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
            memory=StageMemory(1_000_000 * (1 + rank), 20, 3000),
            predicted=HeldBytes(1_500_000, 30, 2000),
        )
        found.append(replace(record(rank), stages=stages))
    return found


def without_steps(records: list[RankRecord]) -> list[RankRecord]:
    return [replace(r, stages=replace(r.stages, steps=())) for r in records if r.stages is not None]


def section(records: list[RankRecord]) -> dict[str, Any]:
    found = PipelineReport(records).section()
    assert found is not None
    return dict(as_json(found))


def report(records: list[RankRecord]) -> dict[str, Any]:
    return {**report_of(*records), "pipeline": section(records)}


def test_ranks_come_by_position_with_what_they_did_and_hold() -> None:
    found = section(ranks())
    assert (found["schedule"], found["stages_per_rank"]) == ("gpipe", 1)
    assert_follows_schema(report(ranks()))
    [pipeline] = found["pipelines"]
    first, last = pipeline.pop("ranks")
    assert pipeline == {"num_micro_batches": 3, "wall_s": 12.0, "bubble": 0.25, "theoretical_bubble": 0.25}
    assert first == {
        "rank": 1,
        "stages": [0],
        "parameters_bytes": 2_000_000,
        "gradients_bytes": 20,
        "optimizer_bytes": 3000,
        "predicted_parameters_bytes": 1_500_000,
        "predicted_gradients_bytes": 30,
        "predicted_optimizer_bytes": 2000,
        "forward_passes": 3,
        "backward_passes": 3,
        "weight_passes": 0,
        "forward_s": 3.0,
        "backward_s": 6.0,
        "weight_s": 0.0,
        "send_s": 0.0,
        "receive_s": 0.0,
        "idle_s": 3.0,
        "bubble": 0.25,
        "theoretical_bubble": 0.25,
    }
    assert (last["rank"], last["stages"], last["parameters_bytes"]) == (0, [1], 1_000_000)


def test_several_stages_and_several_pipelines() -> None:
    looped = ranks(schedule="zero_bubble", stages_per_rank=2, count=4, pipelines=2)
    assert_follows_schema(report(looped))
    found = section(looped)
    assert [[rank["rank"] for rank in p["ranks"]] for p in found["pipelines"]] == [[1, 0], [3, 2]]
    assert [rank["stages"] for rank in found["pipelines"][0]["ranks"]] == [[0, 2], [1, 3]]
    assert found["pipelines"][0]["ranks"][0]["weight_passes"] == 8


def test_without_a_pipeline_there_is_no_section_and_no_picture() -> None:
    assert PipelineReport([record(0)]).section() is None
    assert PipelineReport([record(0)]).picture() is None


def test_without_a_step_that_was_timed_there_is_memory_only() -> None:
    records = without_steps(ranks())
    found = section(records)
    assert found["pipelines"][0].keys() == {"ranks"}
    assert "parameters_bytes" in found["pipelines"][0]["ranks"][0]
    assert PipelineReport(records).picture() is None
    assert_follows_schema(report(records))
    text = printed(report(records))
    assert "memory of the ranks" in text
    assert "median step" not in text


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the table under a title, its head included."""
    lines = text[text.index(title) :].splitlines()[2:]
    end = next(index for index, line in enumerate(lines) if index > 2 and not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end] if "--" not in line]


def slower() -> list[RankRecord]:
    """The last backward pass of the first stage takes 2 s more than it should."""
    records = ranks()
    first = records[1].stages
    assert first is not None
    *others, last = first.steps[0].timeline
    step = StepTimeline(4, 3, (*others, replace(last, end_s=last.end_s + 2)))
    records[1] = replace(records[1], stages=replace(first, steps=(step,)))
    return records


def test_tables() -> None:
    text = printed(report(slower()))
    assert rows(text, "gpipe, 3 micro-batches: ms of the median step") == [
        ["rank", "forward", "backward", "send", "receive", "idle", "bubble %", "theory %"],
        ["1", "3,000", "8,000", "0.00", "0.00", "3,000", "21.4", "25.0"],
        ["0", "3,000", "6,000", "0.00", "0.00", "5,000", "35.7", "25.0"],
    ]
    assert "of 14,000 ms the ranks do not work for 28.6 %; in theory 25.0 %" in text
    assert rows(text, "gpipe: memory of the ranks") == [
        ["rank", "stages", "parameters", "gradients", "optimizer"],
        ["1", "0", "2.00 MB", "20.0 B", "3.00 kB"],
        ["0", "1", "1.00 MB", "20.0 B", "3.00 kB"],
    ]
    predicted = "predicted for parameters, gradients and optimizer together: 1.50 MB on rank 1, 1.50 MB on rank 0"
    assert predicted in " ".join(text.split())


def test_a_report_of_an_earlier_version_has_no_predictions() -> None:
    old = report(ranks())
    for rank in old["pipeline"]["pipelines"][0]["ranks"]:
        for what in ("parameters", "gradients", "optimizer"):
            del rank[f"predicted_{what}_bytes"]
    assert_follows_schema(old)
    assert "predicted" not in printed(old)


def test_weights_apart_have_a_column_and_pipelines_side_by_side_a_number() -> None:
    text = printed(report(ranks(schedule="zero_bubble", stages_per_rank=2, count=4, pipelines=2)))
    for pipeline in (0, 1):
        head, *_ = rows(text, f"zero_bubble, pipeline {pipeline}, 4 micro-batches: ms of the median step")
        assert "weight" in head
    assert rows(text, "zero_bubble, pipeline 1: memory of the ranks")[1][:2] == ["3", "0, 2"]


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
    picture = PipelineReport(slower()).picture()
    assert picture is not None
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
    picture = PipelineReport(ranks(schedule="zero_bubble", stages_per_rank=2, count=4)).picture()
    assert picture is not None
    assert len(boxes(picture, 1, WEIGHT)) == 16
    assert "numbers: micro-batches; darker: later stages of the rank<" in picture
    shades: dict[str, set[str]] = {}
    for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect"):
        if len(rect):
            stage = (rect[0].text or "").split("stage ")[1].split(":")[0]
            shades.setdefault(stage, set()).add(rect.attrib["fill-opacity"])
    assert shades["0"] == shades["1"] != shades["2"] == shades["3"]
    assert all(len(of_stage) == 1 for of_stage in shades.values())
