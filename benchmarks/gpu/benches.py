"""Checks of the package's benches: one rank, and ranks that share the card."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from typing import Any

from benchmarks.gpu.table import Check, Place

_DEADLINE_S, _DEADLINE_ON_CARDS_S = 180.0, 45.0
_COLLECTIVES = ("collectives", "--operations", "all_reduce", "all_gather", "--min-size=4k")
_COLLECTIVES += ("--max-size=1M", "--step-factor=16", "--repetitions=2", "--timeout=20")
_STRATEGIES = ("strategies", "--strategies", "ddp", "ring_ddp", "--batch-size=8", "--repetitions=2", "--steps=2")


def run(place: Place, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``lightning-multigpu bench`` on the card."""
    command = [sys.executable, "-m", "lightning_multigpu", "bench", *arguments, f"--devices={ranks}"]
    command += [f"--device={place.card.kind}", f"--json={place.directory / 'results.json'}"]
    limit_s = min(place.left_s, _DEADLINE_ON_CARDS_S if place.card.is_gpu else _DEADLINE_S)
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s)


def results(place: Place, ranks: int, *arguments: str) -> list[dict[str, Any]]:
    """The rows of the document; checks the exit status, and the note about ranks that share."""
    ran = run(place, ranks, *arguments)
    assert ran.returncode == 0, f"exit status {ran.returncode}: {(ran.stderr or ran.stdout).strip()[-300:]}"
    document = json.loads((place.directory / "results.json").read_text())
    shares = place.card.is_gpu and ranks > place.card.count
    assert ("share" in (document["note"] or "")) == shares, f"note {document['note']!r}"
    assert (f"# {document['note']}" in ran.stdout) == shares, "the note is not printed"
    found: list[dict[str, Any]] = document["results"]
    return found


def sharing_ranks(place: Place) -> int:
    return max(2, place.card.count + 1)


def one_collective_rank(place: Place) -> str:
    ran = run(place, 1, *_COLLECTIVES)
    assert ran.returncode == 2, f"exit status {ran.returncode}"
    assert "a collective needs 2 ranks or more" in ran.stderr, ran.stderr
    return "refused, as documented"


def collectives(place: Place) -> str:
    ranks = sharing_ranks(place)
    rows = results(place, ranks, *_COLLECTIVES)
    for row in rows:
        if row["status"] == "ok":
            assert row["wrong"] == 0, f"wrong elements: {row}"
            assert row["time_us"]["median"] > 0, f"no time: {row}"
        else:
            assert _is_expected(place, ranks, row), f"{row}"
    timed = {row["implementation"] for row in rows if row["status"] == "ok"}
    return f"{ranks} ranks: {', '.join(sorted(timed))}"


def _is_expected(place: Place, ranks: int, row: dict[str, Any]) -> bool:
    """Whether NCCL has said why it does not let ranks share, or Gloo has no such operation for GPUs."""
    if row["implementation"] == "nccl":
        return place.card.backend_of(ranks) != "nccl" and "share a GPU" in row["reason"]
    return place.card.is_gpu and row["operation"] != "all_reduce" and row["status"] == "not supported"


def strategies(place: Place, *, shares: bool) -> str:
    rows = results(place, sharing_ranks(place) if shares else 1, *_STRATEGIES)
    for row in rows:
        assert row["status"] == "ok", f"{row['strategy']}: {row['status']}: {row['reason']}"
        assert row["step_ms"]["median"] > 0, f"no time: {row}"
    return ", ".join(f"{row['strategy']} {row['step_ms']['median']:.2f} ms" for row in rows)


def checks() -> list[Check]:
    functions = {
        "bench collectives, one rank": one_collective_rank,
        "bench collectives, sharing ranks": collectives,
        "bench strategies, one rank": partial(strategies, shares=False),
        "bench strategies, sharing ranks": partial(strategies, shares=True),
    }
    return [
        Check(row="machine", column=column, function=function, deadline_s=_DEADLINE_S)
        for column, function in functions.items()
    ]
