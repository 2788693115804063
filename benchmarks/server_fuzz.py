"""Malformed, cut, altered and reordered messages to parameter servers, from strangers and from workers of the job.

    python -m benchmarks.server_fuzz [--messages 100000] [--seed 0] [--only NAME ...]

A stranger must change nothing: afterwards a worker gets in, and memory has grown by 5 MB at most since the first fifth
of the messages. A worker that sends nonsense ends its job with a message that names what was wrong: no traceback, no
hang. Each such worker has a server of its own; after 100 more of them memory has grown by 10 kB at most, which is what
the allocator loses by their threads: no more Python objects are alive. Asynchronous workers come in pairs; what one of
them sends is altered, left out, repeated or out of order.

Workers and servers are on one host and share memory. Every second worker maps what the server offers and fills it with
random bytes, again with each message; the others only say that they have mapped it. Afterwards nothing of it is left.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import itertools
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.guardian_fuzz import MAX_GROWTH_KB, Outcome, resident_kb
from benchmarks.heading import heading
from lightning_multigpu.communication.channel import Channel, ChannelError, connect
from lightning_multigpu.communication.checksums import bytes_of
from lightning_multigpu.communication.shared_memory.segment import mapped
from lightning_multigpu.engine.parameter_server.server import Server
from lightning_multigpu.engine.parameter_server.wire import packed

_SECRET = os.urandom(32)
_END_S = 10.0
_WARM_UP = 0.2  # of the messages come before memory is looked at: the allocator keeps what many threads have needed
_ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 99, 1 << 40, 10**300, 1e308, float("inf"), float("nan")),
    *("", "0", "\0", "float32", "int8", "step", "torch.optim:SGD", "os:system", "torch.optim:Optimizer"),
    *([], {}, [[]], [-1], [[0, 0]], {"tensor": 0}, {"tensor": 0, "dtype": "float64", "shape": [1 << 40]}, "a" * 300),
    *({"tuple": [1, 2]}, {"items": [["lr", 0.1]]}, {"items": [[[], 1]]}, {"tensor": -1, "dtype": "x", "shape": 3}),
)  # fmt: skip
_HELLO = {"kind": "hello", "worker": 0, "num_workers": 1, "num_servers": 1, "shares_memory": True, "silence_s": 7.5}
_MAPPED = {"kind": "memory", "optimizer": 0, "number": 0, "is_mapped": True}
Frame = tuple[dict[str, Any], bytes]


def recorded() -> list[Frame]:
    """What a worker sends that trains one step with two buckets, saves, and leaves."""
    tensors: list[torch.Tensor] = []
    values = [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False,
               "foreach": None, "capturable": False, "differentiable": False, "fused": None}]  # fmt: skip
    body = packed(
        {"defaults": dict(values[0]), "values": values, "weights": [torch.ones(6), torch.ones(4)],
         "state": [[0, 0, {"step": torch.tensor(1.0), "exp_avg": torch.ones(6), "exp_avg_sq": torch.ones(6)}]]},
        tensors, what="a message",
    )  # fmt: skip
    plan = {
        "class": "torch.optim.adam:Adam",
        "split": "elements",
        "buckets": [{"dtype": "float32", "pieces": [[6]]}, {"dtype": "float32", "pieces": [[2, 2]]}],
        "groups": [[[0, 0], [1, 0]]],
    }
    of_first = {"optimizer": 0}
    push = {"kind": "push", **of_first, "round": 0, "kinds": [1]}
    loaded: list[torch.Tensor] = []
    state = packed({"values": values, "state": [[0, 0, {"step": torch.tensor(2.0)}]]}, loaded, what="a message")
    return [
        (dict(_HELLO), b""),
        ({"kind": "configure", **of_first, "number": 0, "plan": plan, "body": body}, _joined(tensors)),
        (dict(_MAPPED), b""),
        ({"kind": "load", **of_first, "body": state}, _joined(loaded)),
        ({"kind": "replace", **of_first, "bucket": 0}, bytes(24)),
        ({**push, "bucket": 1, "in_memory": True}, b""),
        ({"kind": "step", **of_first, "round": 0, "values": packed(values, [], what="step"), "clip_norm": 1.0}, b""),
        ({**push, "bucket": 0, "kinds": [2], "rows": [[0, [0, 1]]]}, bytes(24)),
        ({"kind": "average", **of_first, "round": 1, "clip_value": None}, b""),
        ({"kind": "norm", **of_first, "squares": 0.5}, b""),
        ({"kind": "state", **of_first}, b""),
        ({"kind": "goodbye"}, b""),
    ]


def _joined(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(bytes(bytes_of(tensor)) for tensor in tensors)


def recorded_pair() -> list[tuple[int, Frame]]:
    """What two asynchronous workers send that train a step each: the worker, and the frame."""
    frames = {fields["kind"]: (fields, payload) for fields, payload in recorded()}
    (configure, _), (push, _), (step, _) = (frames[kind] for kind in ("configure", "push", "step"))
    job = {**_HELLO, "num_workers": 2, "consistency": {
        "is_synchronous": False, "max_staleness": 1, "scales_learning_rate": True, "compensation": 0.1}}  # fmt: skip
    pushes = [({**push, "bucket": 1, "in_memory": True}, b""), ({**push, "bucket": 0, "in_memory": False}, bytes(24))]

    def asked(kind: str, **fields: Any) -> Frame:
        return {"kind": kind, **fields}, b""

    of_epoch = {"epoch": 0, "first": 0, "num_batches": 3}
    told: list[torch.Tensor] = []
    word = packed({"metrics": {"loss": torch.ones(1)}, "callbacks": []}, told, what="a message")
    first = [
        *(frames["configure"], frames["memory"], frames["replace"], asked("pull", optimizer=0), asked("start", run=1)),
        *(asked("next", **of_epoch, limit=2), *pushes, (step, b""), asked("trained", epoch=0, number=0)),
        *(asked("pause"), asked("give back", epoch=0), asked("statistics")),
        asked("next", **of_epoch, limit=2, waits=True),
        *(asked("tell", name="rate", value=2.5), asked("told", name="rate", of_all=False), frames["state"]),
        *(asked("stop", epoch=0, at_once=True), ({"kind": "over", "body": word}, _joined(told)), asked("goodbye")),
    ]
    second = [
        *(
            ({**configure, "body": None}, b""),
            frames["memory"],
            asked("pull", optimizer=0),
            asked("await start", run=1),
        ),
        *(asked("next", **of_epoch, limit=None), *pushes, ({**step, "values": []}, b"")),
        *(
            asked("trained", epoch=0, number=1),
            asked("tell", name="rate", value=1),
            asked("norm", optimizer=0, squares=1),
        ),
        *(asked("next", **of_epoch, limit=None), asked("give back", epoch=0), asked("pause"), asked("await over")),
        asked("goodbye"),
    ]
    return [(0, (job, b"")), (1, ({**job, "worker": 1}, b"")), *_alternating(first, second)]


def _alternating(first: list[Frame], second: list[Frame]) -> list[tuple[int, Frame]]:
    pairs = itertools.zip_longest(first, second)
    return [(worker, frame) for pair in pairs for worker, frame in enumerate(pair) if frame is not None]


class Fuzzer:
    """A generator of bad frames, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self._recorded = recorded()
        self._recorded_pair = recorded_pair()

    def story(self) -> list[Frame]:
        """What one worker sends after its hello: good frames up to some point, and a bad one."""
        good = copy.deepcopy(self._recorded[1:])
        at = self.choice.randrange(len(good))
        at_wrong_time = self.choice.random() < 0.15
        return [*good[:at], self.choice.choice(good) if at_wrong_time else self.altered(good[at])]

    def story_of_pair(self) -> list[tuple[int, Frame]]:
        """What two workers send: frames of which some are altered, left out, repeated or out of order."""
        told = copy.deepcopy(self._recorded_pair)
        for _ in range(self.choice.choice((1, 1, 2, 4))):
            at = self.choice.randrange(2 if self.choice.random() < 0.1 else len(told))
            worker, frame = told[at]
            how = self.choice.randrange(8)
            if how == 0:
                del told[at]
            elif how == 1:
                told.insert(self.choice.randrange(2, len(told)), told[at])
            elif how == 2:
                told[at] = 1 - worker, frame
            elif how == 3:
                told[at:at] = [told[at]] * 20
            else:
                told[at] = worker, self.altered(frame)
        return told

    def altered(self, frame: Frame) -> Frame:
        """The frame with a few changes."""
        fields, payload = copy.deepcopy(frame)
        for _ in range(self.choice.choice((1, 1, 2, 4))):
            if self.choice.random() < 0.2:
                size = self.choice.choice((0, 1, len(payload) + 8, 1000))
                payload = self.choice.randbytes(size)
            else:
                self._alter(fields)
        return fields, payload

    def _alter(self, value: Any) -> None:
        """Changes, removes or adds something, at any depth."""
        while True:
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            if not keys:
                return
            key = self.choice.choice(keys)
            if isinstance(value[key], dict | list) and value[key] and self.choice.random() < 0.7:
                value = value[key]
                continue
            if self.choice.random() < 0.2:
                del value[key]
            else:
                value[key] = copy.deepcopy(self.choice.choice(_ODD))
            return

    def noise(self) -> bytes:
        """What a stranger sends."""
        return self.choice.randbytes(self.choice.choice((0, 1, 31, 64, 65, 4_000)))


