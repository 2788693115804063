"""Training of two hosts while strangers connect to their guardians: step time, false alarms, memory.

    python -m benchmarks.guardian_flood [--connections 10000] [--rate 200]

Both hosts are this machine, with one rank each, and meet over its loopback interface. A fifth of the connections come
to node 0's TCP port before the second host does; the others come to the UNIX sockets of both guardians during training,
half of them from another user where this is run by root. By turns strangers are silent, slow, or talkative.

Step times are compared between windows with strangers at the guardians, and windows in which the same connections are
made to a listener that has nothing to do with the job: connecting takes processor time of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.guardian_fuzz import listening_port, resident_kb
from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.job.guardian.protocol import encode
from tests.job.guardian.job import eventually
from tests.world import free_port

_NOBODY = 65534
WINDOW_S = 5.0
_HELD_S = 1.0
_TALK = encode("failed", failure={"what": "forged"}) * 300
_LOOK_EVERY = 10
WARM_UP_STEPS = 50

Connect = Callable[[], socket.socket]


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Times(L.Callback):
    """Writes when each step has ended; ends the run when the file ``stop`` is there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ended_s: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.ended_s.append(time.time())
        if len(self.ended_s) == WARM_UP_STEPS:
            (self.directory / f"warm{trainer.strategy.node_rank}").touch()  # type: ignore[attr-defined]
        if len(self.ended_s) % _LOOK_EVERY == 0:
            stops = (self.directory / "stop").exists()
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(stops, all=False)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            (self.directory / "times").write_text(json.dumps(self.ended_s))


def windows_of(number: int, rate: float) -> tuple[int, int]:
    """How many windows there are with strangers at the job, and how many connections are made in each.

    Args:
        number: of connections in all of these windows.
        rate: connections a second.
    """
    in_window = round(rate * WINDOW_S)
    if not number > in_window > 0:
        sys.exit(
            f"{number} connections to a job that trains, at --rate {rate:g}: quartiles take two windows of "
            f"{WINDOW_S:g} s; give --rate 0.2 or more, and --connections for more than {max(1, in_window)} at that time"
        )
    return -(-number // in_window), in_window


def fit(directory: Path, **options: Any) -> None:
    """Trains until there is a file "stop" in the directory, with the options of a Trainer."""
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        callbacks=[Times(directory)],
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(64 * 100, 512)), batch_size=64))


def train(directory: Path) -> None:
    """One host's rank."""
    fit(directory, devices=1, num_nodes=2, strategy=RingDDPStrategy(join_timeout_s=300))


def start(directory: Path, node_rank: int, port: int) -> subprocess.Popen[bytes]:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(node_rank)}
    command = [sys.executable, "-m", "benchmarks.guardian_flood", "--train", str(directory)]
    return subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)


def guardian_of(process: subprocess.Popen[bytes]) -> int:
    """The pid of the guardian that a host's first rank has started."""
    found: list[int] = []

    def look() -> bool:
        assert process.poll() is None, "the rank has ended"
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry)) == process.pid:
                    command = Path(f"/proc/{entry}/cmdline").read_bytes()
                    # The process that has started it ends at once, and its child belongs to nobody.
                    parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
                    if b"guardian/__main__.py" in command and parent != process.pid:
                        found.append(int(entry))
        return bool(found)

    assert eventually(look, 120), "no guardian has come"
    return found[0]


def unix_address(pid: int) -> str:
    """The abstract address at which a process listens."""
    own = {os.readlink(f"/proc/{pid}/fd/{entry}") for entry in os.listdir(f"/proc/{pid}/fd")}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    (name,) = {row[7] for row in rows if len(row) > 7 and row[7][0] == "@" and f"socket:[{row[6]}]" in own}
    return "\0" + name[1:]


class Strangers:
    """Connects again and again, at a rate, and behaves badly by turns."""

    def __init__(self, rate: float, talk: bytes = _TALK) -> None:
        self.made: Counter[str] = Counter()
        self._talk = talk
        self._pause_s = 1 / rate
        self._kinds = itertools.cycle(("silent", "slow", "talkative"))
        self._held: deque[tuple[float, str, socket.socket]] = deque()

    def come(self, number: int, connects: list[Connect], *, counted: bool) -> None:
        turns = itertools.cycle(connects)
        next_s = time.monotonic()
        for _ in range(number):
            kind = next(self._kinds)
            try:
                sock = next(turns)()
            except OSError:
                sock = None
            self.made[kind if sock is not None else f"{kind}, turned away"] += counted
            if sock is not None:
                sock.setblocking(False)
                if kind == "talkative":
                    with contextlib.suppress(OSError):
                        sock.send(self._talk, socket.MSG_NOSIGNAL)
                self._held.append((time.monotonic() + _HELD_S, kind, sock))
            self._go_on(time.monotonic())
            next_s += self._pause_s
            time.sleep(max(0.0, next_s - time.monotonic()))
        self._go_on(float("inf"))

    def _go_on(self, now_s: float) -> None:
        """Slow ones send a byte; those that have been there for a second leave."""
        if self._held and self._held[0][1] == "slow":
            with contextlib.suppress(OSError):
                self._held[0][2].send(b"{", socket.MSG_NOSIGNAL)
        while self._held and self._held[0][0] <= now_s:
            self._held.popleft()[2].close()


