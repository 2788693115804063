"""Malformed, cut, repeated and reordered messages, to the listener of guardians and to those who join.

    python -m benchmarks.guardian_fuzz [--messages 100000] [--seed 0] [--only NAME ...]

Each target gets the messages one after the other, from a seeded generator. Afterwards the guardian must be there, its
memory must not have grown by more than 5 MB, and the job must go on: its ranks end in order, and hosts that are still
to come get in.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from lightning_multigpu.communication.rendezvous import Arrival, Limit, Rendezvous, RendezvousError
from lightning_multigpu.job.guardian.protocol import encode
from tests.job.guardian.job import DEADLINE_S, Job, go_on, is_alive, line_of

MAX_GROWTH_KB = 5_000
_SECRET = os.urandom(32).hex()
_LISTEN = "print(client.listen_for_hosts('127.0.0.1', num_nodes=3, secret={secret!r}), flush=True); "
_JOIN = "client.join_hosts('127.0.0.1', {port}, node_rank={node}, secret={secret!r}); print('in', flush=True); "
_WAITS = "sys.stdin.readline(); client.leave()"
_KINDS = (
    *("hello", "welcome", "refused", "leave", "at end", "joined", "joining", "failed"),
    *("failure", "alive", "done", "end now", "all at end", "view", "quiet"),
)  # fmt: skip
_FIELDS = ("secret", "rank", "node_rank", "host", "num_nodes", "failure", "limit_s", "pid", "slot", "num_slots")
_ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 99, 1 << 40, 10**300, 1e308, float("inf"), float("nan")),
    *("", "0", "\0", "\ud800", "\U0001f40d"),
    *([], {}, [[]], [[0, "h", "127.0.0.1", 70_000]], [[0, "h", 5, "x"]], {"rank": "1"}, "a" * 300),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How a target has fared; ``problem`` is empty if it has done what it should."""

    target: str
    messages: int
    seconds: float
    growth_kb: int
    problem: str = ""


class Fuzzer:
    """A generator of bad messages, the same ones for the same seed.

    Args:
        seed: of the random numbers.
        recorded: messages of good connections, which are repeated as they are, cut, and altered.
    """

    def __init__(self, seed: int, recorded: Sequence[bytes]) -> None:
        self._random = random.Random(seed)
        self._recorded = recorded

    def messages(self) -> list[bytes]:
        """What one connection sends: one message or a few."""
        return [self._message() for _ in range(self._random.choice((1, 1, 1, 2, 5)))]

    def _message(self) -> bytes:
        choice = self._random
        line = choice.choice(self._recorded) if self._recorded and choice.random() < 0.3 else self._object()
        how = choice.randrange(8)
        if how == 0:
            return line[: choice.randrange(len(line) + 1)]  # cut, without an end
        if how == 1 and line:
            at = choice.randrange(len(line))
            return line[:at] + bytes([line[at] ^ 1 << choice.randrange(8)]) + line[at + 1 :]
        if how == 2:
            return choice.randbytes(choice.choice((1, 10, 1_000, 6_000))) + b"\n"
        if how == 3:
            return choice.choice((b"[", b'{"a":', b"\n", b"9", b'"', b"\0")) * choice.choice((1, 100, 5_000)) + b"\n"
        return line

    def _object(self) -> bytes:
        choice = self._random
        fields = {name: choice.choice(_ODD) for name in choice.sample(_FIELDS, choice.randrange(6))}
        kind: Any = choice.choice(_KINDS) if choice.random() < 0.9 else choice.choice(_ODD)
        return json.dumps({"kind": kind, **fields}).encode() + b"\n"

    def leaves(self, sock: socket.socket) -> None:
        """Ends the connection in order, or by a reset, or by silence until it is closed."""
        how = self._random.randrange(3)
        with contextlib.suppress(OSError):
            if how == 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif how == 1:
                sock.shutdown(socket.SHUT_WR)
        sock.close()


def resident_kb(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1])


def _bombard(connect: Callable[[], socket.socket], fuzzer: Fuzzer, number: int) -> None:
    """Sends so many messages; now and then several connections speak by turns."""
    sent = 0
    while sent < number:
        socks = [connect() for _ in range(1 + 3 * (sent % 7 == 0))]
        speeches = [fuzzer.messages() for _ in socks]
        while any(speeches):
            for sock, speech in zip(socks, speeches, strict=True):
                if speech:
                    with contextlib.suppress(OSError):  # the guardian has closed it
                        sock.send(speech.pop(0), socket.MSG_NOSIGNAL)
                    sent += 1
        for sock in socks:
            fuzzer.leaves(sock)
    with connect() as last:  # it is served when all before it have been
        last.send(encode("hello", secret="no"))
        if not last.recv(1_000).startswith(b'{"kind":"refused"'):
            raise OSError("it did not answer the last one")


