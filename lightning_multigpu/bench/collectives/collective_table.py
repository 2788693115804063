"""The table of collectives, as nccl-tests prints it, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from lightning_multigpu.bench.collectives.collective_run import OK, CollectiveResult
from lightning_multigpu.bench.sizes import size_text

_GBIT = 1e9
_WIDTHS = {
    "size": ">12", "elements": ">10", "type": ">8", "operation": "<14", "implementation": "<14",
    "time": ">10", "25 %": ">10", "75 %": ">10", "algbw": ">7", "busbw": ">7", "of peak": ">8", "wrong": ">5",
}  # fmt: skip
_UNITS = {"size": "(B)", "time": "(us)", "25 %": "(us)", "75 %": "(us)", "algbw": "(GB/s)", "busbw": "(GB/s)"}


class CollectivesTable:
    """Turns results into lines and into JSON; ``link_gbit`` is the theoretical speed of a rank's way out, or None."""

    def __init__(self, *, world_size: int, dtype: torch.dtype, link_gbit: float | None) -> None:
        self._world_size = world_size
        self._type = str(dtype).removeprefix("torch.")
        self._peak = None if link_gbit is None else link_gbit * _GBIT / 8
        self._widths = {name: width for name, width in _WIDTHS.items() if name != "of peak" or self._peak is not None}

    def head(self) -> list[str]:
        peak = "" if self._peak is None else f"{_number(self._peak / 1e9)} GB/s"
        units = [{**_UNITS, "of peak": peak}.get(name, "") for name in self._widths]
        return [f"#{self._line(cells)[1:].rstrip()}" for cells in ([*self._widths], units)]

    def row(self, result: CollectiveResult) -> str:
        """One line: medians over all calls of the slowest rank's time."""
        cells = [str(result.size_bytes), str(result.numel), self._type, result.operation.name, result.implementation]
        if result.seconds is None:
            return f"{self._line(cells)} {result.status}: {result.reason}"
        cells += [f"{1e6 * value:.1f}" for value in (result.seconds.median, result.seconds.p25, result.seconds.p75)]
        bandwidths = (result.algbw(), result.busbw(self._world_size))
        cells += ["-" if value is None else f"{value / 1e9:.3f}" for value in bandwidths]
        if self._peak is not None:
            share = self._share(result)
            cells.append("-" if share is None else f"{100 * share:.1f} %")
        return self._line([*cells, str(result.wrong)])

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
            "time_us": result.seconds and asdict(result.seconds.scaled(1e6)),
            "algbw_gb_per_sec": None if algbw is None else algbw / 1e9,
            "busbw_gb_per_sec": None if busbw is None else busbw / 1e9,
            "share_of_peak": self._share(result),
            "wrong": result.wrong if result.status == OK else None,
        }

    def _line(self, cells: Sequence[str]) -> str:
        return " ".join(f"{cell:{width}}" for cell, width in zip(cells, self._widths.values(), strict=False))

    def _busbw(self, result: CollectiveResult) -> float:
        return result.busbw(self._world_size) or 0.0

    def _share(self, result: CollectiveResult) -> float | None:
        busbw = result.busbw(self._world_size)
        return None if busbw is None or self._peak is None else busbw / self._peak


def _number(value: float) -> str:
    """Two or three significant digits, no exponent."""
    return f"{value:.0f}" if value >= 10 else f"{value:.3g}"