def _unix(address: str, user: int | None) -> Connect:
    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        if user is not None:
            os.seteuid(user)
        try:
            sock.connect(address)
        except OSError:
            sock.close()
            raise
        finally:
            if user is not None:
                os.seteuid(0)
        return sock

    return connect


def _idle_listener(stack: contextlib.ExitStack) -> str:
    """One that accepts and closes, and is nobody's."""
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    address = f"\0lightning-multigpu-nobody-{os.getpid()}"
    listener.bind(address)
    listener.listen(256)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    threading.Thread(target=accept, daemon=True).start()
    return address


def flood(directory: Path, number: int, rate: float) -> int:
    port = free_port()
    with contextlib.ExitStack() as stack:
        processes = [start(directory, 0, port)]
        stack.callback(lambda: [os.killpg(p.pid, signal.SIGKILL) for p in processes if p.poll() is None])
        first = guardian_of(processes[0])
        own: list[int] = []

        def listens() -> bool:
            with contextlib.suppress(ValueError, OSError):
                own.append(listening_port(first))
            return bool(own)

        assert eventually(listens, 120)
        strangers = Strangers(rate)
        before_kb = resident_kb(first)
        processes.append(start(directory, 1, port))  # it imports its libraries, and comes in the middle of the flood
        strangers.come(number // 5, [lambda: socket.create_connection(("127.0.0.1", own[0]), 10)], counted=True)
        assert eventually(lambda: all((directory / f"warm{node}").exists() for node in range(2)), 120), "not joined"
        guardians = [first, guardian_of(processes[1])]
        addresses = [unix_address(pid) for pid in guardians]
        users = [None, _NOBODY] if os.getuid() == 0 else [None]
        connects = [_unix(address, user) for user in users for address in addresses]
        idle = _idle_listener(stack)
        idles = [_unix(idle, user) for user in users for _ in addresses]
        windows: list[tuple[bool, float, float]] = []
        num_windows, in_window = windows_of(number - number // 5, rate)
        for _ in range(num_windows):
            for is_flood in (False, True):
                since_s = time.time()
                strangers.come(in_window, connects if is_flood else idles, counted=is_flood)
                windows.append((is_flood, since_s, time.time()))
        growth_kb = resident_kb(first) - before_kb
        (directory / "stop").touch()
        codes = [process.wait(120) for process in processes]
        ended_s = json.loads((directory / "times").read_text()) if not any(codes) else []
    for kind, count in sorted(strangers.made.items()):
        print(f"{count:>7} connections: {kind}")
    print(f"exit statuses of the ranks: {codes}; memory of node 0's guardian: {growth_kb:+} KB")
    if any(codes):
        return 1
    compare(ended_s, windows, "the guardians")
    return 0


def compare(ended_s: list[float], windows: list[tuple[bool, float, float]], at: str) -> None:
    """Prints the step times of the two kinds of windows, and by how much neighbouring ones differ.

    Args:
        ended_s: when each step has ended.
        windows: whether strangers were at the job; begin and end.
        at: what of the job they were at, "the guardians" for example.
    """
    medians: dict[bool, list[float]] = {False: [], True: []}
    for is_flood, since_s, until_s in windows:
        steps = [b - a for a, b in itertools.pairwise(ended_s) if since_s <= a and b <= until_s]
        medians[is_flood].append(statistics.median(steps) * 1e3)
    for is_flood, name in ((False, "at a listener beside the job"), (True, f"at {at}")):
        low, middle, high = statistics.quantiles(medians[is_flood], n=4)
        print(
            f"strangers {name}: {middle:.2f} ms a step "
            f"(quartiles of {len(medians[is_flood])} windows {low:.2f} to {high:.2f})"
        )
    ratios = [b / a for a, b in zip(medians[False], medians[True], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"a step with strangers at {at} takes {middle:.3f} times as long (quartiles {low:.3f} to {high:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=200.0, help="connections a second")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train)
        return
    windows_of(given.connections - given.connections // 5, given.rate)
    print(f"{time.strftime('%Y-%m-%d')}: python -m benchmarks.guardian_flood {' '.join(sys.argv[1:])}".rstrip())
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"Lightning {L.__version__}; load average {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory() as directory:
        sys.exit(flood(Path(directory), given.connections, given.rate))


if __name__ == "__main__":
    main()
