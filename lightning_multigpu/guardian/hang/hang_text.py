"""The text of a report about a hang: the verdict first, then a table of all ranks, then where each of them is."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_multigpu.guardian.hang.waiting_graph import Call, View, calls, verdict

_SHOWN_RANKS = 16
_SHOWN_FRAMES = 8


def hang_report(views: Sequence[View], *, waited_s: float, limit_s: float, file: str | None) -> str:
    """What is printed.

    Args:
        views: all ranks, as far as they are known.
        waited_s: how long the longest wait has lasted.
        limit_s: ``hang_report_s``.
        file: where all stacks are written, or None.
    """
    views = sorted(views, key=_most_telling_first)
    lines = [
        f"No progress for {waited_s:.0f} s (hang_report_s={limit_s:g}). The run goes on; this is only a report.",
        *(f"  {line}." for line in verdict(views)),
        "",
        *_table(views),
        "",
    ]
    for view in views[:_SHOWN_RANKS]:
        lines += _short_stack(view)
    if len(views) > _SHOWN_RANKS:
        lines.append(f"{len(views) - _SHOWN_RANKS} more ranks are not shown.")
    lines.append(
        "The stacks of all threads are in " + file if file else "No directory is known for the stacks of all threads."
    )
    return "\n".join(lines) + "\n"


def full_stacks(views: Sequence[View]) -> str:
    """What is written to the file only: the stacks of all threads of all ranks."""
    return "".join(
        f"\n--- rank {view.rank} (host {view.host}, pid {view.pid}) ---\n{view.stacks.text}\n"
        for view in sorted(views, key=lambda view: view.rank)
    )


def _most_telling_first(view: View) -> tuple[bool, int]:
    """Who does not wait in a collective has most to explain."""
    return bool(calls(view)), view.rank


def _table(views: Sequence[View]) -> list[str]:
    rows = [("rank", "host", "pid", "steps", "waits in", "for")]
    for view in sorted(views, key=lambda view: view.rank)[:_SHOWN_RANKS]:
        own: Sequence[Call | None] = calls(view) or [None]
        for call in own:
            what = "no collective" if call is None else call.name
            what = view.gone.removeprefix("it ") if view.gone else what
            for_s = f"{call.for_s:.0f} s" if call is not None and call.number else ""
            rows.append((str(view.rank), view.host, str(view.pid), str(view.step), what, for_s))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _short_stack(view: View) -> list[str]:
    """The main thread's frames: the user's, and around them the innermost of the libraries."""
    if not view.stacks.main:
        return [f"Rank {view.rank}: {view.gone or view.stacks.text}"]
    frames = view.stacks.main
    users = [index for index, frame in enumerate(frames) if frame.is_users][:_SHOWN_FRAMES]
    others = [index for index, frame in enumerate(frames) if not frame.is_users]
    shown = sorted([*users, *others[: max(_SHOWN_FRAMES - len(users), 2)]])
    lines = [frames[index].text for index in shown]
    return [f"Rank {view.rank}, main thread, most recent call first:", *(f"    {line}" for line in lines)]
