"""Dataclasses as JSON, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pytest

from lightning_multigpu.report.schema import ReportError, as_json, from_json


class Point(NamedTuple):
    x: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Inner:
    class_: str


@dataclass(frozen=True, kw_only=True)
class Outer:
    kind: Literal["a", "b"]
    count: int
    points: Sequence[Point]
    inner: Inner | None
    by_name: Mapping[str, float]
    left_out: Sequence[Inner] | None = None
    version: int = 1


WHOLE = {
    "kind": "a", "count": 3, "points": [[0.5, "p"]], "inner": {"class": "C"}, "by_name": {"k": 1.5},
    "left_out": [{"class": "D"}], "version": 2,
}  # fmt: skip


def test_a_document_is_read_as_it_was_written() -> None:
    found = from_json(Outer, WHOLE)
    assert found.points == [Point(0.5, "p")]
    assert found.inner == Inner(class_="C")
    assert as_json(found) == WHOLE
    least = {"kind": "b", "count": 0, "points": [], "inner": None, "by_name": {}}
    assert as_json(from_json(Outer, {**least, "new": 1})) == {**least, "version": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "c"}, "the document, kind is 'c' and not one of a, b"),
        ({"count": True}, "the document, count is True and not int"),
        ({"by_name": {"k": float("nan")}}, "the document, by_name, k is nan and not float"),
        ({"points": [[0.5]]}, r"the document, points\[0\] is \[0.5\] and not an array of 2"),
        ({"points": {}}, "the document, points is {} and not an array"),
        ({"inner": {}}, "the document, inner has no 'class'"),
        ({"inner": "x" * 1000}, "the document, inner is .{80} and not an object"),
    ],
)
def test_what_does_not_follow_the_schema_is_named_with_its_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ReportError, match=f"^{message}$"):
        from_json(Outer, {**WHOLE, **changes})
