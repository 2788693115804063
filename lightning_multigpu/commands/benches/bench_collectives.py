"""``lightning-multigpu bench collectives``: time and correctness of every collective on every implementation.

Under torchrun or SLURM the bench uses the ranks that the launcher has started. On several hosts without a launcher, run
the same command on each host with ``--num-nodes``, and MASTER_ADDR and NODE_RANK in the environment. Only the first
process prints.

``--json PATH`` writes one object. Its keys are stable: a change of their meaning raises ``schema_version``; new keys do
not. ::

    {
      "schema_version": 1,
      "date": "2026-11-21T12:00:00Z", "command": "lightning-multigpu bench collectives ...",
      "machine": {"processor": str, "cores": int, "usable_cores": int, "memory_bytes": int, "gpus": [str],
                  "system": str},                           of the first host
      "versions": {software: str},
      "ranks": int, "nodes": int, "ranks_per_node": int, "threads_per_rank": int, "device": "cpu" or "cuda",
      "note": str or null,                                   that ranks share GPUs, whose times are no forecast
      "settings": {"dtype": str, "repetitions": int, "warm_up": int, "timeout_s": number, "link_gbit": number or null},
      "results": [
        {
          "operation": "all_reduce", "implementation": "ring",
          "size_bytes": int, "elements": int, "dtype": str,  S as nccl-tests counts it: the whole where ranks hold parts
          "status": "ok", "not supported", "failed", "crashed" or "timed out",
          "reason": str or null,                             why, where the status is not "ok"
          "time_us": {"median", "p25", "p75", "min", "max": number, "count": int} or null,
                                                             of one call, on the slowest rank
          "algbw_gb_per_sec": number or null,                size over median time, in 10^9 bytes
          "busbw_gb_per_sec": number or null,                algbw times nccl-tests' factor of the operation
          "share_of_peak": number or null,                   busbw over --link-gbit
          "wrong": int or null                               elements of the results on all ranks that are wrong
        }
      ]
    }

With ``--support`` the results are ::

      {"implementation": str, "device": "cpu" or "cuda", "operation": str, "supported": bool,
       "status": as above, or "wrong", "not built", "no GPU", "reason": str or null}

Functions import what needs torch, so that ``--help`` and a refusal do without.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psutil

from lightning_multigpu.bench.collectives import implementations as table_of_implementations
from lightning_multigpu.bench.collectives.implementations import Implementation
from lightning_multigpu.bench.collectives.operations import BY_NAME, Operation
from lightning_multigpu.bench.jobs.placement import Placement, placement
from lightning_multigpu.bench.sizes import size_bytes, size_text
from lightning_multigpu.commands.benches.bench_options import add_common_options, check_device, started, write_json
from lightning_multigpu.commands.option_parser import OptionParser, check_directories, names_of, number
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.report.schema import attributes

if TYPE_CHECKING:
    from lightning_multigpu.bench.collectives.collective_run import CollectivePlan, CollectiveResult
    from lightning_multigpu.bench.jobs.host_agents import HostAgents

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
_TENSORS_A_RANK = 2  # one goes in, one comes out


def run(name: str, arguments: Sequence[str]) -> int:
    """Prints the table row by row, and writes what was asked for; returns 1 where a result was wrong."""
    options = _parser(name).parse(arguments)
    try:
        place = placement(options.devices, options.num_nodes)
        if place.world_size < 2:
            raise UsageError("--devices=1: a collective needs 2 ranks or more; pass --devices=2")
        check_directories(options, "json")
        check_device(options)
        plan = _plan(options, _operations(options), _implementations(options))
        _check_memory(options, plan, place)
    except ValueError as error:
        raise UsageError(str(error)) from error
    with started(place, options, [*name.split(), *arguments]) as (hosts, head):
        return (_support if options.support else _table)(hosts, head, plan, options)


def _table(hosts: HostAgents, head: dict[str, Any], plan: CollectivePlan, options: argparse.Namespace) -> int:
    from lightning_multigpu.bench.collectives.collective_run import measure
    from lightning_multigpu.bench.collectives.collective_table import CollectivesTable

    world_size = hosts.placement.world_size
    table = CollectivesTable(world_size=world_size, dtype=plan.dtype, link_gbit=options.link_gbit)
    print("\n".join(table.head()), flush=True)
    results: list[CollectiveResult] = []
    for result in measure(hosts, plan):
        results.append(result)
        print(table.row(result), flush=True)
    print("\n".join(table.summary(results)), flush=True)
    settings = {
        "dtype": options.dtype,
        **attributes(plan, "repetitions", "warm_up", "timeout_s"),
        "link_gbit": options.link_gbit,
    }
    write_json(options.json, head, settings, [table.as_json(result) for result in results])
    return int(any(result.wrong for result in results))


def _support(hosts: HostAgents, head: dict[str, Any], plan: CollectivePlan, options: argparse.Namespace) -> int:
    from lightning_multigpu.bench.collectives import support

    cells = support.try_all(hosts, plan.implementations, plan.operations, plan.timeout_s)
    print("\n".join(support.lines(cells)), flush=True)
    write_json(options.json, head, {"timeout_s": plan.timeout_s}, cells)
    return int(any(cell["status"] == support.WRONG for cell in cells))


def _operations(options: argparse.Namespace) -> list[Operation]:
    names = names_of("operations", [value.replace("/", "_") for value in options.operations], BY_NAME)
    return [BY_NAME[name] for name in names or BY_NAME]


def _implementations(options: argparse.Namespace) -> list[Implementation]:
    rows = {row.name: row for row in table_of_implementations.IMPLEMENTATIONS}
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


def _plan(
    options: argparse.Namespace, operations: list[Operation], implementations: list[Implementation]
) -> CollectivePlan:
    smallest, largest = options.min_size, options.max_size
    if largest < smallest:
        raise UsageError(f"--max-size={largest} is below --min-size={smallest} (bytes); swap them")
    import torch

    from lightning_multigpu.bench.collectives.collective_run import CollectivePlan

    return CollectivePlan(
        operations=operations,
        implementations=implementations,
        sizes=[size for n in range(64) if (size := smallest * options.step_factor**n) <= largest],
        device_type=options.device,
        dtype=getattr(torch, options.dtype),
        repetitions=options.repetitions,
        warm_up=options.warm_up,
        timeout_s=options.timeout,
    )


def _check_memory(options: argparse.Namespace, plan: CollectivePlan, place: Placement) -> None:
    if options.device == "cpu":
        jobs = len(plan.implementations) * place.devices
        needed, free = _TENSORS_A_RANK * plan.sizes[-1] * jobs, psutil.virtual_memory().available
        if needed > free:
            raise UsageError(
                f"--max-size={size_text(plan.sizes[-1])} takes up to {needed / 2**30:.1f} GiB of memory for {jobs} "
                f"processes on this host, and {free / 2**30:.1f} GiB are free; pass less"
            )


def _parser(name: str) -> OptionParser:
    rows = table_of_implementations.IMPLEMENTATIONS
    parser = OptionParser(
        prog=f"{PROGRAM} {name}",
        description="Time every collective on every implementation that is there, in turn, and check the results.\n"
        "Columns as nccl-tests prints them; times are medians over all calls, on the slowest rank.",
        epilog="back ends:\n" + "\n".join(f"  {row.name:<8} {row.summary}" for row in rows),
    )
    add = parser.add_argument
    add("--operations", nargs="+", default=[], metavar="NAME", help=f"some of {', '.join(BY_NAME)}; by default all")
    add("--backends", nargs="+", default=[], metavar="NAME", help="some of those below; by default all that fit")
    add("--min-size", type=size_bytes, default=2**10, metavar="SIZE", help="smallest size, such as 64k (default: 1KiB)")
    add(
        "--max-size",
        type=size_bytes,
        default=2**28,
        metavar="SIZE",
        help="largest, such as 1MiB (default: 256MiB)",
    )
    add("--step-factor", type=number(int, 2), default=4, metavar="N", help="from one size to the next (default: 4)")
    add("--dtype", choices=DTYPES, default="float32", help="of the tensors (default: float32)")
    add_common_options(parser, timed="calls", timeout_s=60.0)
    add("--link-gbit", type=number(float, 0, above=True), metavar="N", help="theoretical Gbit/s: shows the share of it")
    add("--support", action="store_true", help="print which back end offers what, found by trying, and no times")
    return parser
