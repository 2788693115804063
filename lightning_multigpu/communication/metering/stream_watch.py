"""Reports to an observer which transfers on CUDA streams the device has reached or ended."""

from __future__ import annotations

import threading

import torch

from lightning_multigpu.communication.metering.records import Transfer

_LOOK_S = 0.5


class StreamWatch:
    """Checks the events of transfers that the host has put on a stream and does not wait for.

    The host continues, or waits for the device in a CUDA function such as ``.item()``; only the events show what the
    device waits for. A thread checks them twice a second, from the first transfer until :meth:`stop`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: list[Transfer] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def add(self, transfer: Transfer) -> None:
        """Adds a transfer whose begin was noted."""
        with self._lock:
            self._under_way.append(transfer)
            if self._thread is None:
                device = torch.cuda.current_device()
                self._thread = threading.Thread(target=self._run, args=(device,), name="stream-watch", daemon=True)
                self._thread.start()

    def look(self) -> None:
        """Reports the transfers that the device has reached or ended."""
        with self._lock:
            transfers = list(self._under_way)
        ended = {id(transfer) for transfer in transfers if transfer.report()}
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
        torch.cuda.set_device(device)  # a new thread uses device 0, which is another rank's
        while not stopping.wait(_LOOK_S):
            try:
                self.look()
            except RuntimeError:  # the device has failed; every thread that waits for it gets the error too
                return
