"""Metered collectives on tensors, Python objects and scalars over one process group."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.digest import ranks_text
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.metering.records import Transfer
from lightning_multigpu.communication.metering.traffic import sent_share
from lightning_multigpu.communication.tensors import alike, apply_flat

_REDUCTIONS: dict[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
    "product": dist.ReduceOp.PRODUCT,
}
_WORD_BYTES, _ROOM_BYTES = 8, 48  # of a meeting's row: two words, and room for small values
_ROW_BYTES = 2 * _WORD_BYTES + _ROOM_BYTES

_SAME_ORDER = (
    "Every rank has to make the same calls in the same order: self.log(sync_dist=True), self.all_gather, "
    "trainer.save_checkpoint and barriers on all ranks, not under `if self.trainer.is_global_zero`"
)
_SAME_SHAPE = (
    "Every rank has to pass a tensor of the same shape and dtype: pad it to the largest, leave the last batch out "
    "(drop_last=True), or use a metric of torchmetrics, which gathers tensors of different lengths"
)


class MeteredGroup:
    """The collectives that strategies need besides the exchange of gradients, over one process group.

    A *checked* collective begins with a meeting: an all-reduce of a table with a row for each rank, as fast as that of
    one number. A row has a digest of the call and, if it fits in, the rank's value, which ends the collective::

        rank 0   | digest of "all_gather of torch.int64, shape (2,)" | 16 | value ...  |
        rank 1   | digest of "all_gather of torch.int64, shape (1,)" |  8 | value      |   <-- all ranks raise

    On GPUs reductions and barriers, for which the host need not wait, are not checked.

    Args:
        name: the meter's name for the group.
        device: the device of the back end's tensors.
        place: the line of the user's code that has made the present call.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        meter: Meter,
        *,
        name: str,
        device: torch.device,
        place: Callable[[], str] = lambda: "an unknown line",
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.first_rank = self.ranks[0]
        self._ranks = ranks_text(self.ranks)
        self.meter = meter
        self._name = name
        self._device = device
        self._on_stream = device.type == "cuda"
        self._place = place

    def all_reduce(
        self, tensor: Tensor, reduction: str | dist.ReduceOp.RedOpType | None, *, checked: str | None = None
    ) -> Tensor:
        """A new tensor with the reduced values, the same on every rank.

        Means of integers are floating-point numbers (torch's default dtype), sums of booleans are integers.

        Args:
            tensor: any shape, on any device; the same shape and dtype on every rank.
            reduction: "sum" (also None), "mean" or "avg", "min", "max", "prod", or a ``ReduceOp``.
            checked: check first that all ranks have made the same call; its name.

        Raises:
            ValueError: the reduction is none of these.
            RuntimeError: ``checked``, and ranks have made different calls.
        """
        op, average = _reduction(reduction)
        value = tensor.detach().to(self._device, copy=True).contiguous()
        if value.dtype == torch.bool:
            value = value.to(torch.int64)
        meets = checked is not None and self._device.type == "cpu"
        with self._metered("all_reduce", value.nbytes, meets=meets):
            everyones: list[bytes] | None = None
            if meets:
                everyones = self._meet(f"{checked} {_described(value)}", _bytes_of(value))
            locally = _LOCALLY.get(op) if isinstance(op, dist.ReduceOp.RedOpType) else None
            if everyones is not None and locally is not None:
                value = locally(_stacked(everyones, value))
            else:
                dist.all_reduce(value, op=op, group=self.group)
        if average:
            if not (value.is_floating_point() or value.is_complex()):
                value = value.to(torch.get_default_dtype())
            value = value / self.size
        return value.to(tensor.device)

    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> Tensor:
        """The tensors of all ranks, stacked: (ranks, *tensor.shape), on ``tensor``'s device.

        Args:
            tensor: the same shape and dtype on every rank.
            sync_grads: let gradients flow back to every rank's tensor; a collective in backward too.

        Raises:
            RuntimeError: shapes or dtypes differ, or ranks have made different calls.
        """
        with self._metered("all_gather", tensor.nbytes * self.size, meets=True, of_a_rank=tensor.nbytes):
            everyones = self._meet(f"all_gather {_described(tensor)}", b"" if sync_grads else _bytes_of(tensor))
            if sync_grads:
                gathered: Tensor = _AllGather.apply(tensor, self)  # type: ignore[no-untyped-call]
                return gathered
            if everyones is not None:
                return _stacked(everyones, tensor)
            return self.gather_tensor(tensor.detach())

    def gather_tensor(self, tensor: Tensor) -> Tensor:
        """:meth:`all_gather` without gradients, and without a record in the meter."""
        value = tensor.contiguous().to(self._device)
        gathered = torch.empty((self.size, *value.shape), dtype=value.dtype, device=self._device)
        dist.all_gather(list(gathered.unbind()), value, group=self.group)
        return gathered.to(tensor.device)

    def broadcast_object(self, obj: Any, src: int) -> Any:
        """``obj`` of the global rank ``src``, on every rank.

        Raises:
            RuntimeError: ranks have made different calls.
        """
        sends = dist.get_rank() == src
        payload = pickle.dumps(obj) if sends else b""
        with self._metered("broadcast", _ROOM_BYTES, meets=True):
            rows = self._meeting(f"broadcast of an object of rank {src}", payload)
        size, sent = rows[self.ranks.index(src)]
        if sends:
            data = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self._device)
        elif size <= _ROOM_BYTES:
            return pickle.loads(sent)
        else:
            data = torch.empty(size, dtype=torch.uint8, device=self._device)
        if size > _ROOM_BYTES:
            with self._metered("broadcast", size, sends=sends):
                dist.broadcast(data, src, group=self.group)
        return obj if sends else pickle.loads(data.cpu().numpy().tobytes())

    def gather_objects(self, obj: Any, *, what: str = "all_gather of objects") -> list[Any]:
        """``obj`` of every rank, in rank order, on every rank; ``what`` names the call in errors.

        Raises:
            RuntimeError: ranks have made different calls.
        """
        payload = pickle.dumps(obj)
        with self._metered("all_gather", _ROOM_BYTES, meets=True):
            rows = self._meeting(what, payload)
        longest = max(size for size, _ in rows)
        if longest <= _ROOM_BYTES:
            return [pickle.loads(sent) for _, sent in rows]
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        with self._metered("all_gather", longest * self.size):
            dist.all_gather(parts, padded, group=self.group)
        return [pickle.loads(part[:size].cpu().numpy().tobytes()) for part, (size, _) in zip(parts, rows, strict=True)]

    def _meet(self, what: str, payload: bytes | None) -> list[bytes] | None:
        """The values of all ranks once all have made the same call; None if they do not fit into the meeting."""
        rows = self._meeting(what, b"" if payload is None else payload)
        return None if payload is None or len(payload) > _ROOM_BYTES else [sent for _, sent in rows]

    def _meeting(self, what: str, payload: bytes) -> list[tuple[int, bytes]]:
        """The size of every rank's payload, and the payload where it fits into the table.

        Raises:
            RuntimeError: on all ranks, if they have made different calls.
        """
        digest = hashlib.blake2b(what.encode(), digest_size=_WORD_BYTES).digest()
        row = digest + len(payload).to_bytes(_WORD_BYTES, "little") + payload[:_ROOM_BYTES]
        if self.size > 1:
            table = torch.zeros(self.size, _ROW_BYTES, dtype=torch.uint8)
            table[self.rank, : len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
            table = table.to(self._device)
            try:
                dist.all_reduce(table, group=self.group)
            except RuntimeError as error:  # as after a fit, where the other ranks' programs have ended
                call = f"{what} at {self._place()}"
                error.add_note(f"{call}: another rank has ended, has failed, or makes another call. {_SAME_ORDER}")
                raise
            rows = [line.tobytes() for line in table.cpu().numpy()]
        else:
            rows = [row.ljust(_ROW_BYTES, b"\0")]
        if any(other[:_WORD_BYTES] != digest for other in rows):
            raise RuntimeError(self._mismatch(what))
        sizes = [int.from_bytes(other[_WORD_BYTES : 2 * _WORD_BYTES], "little") for other in rows]
        return [
            (size, other[2 * _WORD_BYTES : 2 * _WORD_BYTES + size]) for size, other in zip(sizes, rows, strict=True)
        ]

    def _mismatch(self, what: str) -> str:
        """The message about different calls: all ranks tell each other theirs."""
        told = self.gather_objects((what, self._place()), what="names of calls")
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, call in zip(self.ranks, told, strict=True):
            ranks.setdefault(call, []).append(rank)
        calls = "; ".join(f"rank {', '.join(map(str, at))}: {call} at {place}" for (call, place), at in ranks.items())
        kinds = {call.partition(" of ")[0] for call, _ in told}
        return f"ranks have made different calls: {calls}. {_SAME_SHAPE if len(kinds) == 1 else _SAME_ORDER}"

    def broadcast_tensors(self, tensors: list[Tensor], src: int) -> None:
        """Copies the tensors of the global rank ``src`` into every rank's, one message for each dtype and device."""

        def broadcast(flat: Tensor) -> None:
            moved = flat.to(self._device)
            with self._metered("broadcast", moved.nbytes, sends=dist.get_rank() == src):
                dist.broadcast(moved.view(torch.uint8), src, group=self.group)  # Gloo knows few dtypes
            flat.copy_(moved)

        for members in alike(tensor.detach() for tensor in tensors):
            apply_flat(broadcast, members)

    def barrier(self) -> None:
        """Returns when every rank of the group has called it."""
        with self._metered("barrier", 0, meets=self._device.type == "cpu"):
            if self._device.type == "cuda":
                dist.barrier(group=self.group, device_ids=[self._device.index])
            else:
                self._meet("barrier", None)

    def _metered(
        self, operation: str, size_bytes: int, *, sends: bool = True, meets: bool = False, of_a_rank: int | None = None
    ) -> Transfer:
        """Meters a collective; ``meets`` if it begins with a meeting, in which small values of a rank travel."""
        sent_bytes = None if sends else 0
        if meets:
            sent_bytes = round(sent_share("all_reduce", self.size) * _ROW_BYTES * self.size)
            if (size_bytes if of_a_rank is None else of_a_rank) > _ROOM_BYTES:
                sent_bytes += round(sent_share(operation, self.size) * size_bytes)
        return self.begin(operation, size_bytes, sent_bytes=sent_bytes, blocking=True, on_stream=self._on_stream)

    def begin(self, operation: str, size_bytes: int, **described: Any) -> Transfer:
        """Starts to meter a transfer; arguments as of :meth:`.Meter.begin`."""
        return self.meter.begin(
            operation, group=self._name, group_size=self.size, size_bytes=size_bytes, ranks=self._ranks, **described
        )


class _AllGather(torch.autograd.Function):
    """Forward: (*shape) of each rank to (ranks, *shape) on every rank. Backward: this rank's row of the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: MeteredGroup) -> Tensor:
        ctx.group = group
        return group.gather_tensor(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        group: MeteredGroup = ctx.group
        return group.all_reduce(grad_outputs[0], "sum")[group.rank], None


_LOCALLY: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    dist.ReduceOp.PRODUCT: lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    dist.ReduceOp.MIN: lambda stacked: stacked.amin(0),
    dist.ReduceOp.MAX: lambda stacked: stacked.amax(0),
}


def _described(tensor: Tensor) -> str:
    return f"of {tensor.dtype}, shape {tuple(tensor.shape)}"


def _bytes_of(tensor: Tensor) -> bytes | None:
    """The values of a small tensor; None for a large one."""
    if not 0 < tensor.nbytes <= _ROOM_BYTES:
        return None
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _stacked(values: list[bytes], like: Tensor) -> Tensor:
    """The tensors of all ranks from :func:`_bytes_of`: (ranks, *like.shape), on ``like``'s device."""
    flat = torch.frombuffer(bytearray(b"".join(values)), dtype=torch.uint8).view(like.dtype)
    return flat.reshape(len(values), *like.shape).to(like.device)


def _reduction(reduction: Any) -> tuple[Any, bool]:
    if reduction is None:
        return dist.ReduceOp.SUM, False
    if isinstance(reduction, str):
        if reduction.lower() not in _REDUCTIONS:
            raise ValueError(f"reduce_op={reduction!r} is unknown; known: {', '.join(_REDUCTIONS)}")
        return _REDUCTIONS[reduction.lower()], reduction.lower() in ("mean", "avg")
    if reduction == dist.ReduceOp.AVG:
        return dist.ReduceOp.SUM, True  # gloo has no average
    return reduction, False