def strangers(number: int, seed: int) -> Outcome:
    """Connections that do not know the secret."""
    server, fuzzer = Server("127.0.0.1", 0, _SECRET), Fuzzer(seed)
    ending = _serving(server)
    started_s, before_kb, shared = time.perf_counter(), 0, _num_shared()
    for index in range(number):
        if index == round(_WARM_UP * number):
            before_kb = resident_kb(os.getpid())
        _visit(server.port, fuzzer)
    seconds = time.perf_counter() - started_s
    problem = ""
    try:
        channel = connect("127.0.0.1", server.port, _SECRET, timeout_s=_END_S)
        channel.send(_HELLO)
        if channel.receive()[0].get("kind") != "welcome":
            problem = "a worker is not welcome afterwards"
        channel.send({"kind": "goodbye"})
        found = ending()
        channel.close()
        problem = problem or (found if found is not None else "the server does not end")
    except ChannelError as error:
        problem = f"a worker does not get in afterwards: {error}"
    return _outcome("strangers", number, seconds, before_kb, shared, problem)


def _visit(port: int, fuzzer: Fuzzer) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=_END_S) as sock, contextlib.suppress(OSError):
        sock.sendall(fuzzer.noise())
        how = fuzzer.choice.randrange(4)
        if how == 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif how == 1:
            sock.shutdown(socket.SHUT_WR)
        elif how == 2:
            sock.recv(10)


