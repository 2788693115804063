"""Reports about hangs: collected from the guardians of all hosts, on the terminal of node 0 and in a file.

Each host's guardian finds the waits of its ranks. A wait that a rank has noted in its page is found there. A collective
that the user's code or a library has called outside of the strategy shows only in a stack: so an idle rank whose page
does not change is looked at too. A report ends the run only if it proves that ranks wait for each other.

::

    another host                       node 0
      waiting  (ranks, since)  ---->     notes it; with the first wait a report begins
                               <----   look
      view     (of one rank)   ---->
                               <----   next                 one view at a time, so that no socket is full
      seen                     ---->   the report: verdict, stacks
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Sequence

from lightning_multigpu.job.guardian.blocking import append, show
from lightning_multigpu.job.guardian.failure import Failure, host_name
from lightning_multigpu.job.guardian.hang.hang_watch import HangWatch, Waits
from lightning_multigpu.job.guardian.hang.waiting_graph import View, calls, deadlock, lasting, verdict
from lightning_multigpu.job.guardian.host_links import Hosts
from lightning_multigpu.job.guardian.protocol import Message
from lightning_multigpu.job.guardian.ranks import Found

KINDS = ("waiting", "look", "view", "next", "seen")

_COLLECT_S = 8.0
_SECOND_LOOK_S = 2.0
_OWN = "this host"
_DEADLOCK = "ranks wait for each other, and none can go on"
_FIX = (
    "Every rank has to call the same collectives in the same order: self.log(sync_dist=True), self.all_gather, saves "
    "and barriers on all ranks, or on none"
)


class HangReports:
    """This host's part in the reports; on node 0, and with a single host, the reports themselves.

    ``directory`` returns the present directory of the file, or None.
    """

    def __init__(self, watch: HangWatch, hosts: Hosts, directory: Callable[[], str | None]) -> None:
        self._watch, self._hosts, self._directory = watch, hosts, directory
        self._now_s = 0.0
        self._waits: dict[Hashable, Waits] = {}
        self._reported: Waits = {}
        self._seen: set[str] = set()  # waits since the last look
        self._again_s = 0.0  # the time of the next look, if nothing changes
        self._looks_twice = False
        self._begun_s = 0.0
        # On node 0 while a report is being collected: the deadline, the hosts that have yet to answer, and the views.
        self._until_s: float | None = None
        self._awaited: set[Hashable] = set()
        self._views: list[View] = []
        self._before: list[View] = []  # of the look before
        # On the other hosts: the waits that node 0 knows, and the views that it has not fetched yet.
        self._sent: set[str] = set()
        self._unsent: list[View] = []

    def observe(self, now_s: float) -> Found | None:
        """Looks at this host's ranks, and continues a report under way.

        Returns the failure of ranks that wait for each other, once a report has proved it.
        """
        self._now_s = now_s
        waits, views = self._watch.observe(now_s), self._watch.seen()
        if not self._hosts.is_first:
            if views is not None:
                self._unsent = views
                self._send_next()
            if waits.keys() != self._sent:
                self._sent = set(waits)
                self._hosts.send("waiting", waits={name: now_s - since_s for name, since_s in waits.items()})
            return None
        if views is not None:
            self._views += views
            self._awaited.discard(_OWN)
        self._waits[_OWN] = waits
        limit_s = self._watch.limit_s
        if limit_s is None:
            return None
        current = {name: since_s for of_host in self._waits.values() for name, since_s in of_host.items()}
        if self._until_s is not None:
            if not self._awaited or now_s >= self._until_s:
                return self._report(current, limit_s)
        elif self._reported and not self._reported.keys() & current.keys():
            waited_s = now_s - min(self._reported.values())
            self._reported, self._seen = {}, set()
            self._write(f"The wait that was reported has ended after {waited_s:.0f} s, and the run goes on.\n", "")
        elif current.keys() - self._seen or (current and now_s >= self._again_s):
            self._collect()
        else:
            self._seen &= set(current)
        return None

    def handle(self, host: Hashable, message: Message) -> None:
        """Handles a message of another host's guardian, of one of :data:`KINDS`."""
        kind = message["kind"]
        if kind == "waiting":
            self._waits[host] = {name: self._now_s - age_s for name, age_s in message["waits"].items()}
        elif kind == "look":
            self._watch.look()
        elif kind == "next":
            self._send_next()
        elif kind == "view" and host in self._awaited:
            self._views.append(View.from_message(message["view"]))
            self._hosts.send("next", to=host)
        elif kind == "seen":
            self._awaited.discard(host)

    def _collect(self) -> None:
        self._begun_s, self._until_s = self._now_s, self._now_s + _COLLECT_S
        self._views = []
        self._awaited = {_OWN, *self._hosts.send("look")}
        self._watch.look()

    def _send_next(self) -> None:
        if self._unsent:
            self._hosts.send("view", view=self._unsent.pop(0).to_message())
        else:
            self._hosts.send("seen")

    def _report(self, current: Waits, limit_s: float) -> Found | None:
        self._until_s, self._seen = None, set(current)
        unchanged = {int(name) for name in current if name.isdigit()}
        idle = lasting(self._before, self._views) & unchanged
        # A wait is noted, or two looks have shown it; a rank that computes does not wait.
        waits = {name: since_s for name, since_s in current.items() if not name.isdigit() or int(name) in idle}
        taken_s = self._now_s - self._begun_s
        ranks = deadlock(self._views, lasting=idle, at_least_s=taken_s) if waits else ""
        if waits and (ranks or not self._reported):
            waited_s = self._now_s - min(waits.values())
            text = hang_report(self._views, waited_s=waited_s, limit_s=limit_s, file=self._path(), ends=bool(ranks))
            self._write(text, full_stacks(self._views))
        self._reported = self._reported or waits
        is_new = any(not call.number and view.rank not in idle for view in self._views for call in calls(view))
        self._looks_twice = is_new and not self._looks_twice
        self._again_s = self._now_s + (_SECOND_LOOK_S if self._looks_twice else limit_s)
        self._before, self._views = self._views, []
        return Found(Failure(f"{_DEADLOCK}: {ranks}. {_FIX}", host=host_name()), self._now_s) if ranks else None

    def _path(self) -> str | None:
        directory = self._directory()
        return None if directory is None else os.path.join(directory, f"hang-{host_name()}.txt")

    def _write(self, text: str, details: str) -> None:
        path = self._path()
        if path is not None:
            entry = f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}{details}"
            append(path, entry, "The report about a hang")
        show(text)


