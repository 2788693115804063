"""The shape of ``multigpu_report.json``, and a check that names the place where a document breaks it.

Version 1::

    {
      "schema_version": 1,
      "strategy": {"name": str, "options": {option: any JSON}},   the options that are not at their default
      "world": {"size": int, "nodes": int, "hosts": [str]},       ranks; nodes; one host name a node, in node order
      "versions": {software: str},
      "steps": int,                                               optimizer steps of the fit
      "ranks": [{"rank": int, "host": str, "metrics": METRICS}],  one a rank, in rank order
      "aggregate": {"metrics": METRICS}
    }
    METRICS = {KEY: {"median": number, "p95": number, "mean": number, "last": number}}

A KEY is ``group/figure_unit`` with the groups ``throughput``, ``communication`` and ``device``. A figure that has no
meaning in a run is absent; numbers are finite. In ``aggregate`` each statistic is the sum, maximum or mean, as the
table of keys says, of the ranks that have the figure.

``median``, ``p95`` and ``mean`` are over all optimizer steps of the fit but the first, which pays for allocations and
kernel tuning (over the first if there is no other), for ``device/`` keys over all samples. The mean of a rate is total
over total time. ``p95`` is the value that 95 % of the steps stay below, so for rates it is the fast end. Above 65,536
steps median and ``p95`` rest on evenly spread steps.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from lightning_multigpu.report.statistics import STATISTICS

SCHEMA_VERSION = 1
_KEY = re.compile(r"(throughput|communication|device)/[a-z0-9_]+")


class ReportError(ValueError):
    """A document is no report, or one of a version that is not known; the message says where and why."""


def validate(document: Mapping[str, Any] | str) -> dict[str, Any]:
    """Checks a report, given as a mapping or as JSON text, and returns it as a dictionary.

    Raises:
        ReportError: it breaks the schema.
    """
    if isinstance(document, str):
        try:
            document = json.loads(document)
        except json.JSONDecodeError as error:
            raise ReportError(f"the report is no JSON: {error}") from error
    report = _mapping(document, "report")
    version = report.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ReportError(f"schema_version={version!r}: only version {SCHEMA_VERSION} can be read")
    _fields(report, "report", {"schema_version", "strategy", "world", "versions", "steps", "ranks", "aggregate"})

    strategy = _fields(report["strategy"], "strategy", {"name", "options"})
    _text(strategy["name"], "strategy.name")
    _mapping(strategy["options"], "strategy.options")
    world = _fields(report["world"], "world", {"size", "nodes", "hosts"})
    size = _count(world["size"], "world.size", at_least=1)
    nodes = _count(world["nodes"], "world.nodes", at_least=1)
    _length(_texts(world["hosts"], "world.hosts"), nodes, "world.hosts", "world.nodes")
    for name, text in _mapping(report["versions"], "versions").items():
        _text(text, f"versions.{name}")
    _count(report["steps"], "steps", at_least=0)

    ranks = _length(_list(report["ranks"], "ranks"), size, "ranks", "world.size")
    for index, entry in enumerate(ranks):
        place = f"ranks[{index}]"
        rank = _fields(entry, place, {"rank", "host", "metrics"})
        if _count(rank["rank"], f"{place}.rank", at_least=0) != index:
            raise ReportError(f"{place}.rank={rank['rank']}: ranks come in order, from 0 on")
        _text(rank["host"], f"{place}.host")
        _metrics(rank["metrics"], f"{place}.metrics")
    _metrics(_fields(report["aggregate"], "aggregate", {"metrics"})["metrics"], "aggregate.metrics")
    return dict(report)


def _metrics(value: Any, place: str) -> None:
    for key, statistics in _mapping(value, place).items():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ReportError(f"{place}: {key!r} is no key; keys look like 'throughput/samples_per_sec'")
        for name, number in _fields(statistics, f"{place}[{key!r}]", set(STATISTICS)).items():
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise ReportError(f"{place}[{key!r}].{name}={number!r}: must be a finite number, or the key be absent")


def _fields(value: Any, place: str, names: set[str]) -> Mapping[str, Any]:
    mapping = _mapping(value, place)
    if missing := sorted(names - mapping.keys()):
        raise ReportError(f"{place}: {', '.join(missing)} missing")
    if unknown := sorted(str(name) for name in mapping.keys() - names):
        raise ReportError(f"{place}: {', '.join(unknown)} unknown; known: {', '.join(sorted(names))}")
    return mapping


def _mapping(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ReportError(f"{place}={value!r}: must be an object")
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise ReportError(f"{place}={value!r}: must be a list")
    return value


def _texts(value: Any, place: str) -> list[Any]:
    return [_text(text, f"{place}[{index}]") for index, text in enumerate(_list(value, place))]


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise ReportError(f"{place}={value!r}: must be a text that is not empty")
    return value


def _count(value: Any, place: str, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ReportError(f"{place}={value!r}: must be a whole number, at least {at_least}")
    return value


def _length(value: list[Any], length: int, place: str, same_as: str) -> list[Any]:
    if len(value) != length:
        raise ReportError(f"{place} has {len(value)} entries, {same_as} says {length}")
    return value