def workers(number: int, seed: int) -> Outcome:
    """Workers that know the secret and send nonsense. Each needs a server of its own, since its job ends."""
    fuzzer, problem = Fuzzer(seed), ""
    started_s, before_kb, shared = time.perf_counter(), 0, _num_shared()
    for index in range(number):
        if index == round(_WARM_UP * number):
            before_kb = resident_kb(os.getpid())
        found = _told_by_worker(fuzzer)
        if found:
            problem = problem or f"message {index}: {found}"
    return _outcome("workers", number, time.perf_counter() - started_s, before_kb, shared, problem)


def _told_by_worker(fuzzer: Fuzzer) -> str:
    """What went wrong on a server that one worker tells a story."""
    server = Server("127.0.0.1", 0, _SECRET)
    ending = _serving(server)
    channel = connect("127.0.0.1", server.port, _SECRET, timeout_s=_END_S)
    _tell(channel, fuzzer)
    channel.shut_down()
    found = ending()
    channel.close()
    if found is None or ("Traceback" in found and not found.startswith("the step of ")):
        server.end("")
        return "it does not end" if found is None else found
    return ""


def pairs(number: int, seed: int) -> Outcome:
    """Two asynchronous workers, of which one or both send nonsense; the job goes on, or ends and says why."""
    fuzzer, problem = Fuzzer(seed), ""
    raised: list[str] = []
    hook, threading.excepthook = threading.excepthook, lambda found: raised.append(repr(found.exc_value))
    started_s, before_kb, shared = time.perf_counter(), 0, _num_shared()
    try:
        for index in range(number):
            if index == round(_WARM_UP * number):
                before_kb = resident_kb(os.getpid())
            found = "; ".join(filter(None, (_told_by_pair(fuzzer), *raised)))
            if found:
                problem = f"message {index}: {found}"
                break
    finally:
        threading.excepthook = hook
    return _outcome("pairs", number, time.perf_counter() - started_s, before_kb, shared, problem)


def _told_by_pair(fuzzer: Fuzzer) -> str:
    """What went wrong on a server that two workers tell a story; their connections break after it."""
    story = fuzzer.story_of_pair()
    server = Server("127.0.0.1", 0, _SECRET)
    ending = _serving(server)
    channels = [connect("127.0.0.1", server.port, _SECRET, timeout_s=_END_S) for _ in range(2)]
    readers = [_Reader(channel, fuzzer) for channel in channels]
    gone = set()
    for worker, (fields, payload) in story:
        if worker not in gone:
            try:
                readers[worker].spoil()
                channels[worker].send(fields, [memoryview(payload)])
            except OSError:
                gone.add(worker)
    for channel in channels:
        with contextlib.suppress(OSError):
            channel._socket.shutdown(socket.SHUT_WR)
    deadline_s = time.monotonic() + _END_S
    while any(reader.is_alive() for reader in readers) and time.monotonic() < deadline_s:
        for reader in readers:
            reader.join(0.1)
        if 0 not in server._members and 0 not in server._departed:  # others wait for worker 0, which was not let in
            server.end("")
    problem = "a connection stays open" if any(reader.is_alive() for reader in readers) else ""
    found = ending()
    if found is None or ("Traceback" in found and not found.startswith("the step of ")):
        problem = problem or ("it does not end" if found is None else found)
        server.end("")
    for channel in channels:
        channel.close()
    return problem


