"""``lightning-multigpu bench collectives``: time and correctness of every collective on every implementation.

Under torchrun or SLURM the bench uses the ranks that the launcher has started. On several hosts without a launcher, run
the same command on each host with ``--num-nodes``, and MASTER_ADDR and NODE_RANK in the environment. Only the first
process prints.

``--json PATH`` writes one object. Its keys are stable: a change of their meaning raises ``schema_version``; new keys do
not. ::

    {
      "schema_version": 1, "date", "command", "versions": {software: text},
      "machine": {"processor", "cores", "usable_cores", "memory_bytes", "gpus", "system"},     of the first host
      "ranks", "nodes", "ranks_per_node", "threads_per_rank", "device",
      "note",                                       text, or null: that ranks share GPUs, whose times are no forecast
      "settings": {"dtype", "repetitions", "warm_up", "timeout_s", "link_gbit"},
      "results": [
        {
          "operation": "all_reduce", "implementation": "ring",
          "size_bytes", "elements", "dtype",        S as nccl-tests counts it: the whole where ranks hold parts
          "status": "ok", "not supported" or "failed", "reason",                               text, or null
          "time_us": {"median", "p25", "p75", "min", "max", "count"} or null,                  on the slowest rank
          "algbw_gb_per_sec",                       size over median time, in 10^9 bytes
          "busbw_gb_per_sec",                       algbw times nccl-tests' factor of the operation
          "share_of_peak",                          busbw over --link-gbit
          "wrong"                                   elements of the results on all ranks that are wrong
        }
      ]
    }

With ``--support`` the results are ``{"implementation", "device", "operation", "supported", "status", "reason"}``, and a
status may also be "wrong", "not built" or "no GPU".

Functions import what needs torch, so that ``--help`` and a refusal do without.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning_multigpu.bench.collectives.implementations import IMPLEMENTATIONS, Implementation
from lightning_multigpu.bench.collectives.operations import BY_NAME
from lightning_multigpu.bench.jobs.placement import placement
from lightning_multigpu.commands.benches.bench_options import add_common_options, check_device, started, write_json
from lightning_multigpu.commands.option_parser import OptionParser, check_directories, names_of, number
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.planning.numbers import number as decimal
from lightning_multigpu.planning.numbers import size
from lightning_multigpu.report.schema import attributes
from lightning_multigpu.report.terminal import columns

if TYPE_CHECKING:
    from lightning_multigpu.bench.collectives.collective_run import CollectivePlan, CollectiveResult
    from lightning_multigpu.bench.jobs.host_agents import HostAgents

_COLUMNS = {
    "size": (">12", "(B)"), "elements": (">10", ""), "type": (">8", ""), "operation": ("<14", ""),
    "implementation": ("<14", ""), "time": (">10", "(us)"), "25 %": (">10", "(us)"), "75 %": (">10", "(us)"),
    "algbw": (">7", "(GB/s)"), "busbw": (">7", "(GB/s)"), "wrong": (">5", ""), "share": (">8", ""),
}  # fmt: skip
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the table row by row, and writes what was asked for; returns 1 where a result was wrong or a rank lost."""
    options = _parser(name).parse(arguments)
    try:
        place = placement(options.devices, options.num_nodes)
        if place.world_size < 2:
            raise UsageError("--devices=1: a collective needs 2 ranks or more; pass --devices=2")
        check_directories(options, "json")
        check_device(options)
        plan = _plan(options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    with started(place, options, [*name.split(), *arguments]) as (hosts, head):
        return (_support if options.support else _table)(hosts, head, plan, options)


def _table(hosts: HostAgents, head: dict[str, Any], plan: CollectivePlan, options: argparse.Namespace) -> int:
    from lightning_multigpu.bench.collectives.collective_run import FAILED, measure

    shown = [*_COLUMNS][: None if options.link_gbit else -1]
    for cells in (shown, [_COLUMNS[title][1] for title in shown]):
        print(f"#{_line(cells)[1:].rstrip()}", flush=True)
    entries: list[dict[str, Any]] = []
    for result in measure(hosts, plan):
        entries.append(entry(result, hosts.placement.world_size, options.dtype, options.link_gbit))
        print(line(entries[-1]), flush=True)
    print("\n".join(summary(entries, options.link_gbit)), flush=True)
    settings = {**attributes(plan, "repetitions", "warm_up", "timeout_s"), **attributes(options, "dtype", "link_gbit")}
    write_json(options.json, head, settings, entries)
    return int(any(each["wrong"] or each["status"] == FAILED for each in entries))


def _support(hosts: HostAgents, head: dict[str, Any], plan: CollectivePlan, options: argparse.Namespace) -> int:
    """A row for each back end and device, a column for each operation; below it the reasons of failures."""
    from lightning_multigpu.bench.collectives.collective_run import WRONG, support

    cells = support(hosts, plan.implementations, plan.operations, plan.timeout_s)
    rows: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        rows.setdefault((cell["implementation"], cell["device"]), []).append(cell["status"])
    titles = ["# back end", "device", *(operation.name for operation in plan.operations)]
    reasons = ["# {implementation}, {device}, {operation}: {reason}".format(**cell) for cell in cells if cell["reason"]]
    table = columns([titles, *([*place, *statuses] for place, statuses in rows.items())], "left", "left")
    print("\n".join([*table, *reasons]), flush=True)
    write_json(options.json, head, {"timeout_s": plan.timeout_s}, cells)
    return int(any(cell["status"] == WRONG for cell in cells))


def entry(result: CollectiveResult, world_size: int, dtype: str, link_gbit: float | None) -> dict[str, Any]:
    """An entry of ``results``; ``link_gbit`` is the theoretical speed of a rank's way out, or None."""
    algbw = result.size_bytes / result.seconds.median / 1e9 if result.seconds and result.numel else None
    busbw = None if algbw is None else algbw * result.operation.bus_factor(world_size)
    return {
        "operation": result.operation.name,
        "implementation": result.implementation,
        "size_bytes": result.size_bytes,
        "elements": result.numel,
        "dtype": dtype,
        **attributes(result, "status", "reason"),
        "time_us": result.seconds and asdict(result.seconds.scaled(1e6)),
        "algbw_gb_per_sec": algbw,
        "busbw_gb_per_sec": busbw,
        "share_of_peak": None if busbw is None or link_gbit is None else busbw / (link_gbit / 8),
        "wrong": result.wrong if result.reason is None else None,
    }


def line(entry: Mapping[str, Any]) -> str:
    """An entry as a row of the table."""
    cells = [str(entry[key]) for key in ("size_bytes", "elements", "dtype", "operation", "implementation")]
    if entry["time_us"] is None:
        return f"{_line(cells)} {entry['status']}: {entry['reason']}"
    cells += [f"{entry['time_us'][key]:.1f}" for key in ("median", "p25", "p75")]
    cells += ["-" if entry[key] is None else f"{entry[key]:.3f}" for key in ("algbw_gb_per_sec", "busbw_gb_per_sec")]
    share = entry["share_of_peak"]
    return _line([*cells, str(entry["wrong"]), "" if share is None else f"{100 * share:.1f} %"]).rstrip()


def summary(entries: Sequence[Mapping[str, Any]], link_gbit: float | None) -> list[str]:
    """The best bus bandwidth of each operation and implementation: "42.0 of 50.0 GB/s = 84 %"."""
    best: dict[tuple[str, str], Mapping[str, Any]] = {}
    for each in entries:
        key = each["operation"], each["implementation"]
        if (each["busbw_gb_per_sec"] or 0.0) > (best[key]["busbw_gb_per_sec"] if key in best else 0.0):
            best[key] = each
    lines = []
    for (operation, implementation), each in best.items():
        of = "" if link_gbit is None else f" of {decimal(link_gbit / 8)}"
        share = "" if link_gbit is None else f" = {100 * each['share_of_peak']:.0f} %"
        shown = f"{decimal(each['busbw_gb_per_sec'])}{of} GB/s{share} (at {size(each['size_bytes'])})"
        lines.append(f"# {operation}, {implementation}: busbw {shown}")
    return lines


def _line(cells: Iterable[str]) -> str:
    return " ".join(f"{cell:{width}}" for cell, (width, _) in zip(cells, _COLUMNS.values(), strict=False))


def size_bytes(text: str) -> int:
    """The size in bytes: "64k" and "64KiB" are 65,536, "64kB" is 64,000.

    Raises:
        argparse.ArgumentTypeError: not a number above 0 with one of the units, or no whole number of bytes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:b|([kmg])(i?b)?)?", text.strip().lower())
    unit = (1000 if match[3] == "b" else 1024) ** (1 + "kmg".index(match[2])) if match and match[2] else 1
    value = float(match[1]) * unit if match else 0.0
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(
            f"size {text!r}: pass a whole number of bytes, or one with a unit, such as 64k or 1MiB; k, M and G (or "
            "KiB, MiB, GiB) are powers of 1024, kB, MB and GB of 1000"
        )
    return int(value)


def _implementations(options: argparse.Namespace) -> list[Implementation]:
    rows = {row.name: row for row in IMPLEMENTATIONS}
    names = names_of("backends", options.backends, rows)
    if options.support:
        return [rows[name] for name in names] or list(rows.values())
    for name in names:
        if not rows[name].is_built:
            built = ", ".join(row.name for row in rows.values() if row.is_built)
            raise UsageError(
                f"--backends={name}: {rows[name].backend} is not part of this build of torch; pass some of {built}"
            )
    return [rows[name] for name in names] or [row for row in rows.values() if row.is_for(options.device)]


def _plan(options: argparse.Namespace) -> CollectivePlan:
    operations = names_of("operations", [value.replace("/", "_") for value in options.operations], BY_NAME)
    implementations = _implementations(options)
    smallest, largest = options.min_size, options.max_size
    if largest < smallest:
        raise UsageError(f"--max-size={largest} is below --min-size={smallest} (bytes); swap them")
    import torch

    from lightning_multigpu.bench.collectives.collective_run import CollectivePlan

    return CollectivePlan(
        operations=[BY_NAME[name] for name in operations or BY_NAME],
        implementations=implementations,
        sizes=[size for n in range(64) if (size := smallest * options.step_factor**n) <= largest],
        device_type=options.device,
        dtype=getattr(torch, options.dtype),
        repetitions=options.repetitions,
        warm_up=options.warm_up,
        timeout_s=options.timeout,
    )


def _parser(name: str) -> OptionParser:
    parser = OptionParser(
        prog=f"{PROGRAM} {name}",
        description="Time every collective on every implementation that is there, in turn, and check the results.\n"
        "Columns as nccl-tests prints them; times are medians over all calls, on the slowest rank.",
        epilog="back ends:\n" + "\n".join(f"  {row.name:<8} {row.summary}" for row in IMPLEMENTATIONS),
    )
    add = parser.add_argument
    add("--operations", nargs="+", default=[], metavar="NAME", help=f"some of {', '.join(BY_NAME)}; by default all")
    add("--backends", nargs="+", default=[], metavar="NAME", help="some of those below; by default all that fit")
    add("--min-size", type=size_bytes, metavar="SIZE", default=2**10, help="smallest size, such as 64k (default: 1KiB)")
    add("--max-size", type=size_bytes, metavar="SIZE", default=2**28, help="largest, such as 1MiB (default: 256MiB)")
    add("--step-factor", type=number(int, 2), default=4, metavar="N", help="from one size to the next (default: 4)")
    add("--dtype", choices=DTYPES, default="float32", help="of the tensors (default: float32)")
    add_common_options(parser, timed="calls", timeout_s=60.0)
    add("--link-gbit", type=number(float, 0, above=True), metavar="N", help="theoretical Gbit/s: shows the share of it")
    add("--support", action="store_true", help="print which back end offers what, found by trying, and no times")
    return parser