_SHOWN_RANKS = 16
_SHOWN_FRAMES = 8


def hang_report(views: Sequence[View], *, waited_s: float, limit_s: float, file: str | None, ends: bool = False) -> str:
    """The text of a report: the verdict, then the place of each rank.

    ``file`` has all stacks. With ``ends``, ranks wait for each other, so that the run is ended.
    """
    views = sorted(views, key=lambda view: (bool(calls(view)), view.rank))  # first those that wait in no collective
    outcome = "Ranks wait for each other: the run ends" if ends else "The run goes on; this is only a report"
    lines = [
        f"No progress for {waited_s:.0f} s (hang_report_s={limit_s:g}). {outcome}.",
        *(f"  {line}." for line in verdict(views)),
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
    """The stacks of all threads of all ranks, for the file only."""
    return "".join(
        f"\n--- rank {view.rank} (host {view.host}, pid {view.pid}) ---\n{view.stacks.text}\n"
        for view in sorted(views, key=lambda view: view.rank)
    )


def _short_stack(view: View) -> list[str]:
    """The main thread's frames: the user's, and around them the innermost of the libraries."""
    name = f"Rank {view.rank} (host {view.host}, pid {view.pid}, last completed step {view.step})"
    if not view.stacks.main:
        return [f"{name}: {view.gone or view.stacks.text}"]
    frames = view.stacks.main
    users = [index for index, frame in enumerate(frames) if frame.is_users][:_SHOWN_FRAMES]
    others = [index for index, frame in enumerate(frames) if not frame.is_users]
    shown = sorted([*users, *others[: max(_SHOWN_FRAMES - len(users), 2)]])
    lines = [frames[index].text for index in shown]
    return [f"{name}, main thread, most recent call first:", *(f"    {line}" for line in lines)]