def _tell(channel: Channel, fuzzer: Fuzzer) -> None:
    reader = _Reader(channel, fuzzer)
    story = [] if fuzzer.choice.random() < 0.1 else fuzzer.story()
    with contextlib.suppress(OSError):
        channel.send(_HELLO if story else fuzzer.altered((dict(_HELLO), b""))[0])
        for fields, payload in story:
            reader.spoil()
            channel.send(fields, [memoryview(payload)])
        channel._socket.shutdown(socket.SHUT_WR)
    reader.join(_END_S)


class _Reader(threading.Thread):
    """Reads what a server answers, so that the server never waits for room; maps the memory that it offers, or not."""

    def __init__(self, channel: Channel, fuzzer: Fuzzer) -> None:
        super().__init__(daemon=True)
        self._channel, self._maps, self._noise = channel, fuzzer.choice.random() < 0.5, fuzzer.choice.randbytes(1000)
        self._memories: list[torch.Tensor] = []
        self.start()

    def run(self) -> None:
        with contextlib.suppress(ChannelError):
            while True:
                fields, size_bytes = self._channel.receive()
                self._channel.receive_into([memoryview(bytearray(size_bytes))])
                offered = fields.get("memory") or {}
                if self._maps and "segments" in offered:
                    with contextlib.suppress(OSError):  # the server has ended meanwhile
                        self._memories += [mapped(offer) for offer in offered["segments"]]

    def spoil(self) -> None:
        """Fills the memory with random bytes, which the server may be reading."""
        for memory in self._memories:
            part = memory[: len(self._noise)]
            part.copy_(torch.frombuffer(bytearray(self._noise[: part.numel()]), dtype=torch.uint8))


def _serving(server: Server) -> Callable[[], str | None]:
    """Serves on a thread; the result waits for the end, and returns what went wrong, or None without an end."""
    ended: list[str] = []
    thread = threading.Thread(target=lambda: ended.append(server.serve()), daemon=True)
    thread.start()

    def end() -> str | None:
        if not server._members:  # it waits for a worker, and this one was not let in
            server.end("")
        thread.join(_END_S)
        return ended[0] if ended else None

    return end


def _outcome(target: str, number: int, seconds: float, before_kb: int, shared: int, problem: str) -> Outcome:
    growth_kb = resident_kb(os.getpid()) - before_kb
    if not problem and growth_kb > max(MAX_GROWTH_KB, number / 10 if target in ("workers", "pairs") else 0):
        problem = f"memory has grown by {growth_kb / 1000:.1f} MB"
    deadline_s = time.monotonic() + _END_S
    while (left := _num_shared() - shared) > 0:  # the last worker's thread may still be ending
        if time.monotonic() > deadline_s:
            problem = problem or f"{left} segments of shared memory are left"
            break
        time.sleep(0.1)
    return Outcome(target, number, seconds, growth_kb, problem)


def _num_shared() -> int:
    """Segments of shared memory that this process has mapped, as worker or as server."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:lightning_multigpu")


TARGETS: dict[str, Callable[[int, int], Outcome]] = {"strangers": strangers, "workers": workers, "pairs": pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=100_000, metavar="N", help="to each target (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="NAME")
    arguments = parser.parse_args()
    print(f"# {time.strftime('%Y-%m-%d')}: python -m benchmarks.server_fuzz {' '.join(sys.argv[1:])}".rstrip())
    print(heading())
    print(f"{'target':<12}{'messages':>10}{'seconds':>10}{'growth (MB)':>13}  problem")
    problems = 0
    for name in arguments.only:
        outcome = TARGETS[name](arguments.messages, arguments.seed)
        problems += bool(outcome.problem)
        print(
            f"{name:<12}{outcome.messages:>10}{outcome.seconds:>10.0f}{outcome.growth_kb / 1000:>13.1f}  "
            f"{outcome.problem or 'none'}",
            flush=True,
        )
    sys.exit(problems > 0)


if __name__ == "__main__":
    main()
