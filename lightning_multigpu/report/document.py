"""The report of one run as a JSON document, written to a file and read back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_multigpu.planning.pipelines.timeline import StageMemory, StageRecord
from lightning_multigpu.report.schema import SCHEMA_VERSION, ReportError
from lightning_multigpu.report.statistics import Aggregation, Statistics, aggregate_ranks

FILE_NAME = "multigpu_report.json"


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """The part of one rank in a report: its place and its measurements."""

    rank: int
    node: int
    host: str
    steps: int
    metrics: Mapping[str, Statistics]
    step_samples: int | None = None
    """The most samples that it has trained on in one optimizer step; None where that is not known."""
    communication_ms: Mapping[str, float] = field(default_factory=dict)
    """Its communication in a step by purpose, in ms."""
    stages: StageRecord | None = None
    """The steps and the memory of its stages, under a pipeline."""
    memory: StageMemory | None = None
    """The memory that it held at the end of training; None under a pipeline."""


def build(
    records: Sequence[RankRecord],
    *,
    strategy: str,
    options: Mapping[str, Any],
    versions: Mapping[str, str],
    about: Mapping[str, Any],
    aggregations: Mapping[str, Aggregation],
    **sections: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The document of :mod:`lightning_multigpu.report.schema`.

    Args:
        records: one a rank, in any order.
        strategy: the name to pass to ``Trainer(strategy=...)``, or the class where it has none.
        options: the strategy's options that are not at their default, JSON-able.
        versions: of the software, by name.
        about: ``date``, ``wall_s``, ``model``, ``precision`` and ``hardware`` of the run.
        aggregations: how each key's values become the run's; the keys of the report come in this order.
        sections: ``pipeline``, ``tensor_split``, ``parameter_servers`` and ``one_device``; None leaves one out.

    Raises:
        ValueError: there is no record, two have the same rank, or one is missing of a synchronous run.
    """
    in_order = sorted(records, key=lambda record: record.rank)
    ranks = [record.rank for record in in_order]
    is_asynchronous = bool((sections.get("parameter_servers") or {}).get("workers"))  # then ranks may be lost
    if not ranks or ranks != (sorted({*ranks}) if is_asynchronous else list(range(len(ranks)))):
        raise ValueError(f"ranks={ranks}: a report needs one record of each rank from 0 on")
    hosts: dict[int, str] = {}
    for record in in_order:
        hosts.setdefault(record.node, record.host)
    report = {
        "schema_version": SCHEMA_VERSION,
        "strategy": {"name": strategy, "options": dict(options)},
        "world": {"size": len(ranks), "nodes": len(hosts), "hosts": [hosts[node] for node in sorted(hosts)]},
        **about,
        "versions": dict(versions),
        "steps": (sum if is_asynchronous else max)(record.steps for record in in_order),
        "ranks": [
            {
                "rank": record.rank,
                "host": record.host,
                "metrics": {key: dict(record.metrics[key]) for key in aggregations if key in record.metrics},
            }
            for record in in_order
        ],
        "aggregate": {"metrics": aggregate_ranks([record.metrics for record in in_order], aggregations)},
    }
    samples = [record.step_samples for record in in_order]
    if not is_asynchronous and all(samples_of_rank is not None for samples_of_rank in samples):
        report["global_batch"] = sum(filter(None, samples))
    purposes = dict.fromkeys(purpose for record in in_order for purpose in record.communication_ms)
    if purposes:
        report["communication_ms"] = {
            purpose: sum(record.communication_ms.get(purpose, 0.0) for record in in_order) / len(in_order)
            for purpose in purposes
        }
    if all(record.memory is not None for record in in_order):
        report["memory"] = [
            {"rank": r.rank, **{name: size for name, size in asdict(r.memory).items() if size is not None}}
            for r in in_order
            if r.memory is not None
        ]
    return {**report, **{name: dict(section) for name, section in sections.items() if section is not None}}


def write(report: Mapping[str, Any], path: Path, *, indent: int | None = 2) -> None:
    """Writes the document atomically: readers see the old file or the new one, never a part of it.

    Args:
        report: of numbers, texts, lists and mappings.
        path: of the file.
        indent: None for one line, for what is too long to be read.

    Raises:
        ValueError: a number is not finite.
        OSError: the folder cannot be made or written to.
    """
    write_bytes((json.dumps(report, indent=indent, allow_nan=False) + "\n").encode(), path)


def write_bytes(contents: bytes, path: Path) -> None:
    """Writes a file atomically.

    Raises:
        OSError: the folder cannot be made or written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    with open(temporary, "xb") as file:  # with the rights that the umask leaves, and no link is followed
        try:
            file.write(contents)
            file.flush()
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def read(path: Path, *, kind: str = "report", schema_version: int = SCHEMA_VERSION) -> dict[str, Any]:
    """Reads a document back.

    Args:
        path: of the file.
        kind: what it is, for messages.
        schema_version: the version that can be read.

    Raises:
        ReportError: it is no JSON, or of another version.
        OSError: there is no such file, or it cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no text, no JSON, a number or a depth beyond Python's limits
        raise ReportError(f"{path}: the {kind} is no JSON: {error}") from error
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != schema_version:
        raise ReportError(f"{path}: schema_version={version!r:.80}: only version {schema_version} can be read")
    return dict(found)
