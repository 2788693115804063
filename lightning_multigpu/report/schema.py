"""The shape of ``multigpu_report.json``, and a check that names the place where a document breaks it.

Version 1::

    {
      "schema_version": 1,
      "strategy": {"name": str, "options": {option: any JSON}},   the options that are not at their default
      "world": {"size": int, "nodes": int, "hosts": [str]},       ranks; nodes; one host name a node, in node order
      "versions": {software: str},
      "steps": int,                                               optimizer steps of the fit
      "ranks": [{"rank": int, "host": str, "metrics": METRICS}],  one a rank, in rank order
      "aggregate": {"metrics": METRICS},
      "pipeline": PIPELINE                                        only where the model was split into stages
    }
    METRICS = {KEY: {"median": number, "p95": number, "mean": number, "last": number}}
    PIPELINE = {"schedule": str, "stages_per_rank": int, "pipelines": [{**STEP, "ranks": [RANK]}]}
    STEP = {"num_micro_batches": int, "wall_s": number, "bubble": number, "theoretical_bubble": number}
    RANK = {"rank": int, "stages": [int], **PASSES, **TIMES, **MEMORY}

A KEY is ``group/figure_unit`` with the groups ``throughput``, ``communication`` and ``device``. A figure that has no
meaning in a run is absent; numbers are finite. In ``aggregate`` each statistic is the sum, maximum or mean, as the
table of keys says, of the ranks that have the figure.

``median``, ``p95`` and ``mean`` are over all optimizer steps of the fit but the first, which pays for allocations and
kernel tuning (over the first if there is no other), for ``device/`` keys over all samples. The mean of a rate is total
over total time. ``p95`` is the value that 95 % of the steps stay below, so for rates it is the fast end. Above 65,536
steps median and ``p95`` rest on evenly spread steps.

The pipelines side by side, and the ranks of each by position, tell of one step: that of median wall time among the
newest nine (on GPUs, of which one in 16 is timed) with all micro-batches in one run. ``wall_s`` is from the first pass
of any rank of the pipeline to the last, and ``bubble`` 1 - busy / wall, where forward, backward and weight passes are
busy; ``theoretical_bubble`` is that of equal stages, whose messages take no time, see
:func:`lightning_multigpu.planning.timeline.theoretical`. PASSES are ``forward_passes``, ``backward_passes`` and
``weight_passes``; TIMES ``forward_s``, ``backward_s``, ``weight_s``, ``send_s``, ``receive_s`` and ``idle_s``, which
together are ``wall_s``, ``bubble`` and ``theoretical_bubble``. STEP, PASSES and TIMES are absent where no such step was
timed, in a fit of fewer than three batches of a shape for example. MEMORY is ``parameters_bytes``, ``gradients_bytes``
and ``optimizer_bytes`` that the rank held, ``activations_bytes`` that autograd kept for backward at most at a time, in
the first such step, without parameters and buffers, each piece of memory once, and on GPUs ``device_peak_bytes``, the
most that torch had allocated; what was not measured is absent.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Set
from typing import Any

from lightning_multigpu.report.statistics import STATISTICS

SCHEMA_VERSION = 1
_STEP = {"num_micro_batches", "wall_s", "bubble", "theoretical_bubble"}
_TIMES = {
    *(f"{kind}_passes" for kind in ("forward", "backward", "weight")),
    *(f"{kind}_s" for kind in ("forward", "backward", "weight", "send", "receive", "idle")),
    "bubble",
    "theoretical_bubble",
}
_MEMORY = {"parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "device_peak_bytes"}
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
    always = {"schema_version", "strategy", "world", "versions", "steps", "ranks", "aggregate"}
    _fields(report, "report", always, optional={"pipeline"})

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
    if "pipeline" in report:
        _pipeline(report["pipeline"], "pipeline")
    return dict(report)


def _pipeline(value: Any, place: str) -> None:
    section = _fields(value, place, {"schedule", "stages_per_rank", "pipelines"})
    _text(section["schedule"], f"{place}.schedule")
    _count(section["stages_per_rank"], f"{place}.stages_per_rank", at_least=1)
    for index, entry in enumerate(_list(section["pipelines"], f"{place}.pipelines")):
        inner = f"{place}.pipelines[{index}]"
        pipeline = _all_or_none(entry, inner, {"ranks"}, _STEP)
        _figures(pipeline, inner, _STEP)
        for position, of_rank in enumerate(_list(pipeline["ranks"], f"{inner}.ranks")):
            innermost = f"{inner}.ranks[{position}]"
            rank = _all_or_none(of_rank, innermost, {"rank", "stages"}, _TIMES, optional=_MEMORY)
            _count(rank["rank"], f"{innermost}.rank", at_least=0)
            for stage in _list(rank["stages"], f"{innermost}.stages"):
                _count(stage, f"{innermost}.stages", at_least=0)
            _figures(rank, innermost, _TIMES | _MEMORY)


def _all_or_none(
    value: Any, place: str, names: set[str], together: set[str], *, optional: Set[str] = frozenset()
) -> Mapping[str, Any]:
    """Fields of which those in ``together`` are all there, or none of them is."""
    mapping = _mapping(value, place)
    return _fields(mapping, place, names | together if mapping.keys() & together else names, optional=optional)


def _figures(mapping: Mapping[str, Any], place: str, names: set[str]) -> None:
    for name in mapping.keys() & names:
        if name.endswith(("_passes", "_bytes", "_batches")):
            _count(mapping[name], f"{place}.{name}", at_least=0)
        else:
            _finite(mapping[name], f"{place}.{name}")


def _metrics(value: Any, place: str) -> None:
    for key, statistics in _mapping(value, place).items():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ReportError(f"{place}: {key!r} is no key; keys look like 'throughput/samples_per_sec'")
        for name, number in _fields(statistics, f"{place}[{key!r}]", set(STATISTICS)).items():
            _finite(number, f"{place}[{key!r}].{name}")


def _finite(value: Any, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ReportError(f"{place}={value!r}: must be a finite number, or the key be absent")


def _fields(value: Any, place: str, names: set[str], *, optional: Set[str] = frozenset()) -> Mapping[str, Any]:
    mapping = _mapping(value, place)
    if missing := sorted(names - mapping.keys()):
        raise ReportError(f"{place}: {', '.join(missing)} missing")
    if unknown := sorted(str(name) for name in mapping.keys() - names - optional):
        raise ReportError(f"{place}: {', '.join(unknown)} unknown; known: {', '.join(sorted(names | optional))}")
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
