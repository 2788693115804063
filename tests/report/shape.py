"""Documents that follow their schema: keys, types and finite numbers."""

from __future__ import annotations

from typing import Any

from lightning_multigpu.report.document import RunDocument
from lightning_multigpu.report.schema import as_json, from_json


def assert_follows_schema(report: dict[str, Any]) -> None:
    assert as_json(from_json(RunDocument, report)) == report
    assert [rank["rank"] for rank in report["ranks"]] == list(range(report["world"]["size"]))
    assert len(report["world"]["hosts"]) == report["world"]["nodes"]
