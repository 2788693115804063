"""Watch of transfers on CUDA streams: tells an observer how far the device has come with them."""

from __future__ import annotations

import threading

import torch

from lightning_multigpu.communication.metering.records import Transfer

_LOOK_S = 0.5


class StreamWatch:
    """Looks at the events of transfers that the host has put on a stream and does not wait for.

    The host goes on, or spins in a function of CUDA that waits for the device, such as ``.item()``; only the events
    show what the device waits for. A thread looks at them twice a second, from the first transfer on until
    :meth:`stop`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: list[Transfer] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def add(self, transfer: Transfer) -> None:
        """Takes a transfer that was noted as begun."""
        with self._lock:
            self._under_way.append(transfer)
            if self._thread is None:
                device = torch.cuda.current_device()
                self._thread = threading.Thread(target=self._run, args=(device,), name="stream-watch", daemon=True)
                self._thread.start()

    def look(self) -> None:
        """Tells the observer of transfers which the device has come to, or ended."""
        with self._lock:
            transfers = list(self._under_way)
        ended = {id(transfer) for transfer in transfers if transfer.tell()}
        with self._lock:
            self._under_way = [transfer for transfer in self._under_way if id(transfer) not in ended]

    def stop(self) -> None:
        """Ends the thread; transfers under way are forgotten."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        self._thread, self._under_way, self._stopping = None, [], threading.Event()

    def _run(self, device: int) -> None:
        stopping = self._stopping
        torch.cuda.set_device(device)  # a thread begins with the first one, which is another rank's
        while not stopping.wait(_LOOK_S):
            try:
                self.look()
            except RuntimeError:  # the device has failed, and so will whoever waits for it
                return