def _measured(target: str, pid: int, number: int, bombard: Callable[[], None]) -> Outcome:
    before_kb, since_s = resident_kb(pid), time.monotonic()
    try:
        bombard()
    except OSError as error:
        return Outcome(
            target, number, time.monotonic() - since_s, 0, f"the guardian does not take connections: {error}"
        )
    seconds = time.monotonic() - since_s
    if not is_alive(pid):
        return Outcome(target, number, seconds, 0, "the guardian has ended")
    growth_kb = resident_kb(pid) - before_kb
    problem = f"the guardian has grown by {growth_kb} KB" if growth_kb > MAX_GROWTH_KB else ""
    return Outcome(target, number, seconds, growth_kb, problem)


def _good_end(outcome: Outcome, jobs: Sequence[Job]) -> Outcome:
    """Lets the ranks go on; they have to end in order."""
    codes = []
    for job in jobs:
        for rank in job.ranks:
            with contextlib.suppress(OSError):
                go_on(rank)
    for job in jobs:
        codes += job.outcome()[0]
    bad = f"the ranks have ended with {codes}" if any(codes) else ""
    return outcome if not bad else Outcome(outcome.target, outcome.messages, outcome.seconds, outcome.growth_kb, bad)


def _recorded() -> list[bytes]:
    """Messages of another job."""
    return [
        encode("hello", secret=os.urandom(32).hex(), rank=0, node_rank=1, host="h"),
        encode("welcome", host="h", pid=1, slot=0, num_slots=1, failure_timeout_s=1.0),
        encode("alive"),
        encode("failure", failure={"what": "forged"}, age_s=0),
        encode("failed", failure={"what": "forged"}),
    ]


def hosts(number: int, seed: int) -> Outcome:
    """The listener of node 0; node 2 of 3 comes when it is over."""
    with Job(_LISTEN.format(secret=_SECRET) + _WAITS, failure_timeout_s=20) as one:
        port = int(line_of(one.ranks[0]))
        with Job(_JOIN.format(port=port, node=1, secret=_SECRET) + _WAITS, first_rank=1, failure_timeout_s=20) as two:
            assert line_of(two.ranks[0]) == "in\n"
            fuzzer, connect = Fuzzer(seed, _recorded()), _from_many_addresses(port, seed)
            outcome = _measured("hosts", one.guardian.pid, number, lambda: _bombard(connect, fuzzer, number))
            last = Job(_JOIN.format(port=port, node=2, secret=_SECRET) + _WAITS, first_rank=2, failure_timeout_s=20)
            with last as three:
                came = line_of(three.ranks[0]) == "in\n"
                if not outcome.problem and not came:
                    outcome = replace(outcome, problem="the last host did not get in")
                return _good_end(outcome, [one, two, three])


def _from_many_addresses(port: int, seed: int) -> Callable[[], socket.socket]:
    choice = random.Random(seed)

    def connect() -> socket.socket:
        here = f"127.{choice.randrange(1, 250)}.{choice.randrange(250)}.{choice.randrange(1, 250)}"
        return socket.create_connection(("127.0.0.1", port), source_address=(here, 0), timeout=DEADLINE_S)

    return connect


def listening_port(pid: int) -> int:
    """The port at which a process listens for TCP connections."""
    own = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, and so none that it listens at
            own.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    (port,) = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}
    return port


def notes(number: int, seed: int) -> Outcome:
    """Notes in the store at which ranks join: RendezvousError, and nothing else, on the rank that reads them."""
    good = json.dumps({"rank": 1, "host": "h", "node_rank": 0, "pid": 1, "world_size": 2, "table": {}}).encode()
    fuzzer, store = Fuzzer(seed, [good]), HashStore()
    own = Arrival(0, "h", 0, 1, 2, {})
    sent, before_kb, since_s, problem = 0, resident_kb(os.getpid()), time.monotonic(), ""
    while sent < number and not problem:
        rendezvous = Rendezvous(store, own, Limit(0.0, 0.0, lambda: None), attempt=str(sent))
        prefixed = PrefixStore(f"lightning-multigpu/{sent}", store)
        messages = fuzzer.messages()
        for ticket, note in enumerate(messages):
            prefixed.set(f"note/{ticket}", note.decode(errors="replace"))
        prefixed.add("tickets", len(messages))
        sent += len(messages)
        try:
            rendezvous._look()  # what a rank that waits does again and again
        except RendezvousError:
            pass
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        for ticket in range(len(messages)):
            prefixed.delete_key(f"note/{ticket}")
        prefixed.delete_key("tickets")
    return Outcome(
        "notes in the store", sent, time.monotonic() - since_s, resident_kb(os.getpid()) - before_kb, problem
    )


TARGETS = {
    "hosts": hosts,
    "notes": notes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000, help="to each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    given = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}: python -m benchmarks.guardian_fuzz {' '.join(sys.argv[1:])}".rstrip())
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, seed {given.seed}\n")
    print(f"{'target':<22}{'messages':>10}{'seconds':>9}{'memory':>10}  problem", flush=True)
    outcomes = []
    for name in given.only:
        outcome = TARGETS[name](given.messages, given.seed)
        outcomes.append(outcome)
        print(
            f"{outcome.target:<22}{outcome.messages:>10}{outcome.seconds:>9.1f}{outcome.growth_kb:>+7} KB  "
            f"{outcome.problem or 'none'}",
            flush=True,
        )
    sys.exit(any(outcome.problem for outcome in outcomes))


if __name__ == "__main__":
    main()
