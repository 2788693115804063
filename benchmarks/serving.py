"""Processor time of a parameter server, against the copies and the optimizer's steps on the same bytes alone.

    python -m benchmarks.serving [--modes sync async] [--steps 20] [--turns 5]

Two workers push gradients that they have already, and pull weights; the model is the MLP of 6.3 M parameters of
``bench strategies``, with SGD. For S bytes of gradients and N workers, an update serves N pushes and N pulls
(synchronous) or one of each (asynchronous), in buckets of 4 MiB, through memory or over loopback. "alone" copies as
many bytes in and out, from and to memory of S bytes a worker, averages and steps the optimizer, in a process that does
nothing else; "sockets" receives and sends the bytes instead, over loopback, in one thread, from and to a process that
does nothing else. The ways take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks.heading import heading
from lightning_multigpu.bench.spread import Spread
from lightning_multigpu.bench.strategies.models import BenchMLP
from lightning_multigpu.communication.channel import _receive_all, _send_all
from lightning_multigpu.communication.checksums import bytes_of
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.parameter_server.consistency import Consistency
from lightning_multigpu.engine.parameter_server.remote_optimizer import RemoteOptimizer
from lightning_multigpu.engine.parameter_server.server_connections import ServerConnections
from lightning_multigpu.runtime.server_process import ServerProcess

_WORKERS = 2
_BUCKET_BYTES = 4 * 2**20
_ZEROS = bytes(_BUCKET_BYTES)
_SECRET = b"of this benchmark alone"


def made() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Parameters with gradients, and their optimizer."""
    torch.manual_seed(0)
    parameters = list(BenchMLP().parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters, torch.optim.SGD(parameters, lr=1e-9)


def work(worker: int, mode: str, shares_memory: bool, port: int, together: Any, turns: Any, own: Any) -> None:
    """Steps as often as the main process says; adds this process's processor time up."""
    torch.set_num_threads(1)

    def gather(value: Any) -> list[Any]:
        together.wait()
        return [value] * _WORKERS

    rules = Consistency(is_synchronous=mode == "sync")
    address = [("127.0.0.1", port)]
    connections = ServerConnections(
        address, _SECRET, worker=worker, num_workers=_WORKERS, consistency=rules, meter=Meter(), gather=gather,
        shares_memory=shares_memory,
    )  # fmt: skip
    connections.open(timeout_s=60)
    _, optimizer = made()
    served = RemoteOptimizer(optimizer, connections, bucket_bytes=_BUCKET_BYTES)
    while steps := turns[worker].get():
        start_s = time.process_time()
        for _ in range(steps):
            optimizer.step()
        own[worker] += time.process_time() - start_s
        turns[worker].task_done()
    served.close()
    connections.close()


class Serving:
    """A server, and workers that step when told to."""

    def __init__(self, mode: str, *, shares_memory: bool) -> None:
        self._server = ServerProcess("127.0.0.1", _SECRET, num_threads=1)
        context = mp.get_context("fork")
        self.turns = [context.JoinableQueue() for _ in range(_WORKERS)]
        self.own = context.Array("d", _WORKERS)
        arguments = (mode, shares_memory, self._server.port, context.Barrier(_WORKERS), self.turns, self.own)
        self._workers = [context.Process(target=work, args=(k, *arguments)) for k in range(_WORKERS)]
        for process in self._workers:
            process.start()
        self._pid = psutil.Process(self._server._process.pid)

    def run(self, steps: int) -> tuple[float, float, float]:
        """Seconds a step of each worker: of the server's processor time, of a worker's, and of the clock's."""
        before, own, start_s = self._pid.cpu_times(), sum(self.own), time.perf_counter()
        for queue in self.turns:
            queue.put(steps)
        for queue in self.turns:
            queue.join()
        after, wall_s = self._pid.cpu_times(), time.perf_counter() - start_s
        served_s = after.user + after.system - before.user - before.system
        return served_s / steps, (sum(self.own) - own) / _WORKERS / steps, wall_s / steps

    def close(self) -> None:
        """Ends all of them."""
        for queue in self.turns:
            queue.put(0)
        for process in self._workers:
            process.join()
        self._server.close()


class Alone:
    """The copies and updates of a server, bucket by bucket, in one thread.

    Args:
        mode: "sync" or "async".
        over_sockets: receive gradients from another process and send weights to it, instead of copying.
    """

    def __init__(self, mode: str, *, over_sockets: bool) -> None:
        self._together = _WORKERS if mode == "sync" else 1
        self._updates = 1 if mode == "sync" else _WORKERS
        parameters, self._optimizer = made()
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self._weights = flat.split(_BUCKET_BYTES // 4)
        self._gradients = [torch.randn_like(flat).split(_BUCKET_BYTES // 4) for _ in range(self._together)]
        self._far = [torch.randn_like(flat).split(_BUCKET_BYTES // 4) for _ in range(_WORKERS)]
        self._incoming = _connected(_send_always) if over_sockets else None
        self._outgoing = _connected(_receive_always) if over_sockets else None

    def step(self) -> None:
        """As many updates as the server makes in a step of each worker."""
        for update in range(self._updates):
            workers = self._far if self._updates == 1 else self._far[update : update + 1]
            for number, (bucket, *gradients) in enumerate(zip(self._weights, *self._gradients, strict=True)):
                for gradient, far in zip(gradients, workers, strict=True):
                    self._take(gradient, far[number])
                total, *others = gradients
                for other in others:
                    total += other
                if others:
                    total /= len(gradients)
                weights = nn.Parameter(bucket, requires_grad=False)
                weights.grad = total
                self._optimizer.param_groups[0]["params"] = [weights]
                self._optimizer.step()
                for far in workers:
                    self._give(bucket, far[number])

    def _take(self, gradient: Tensor, far: Tensor) -> None:
        if self._incoming is None:
            gradient.copy_(far)
        else:
            _receive_all(self._incoming, [bytes_of(gradient)])

    def _give(self, weights: Tensor, far: Tensor) -> None:
        if self._outgoing is None:
            far.copy_(weights)
        else:
            _send_all(self._outgoing, [bytes_of(weights)])


def _connected(work: Callable[[socket.socket], None]) -> socket.socket:
    """A connection over loopback to a new process that does nothing but work."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with contextlib.suppress(OSError):
            work(socket.create_connection(listener.getsockname()))

    mp.get_context("fork").Process(target=run, daemon=True).start()
    return listener.accept()[0]


def _send_always(sock: socket.socket) -> None:
    while True:
        sock.sendall(_ZEROS)


def _receive_always(sock: socket.socket) -> None:
    room = bytearray(_BUCKET_BYTES)
    while sock.recv_into(room, 0, socket.MSG_WAITALL):
        pass


def training() -> Callable[[], None]:
    """A step of a worker without its communication, at the batch size of ``bench strategies``."""
    model = BenchMLP()
    batch = model.example_batch(BenchMLP.default_batch_size)

    def step() -> None:
        model.zero_grad()
        model.training_step(batch, 0).backward()  # type: ignore[no-untyped-call]

    return step


def timed(step: Callable[[], None], steps: int) -> float:
    """Seconds of processor time a step."""
    start_s = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - start_s) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["sync", "async"], choices=["sync", "async"])
    parser.add_argument("--steps", type=int, default=20, help="of a turn (%(default)s)")
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{heading()}\n# {_WORKERS} workers; medians of {given.turns} turns of {given.steps} steps\n"
        "# ms for a step of each worker: processor time of the server, of a worker's communication, of the clock;\n"
        "# processor time of the same copies and updates alone, and over sockets; of forward and backward\n"
        f"{'':14}{'server':>22}{'worker':>8}{'clock':>8}{'alone':>22}{'sockets':>8}  server/alone  server/sockets"
        "  training"
    )
    for mode in given.modes:
        servings = {way: Serving(mode, shares_memory=way == "memory") for way in ("memory", "loopback")}
        ways = [Alone(mode, over_sockets=over_sockets) for over_sockets in (False, True)]
        train = training()
        for serving in servings.values():
            serving.run(3)
        for step in [*(way.step for way in ways), train]:
            step()
        rows: dict[str, list[list[float]]] = {way: [] for way in servings}
        for _ in range(given.turns):
            turn = {way: serving.run(given.steps) for way, serving in servings.items()}
            others = [timed(step, given.steps) for step in [*(way.step for way in ways), train]]
            for way, found in turn.items():
                rows[way].append([*found, *others])
        for way, serving in servings.items():
            serving.close()
            _print_row(f"{mode} {way}", rows[way])


def _print_row(name: str, rows: list[list[float]]) -> None:
    server, worker, clock, alone, sockets, step = (Spread.of(found).scaled(1e3) for found in zip(*rows, strict=True))
    print(
        f"{name:14}{server.median:8.1f} ({server.p25:4.1f} - {server.p75:4.1f}){worker.median:8.1f}"
        f"{clock.median:8.1f}{alone.median:8.1f} ({alone.p25:4.1f} - {alone.p75:4.1f}){sockets.median:8.1f}"
        f"{server.median / alone.median:14.2f}{server.median / sockets.median:16.2f}{step.median:10.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
