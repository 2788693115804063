"""The schema of a report, checked: keys, types and finite numbers."""

from __future__ import annotations

import math
import re
from typing import Any

from lightning_multigpu.planning.step_phases import PHASES

FIGURE = {"median": float, "p95": float, "mean": float, "last": float}
KEY = r"(throughput|communication|parameter_server|device)/[a-z0-9_]+"
STEP = {"num_micro_batches": int, "wall_s": float, "bubble": float, "theoretical_bubble": float}
TIMES = {
    **{f"{kind}_passes": int for kind in ("forward", "backward", "weight")},
    **{f"{kind}_s": float for kind in ("forward", "backward", "weight", "send", "receive", "idle")},
    "bubble": float,
    "theoretical_bubble": float,
}
MEMORY = [f"{what}_bytes" for what in ("parameters", "gradients", "optimizer", "activations", "device_peak")]
MEMORY += [f"predicted_{what}_bytes" for what in ("parameters", "gradients", "optimizer")]


def assert_follows_schema(report: dict[str, Any]) -> None:
    always = {
        "schema_version": int, "strategy": {"name": str, "options": dict},
        "world": {"size": int, "nodes": int, "hosts": [str]}, "versions": dict, "steps": int,
        "date": str, "wall_s": float, "precision": str,
        "model": {"class": str, "parameters": int, "trainable_parameters": int},
        "hardware": {
            "device": str, "threads_per_rank": int, "processor": str, "cores": int, "usable_cores": int,
            "memory_bytes": int, "gpus": [str], "system": str,
        },
        "ranks": [{"rank": int, "host": str, "metrics": dict}], "aggregate": {"metrics": dict},
    }  # fmt: skip
    staleness = {"median": int, "p95": int, "max": int}
    sometimes = {
        "pipeline": dict, "communication_ms": dict, "tensor_split": dict, "global_batch": int, "one_device": dict,
        "memory": list,
        "parameter_servers": {
            "servers": [{"server": int, "bytes_in": int, "bytes_out": int, "queue_ms": float}],
            "workers": [{"rank": int, "updates": int, "staleness": staleness}],
        },
    }  # fmt: skip
    check(report, {**always, **{name: shape for name, shape in sometimes.items() if name in report}})
    for ms in report.get("communication_ms", {}).values():
        check(ms, float)
    for rank in report.get("memory", []):
        check(rank, {"rank": int, **{name: int for name in MEMORY if name in rank}})
    if "one_device" in report:
        figures = {"ratio": float, "step_ms": float, "run_step_ms": float, "threads": int}
        told = report["one_device"]
        check(told, {"reason": str} if "reason" in told else {name: figures[name] for name in told})
    assert [rank["rank"] for rank in report["ranks"]] == list(range(report["world"]["size"]))
    assert len(report["world"]["hosts"]) == report["world"]["nodes"]
    for metrics in (report["aggregate"]["metrics"], *(rank["metrics"] for rank in report["ranks"])):
        for key, figure in metrics.items():
            assert re.fullmatch(KEY, key)
            check(figure, FIGURE)
    if "pipeline" in report:
        section = report["pipeline"]
        check(section, {"schedule": str, "stages_per_rank": int, "pipelines": list})
        for pipeline in section["pipelines"]:
            timed = "wall_s" in pipeline
            check(pipeline, {**(STEP if timed else {}), "ranks": list})
            for rank in pipeline["ranks"]:
                memory = {name: int for name in MEMORY if name in rank}
                check(rank, {"rank": int, "stages": [int], **(TIMES if timed else {}), **memory})


def assert_follows_profile_schema(profile: dict[str, Any]) -> None:
    """As in the docstring of :mod:`lightning_multigpu.report.profile.profile_document`."""
    check({name: value for name, value in profile.items() if name not in ("link_gbit", "trial", "servers")}, {
        "schema_version": int, "strategy": {"name": str, "options": dict}, "versions": dict, "origin_s": float,
        "step_s": float, "ranks": [dict],
        "operations": [{
            "operation": str, "group": str, "group_size": int, "count": float, "size_bytes": float,
            "sent_bytes": float, "memory_bytes": float, "seconds": float,
        }],
        "findings": [{"kind": str, "saving_s": float, "step_s": float, "evidence": str, "remedy": str}],
    })  # fmt: skip
    if profile["trial"] is not None:
        check(profile["trial"], {"threads": int, "step_s": float})
    if profile["link_gbit"] is not None:
        check(profile["link_gbit"], float)
    sometimes = {
        "memory": dict, "limit": list, "over_time": dict, "launches": {"kernels": int, "busy_s": float, "queued": int},
    }  # fmt: skip
    for rank in profile["ranks"]:
        check({name: value for name, value in rank.items() if name not in ("data_workers", "stages")}, {
            "rank": int, "node": int, "host": str, "threads": int, "cores": int,
            "clock": {"offset_s": float, "error_s": float}, "step_s": float, "phases_s": dict, "callbacks_s": dict,
            "transfers_s": float, "is_metered": bool, "waits_s": dict, "operators": list, "reads": list,
            "steps": [{"start_s": float, "end_s": float, "batches": int, "parts": list, "transfers": list}],
            **{name: shape for name, shape in sometimes.items() if name in rank},
        })  # fmt: skip
        assert rank["phases_s"].keys() <= {*PHASES}
        assert rank["waits_s"].keys() <= {"gradients", "activations"}
        assert rank["data_workers"] is None or rank["data_workers"] >= 0
        for seconds in (rank["phases_s"], rank["callbacks_s"], rank["waits_s"]):
            check(list(seconds.values()), [float])
        for step in rank["steps"]:
            assert [len(part) for part in step["parts"]] == [3] * len(step["parts"])
            assert [len(transfer) for transfer in step["transfers"]] == [8] * len(step["transfers"])
        for points in rank.get("over_time", {}).values():
            check(points, [[float]])


def check(value: Any, shape: Any) -> None:
    """``shape`` is a type, a list with the shape of each entry, or a dictionary with the shape of each value."""
    if isinstance(shape, dict):
        assert value.keys() == shape.keys(), value.keys() ^ shape.keys()
        for name, inner in shape.items():
            check(value[name], inner)
    elif isinstance(shape, list):
        for entry in value:
            check(entry, shape[0])
    elif shape is float:
        assert isinstance(value, int | float)
        assert math.isfinite(value)
    else:
        assert isinstance(value, shape)
        assert shape is not int or (value >= 0 and not isinstance(value, bool))
