"""The table of collectives, as nccl-tests prints it, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_multigpu.bench.collectives.collective_run import OK, CollectiveResult
from lightning_multigpu.bench.sizes import size_text

_GBIT = 1e9


class CollectivesTable:
    """Turns results into lines and into JSON.

    Args:
        world_size: ranks.
        dtype: of the tensors.
        link_gbit: the theoretical speed of a rank's way out in Gbit/s, or None.
    """

    def __init__(self, *, world_size: int, dtype: torch.dtype, link_gbit: float | None) -> None:
        self._world_size = world_size
        self._type = str(dtype).removeprefix("torch.")
        self._peak = None if link_gbit is None else link_gbit * _GBIT / 8

    def head(self) -> list[str]:
        """The lines above the rows."""
        peak = "" if self._peak is None else f" {'of peak':>8}"
        names = (
            f"{'size':>12} {'elements':>10} {'type':>8} {'operation':<14} {'implementation':<14} "
            f"{'time':>10} {'25 %':>10} {'75 %':>10} {'algbw':>7} {'busbw':>7}{peak} {'wrong':>5}"
        )
        peak = "" if self._peak is None else f" {_number(self._peak / 1e9) + ' GB/s':>8}"
        units = (
            f"{'(B)':>12} {'':>10} {'':>8} {'':<14} {'':<14} "
            f"{'(us)':>10} {'(us)':>10} {'(us)':>10} {'(GB/s)':>7} {'(GB/s)':>7}{peak}"
        )
        return [f"#{names[1:]}", f"#{units[1:]}"]

    def row(self, result: CollectiveResult) -> str:
        """One line: medians over all calls of the slowest rank's time."""
        start = (
            f"{result.size_bytes:>12} {result.numel:>10} {self._type:>8} {result.operation.name:<14} "
            f"{result.implementation:<14} "
        )
        if result.seconds is None:
            return f"{start}{result.status}: {result.reason}"
        time = " ".join(
            f"{1e6 * value:>10.1f}" for value in (result.seconds.median, result.seconds.p25, result.seconds.p75)
        )
        bandwidths = " ".join(
            f"{'-' if value is None else format(value / 1e9, '.3f'):>7}"
            for value in (result.algbw(), result.busbw(self._world_size))
        )
        share = self._share(result)
        peak = "" if self._peak is None else f" {'-' if share is None else f'{100 * share:.1f} %':>8}"
        return f"{start}{time} {bandwidths}{peak} {result.wrong:>5}"

    def summary(self, results: Sequence[CollectiveResult]) -> list[str]:
        """The best bus bandwidth of each operation and implementation: "42 of 50 GB/s = 84 %"."""
        best: dict[tuple[str, str], CollectiveResult] = {}
        for result in results:
            key = (result.operation.name, result.implementation)
            if self._busbw(result) > (self._busbw(best[key]) if key in best else 0.0):
                best[key] = result
        lines = []
        for (operation, implementation), result in best.items():
            busbw = self._busbw(result) / 1e9
            share = self._share(result)
            shown = f"{_number(busbw)} GB/s"
            if self._peak is not None and share is not None:
                shown = f"{_number(busbw)} of {_number(self._peak / 1e9)} GB/s = {100 * share:.0f} %"
            lines.append(f"# {operation}, {implementation}: busbw {shown} (at {size_text(result.size_bytes)})")
        return lines

    def as_json(self, result: CollectiveResult) -> dict[str, Any]:
        """One entry of ``results``."""
        algbw, busbw = result.algbw(), result.busbw(self._world_size)
        return {
            "operation": result.operation.name,
            "implementation": result.implementation,
            "size_bytes": result.size_bytes,
            "elements": result.numel,
            "dtype": self._type,
            "status": result.status,
            "reason": result.reason,
            "time_us": None if result.seconds is None else result.seconds.scaled(1e6).as_json(),
            "algbw_gb_per_sec": None if algbw is None else algbw / 1e9,
            "busbw_gb_per_sec": None if busbw is None else busbw / 1e9,
            "share_of_peak": self._share(result),
            "wrong": result.wrong if result.status == OK else None,
        }

    def _busbw(self, result: CollectiveResult) -> float:
        return result.busbw(self._world_size) or 0.0

    def _share(self, result: CollectiveResult) -> float | None:
        busbw = result.busbw(self._world_size)
        return None if busbw is None or self._peak is None else busbw / self._peak


def _number(value: float) -> str:
    """Two or three significant digits, no exponent."""
    return f"{value:.0f}" if value >= 10 else f"{value:.3g}"
