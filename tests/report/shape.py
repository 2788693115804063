"""Documents that follow their schema: keys, types and finite numbers."""

from __future__ import annotations

from typing import Any

from lightning_multigpu.planning.step_phases import PHASES
from lightning_multigpu.report.document import RunDocument
from lightning_multigpu.report.profile.profile_document import ProfileDocument
from lightning_multigpu.report.schema import as_json, from_json


def assert_follows_schema(report: dict[str, Any]) -> None:
    check(RunDocument, report)
    assert [rank["rank"] for rank in report["ranks"]] == list(range(report["world"]["size"]))
    assert len(report["world"]["hosts"]) == report["world"]["nodes"]


def assert_follows_profile_schema(profile: dict[str, Any]) -> None:
    check(ProfileDocument, profile)
    for rank in profile["ranks"]:
        assert rank["phases_s"].keys() <= {*PHASES}
        assert rank["waits_s"].keys() <= {"gradients", "activations"}


def check(kind: type, document: dict[str, Any]) -> None:
    """Whether the schema has all that is in the document, and whole numbers are not below 0."""
    assert as_json(from_json(kind, document)) == document
    values = [document]
    while values:
        value = values.pop()
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        assert not isinstance(value, int) or value >= 0
