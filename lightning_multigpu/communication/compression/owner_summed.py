"""The all-reduce in which each rank owns a part of the sum.

Every rank sends its values of a part to the part's owner; the owner sums them, and sends the sum to all. With N = 3::

                rank 0 owns a     rank 1 owns b     rank 2 owns c
    start       a0 b0 c0          a1 b1 c1          a2 b2 c2
    TO_OWNER    b0 -> 1, c0 -> 2  a1 -> 0, c1 -> 2  a2 -> 0, b2 -> 1
    holds       A                 B                 C
    FROM_OWNER  A -> 1, 2         B -> 0, 2         C -> 0, 1

A rank sends as much as in a ring, 2(N-1)/N of the tensor, but values are encoded only twice, whatever N is: by each
rank for the owner, which sums in float32, and by the owner. Every rank, the owner included, decodes the sum, so that
all get the same bits. A part is cut into segments; while one is encoded or decoded in the cache, others are being
sent::

    encode  s0 s1 s2                   sum, encode  t0 t1 t2      decode  u0 u1 u2
    wire     [- s0 -][- s1 -][- s2 -]                [- t0 -][- t1 -][- t2 -]

With error feedback each rank keeps the errors of encoding its parts and its sums. Both are added to the next step's
gradients, so that the sum over ranks loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.compression.compressors import Compressor
from lightning_multigpu.communication.ring import Messages, chunk_bounds

DEFAULT_SEGMENT_ELEMENTS = 1 << 18
"""One MiB of float32: a segment fits into a core's cache, and the overhead of a message is small."""

_ALIGNMENT_BYTES = 64

# Messages with one tag between two ranks arrive in the order of sending. The ring uses higher tags.
TO_OWNER = 1
FROM_OWNER = 2


@dataclass(frozen=True)
class Segment:
    """Elements ``start`` to ``stop`` of the tensor, and the place of their encoding in the owner's wire."""

    start: int
    stop: int
    offset_bytes: int
    num_bytes: int

    def encoded(self, wire: Tensor) -> Tensor:
        """The segment's part of its owner's wire."""
        return wire[self.offset_bytes : self.offset_bytes + self.num_bytes]


def segments_by_owner(
    compressor: Compressor, numel: int, world_size: int, segment_elements: int
) -> list[list[Segment]]:
    """The segments of each rank's shard, in order; none for a rank whose shard is empty."""
    owners = []
    for first, last in chunk_bounds(numel, world_size):
        segments: list[Segment] = []
        offset_bytes = 0
        for start in range(first, last, segment_elements):
            stop = min(start + segment_elements, last)
            num_bytes = compressor.encoded_bytes(stop - start)
            segments.append(Segment(start, stop, offset_bytes, num_bytes))
            offset_bytes += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        owners.append(segments)
    return owners


def sent_bytes(segments: list[list[Segment]], rank: int) -> int:
    """Bytes that ``rank`` sends: every other shard once, its own shard to every other rank."""
    totals = [sum(segment.num_bytes for segment in shard) for shard in segments]
    return sum(totals) - totals[rank] + (len(totals) - 1) * totals[rank]


class ShardBuffers:
    """Encoded shards: this rank's parts and sums, which it sends, and the other ranks', which it receives."""

    def __init__(self, segments: list[list[Segment]], rank: int) -> None:
        ends = [-(-(s[-1].offset_bytes + s[-1].num_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES if s else 0
                for s in segments]  # fmt: skip
        peers = [peer for peer in range(len(segments)) if peer != rank]
        self.parts_out = {peer: torch.empty(ends[peer], dtype=torch.uint8) for peer in peers}
        self.parts_in = {peer: torch.empty(ends[rank], dtype=torch.uint8) for peer in peers}
        self.sums_out = torch.empty(ends[rank], dtype=torch.uint8)
        self.sums_in = {peer: torch.empty(ends[peer], dtype=torch.uint8) for peer in peers}


@dataclass
class OwnerSummed:
    """One all-reduce: :meth:`send_parts` starts it, :meth:`finish` ends it.

    Attributes:
        values: flat float32; becomes the sum or the average.
        errors: with error feedback, flat float32: the errors to add, and the memory for the errors of this step.
    """

    compressor: Compressor
    messages: Messages
    segments: list[list[Segment]]
    buffers: ShardBuffers
    values: Tensor
    errors: tuple[Tensor, Tensor] | None
    average: bool
    _sends: list[dist.Work] = field(default_factory=list)
    _parts: dict[int, list[dist.Work]] = field(default_factory=dict)
    _sums: dict[int, list[dist.Work]] = field(default_factory=dict)

    def send_parts(self) -> None:
        """Encodes the shards that other ranks own, and starts to send them."""
        messages, buffers = self.messages, self.buffers
        for peer in messages.peers:
            self._parts[peer] = [
                messages.receive(segment.encoded(buffers.parts_in[peer]), peer, TO_OWNER)
                for segment in self.segments[messages.rank]
            ]
            self._sums[peer] = [
                messages.receive(segment.encoded(buffers.sums_in[peer]), peer, FROM_OWNER)
                for segment in self.segments[peer]
            ]
        for index in range(max(map(len, self.segments))):
            for peer in messages.peers:
                if index < len(self.segments[peer]):
                    segment = self.segments[peer][index]
                    part = segment.encoded(buffers.parts_out[peer])
                    self.compressor.encode(self._with_error(segment), part)
                    self._sends.append(messages.send(part, peer, TO_OWNER))

    def finish(self) -> bool:
        """Makes and sends the sums of this rank's shard, and decodes all sums; returns whether all are finite."""
        all_finite = True
        for index, segment in enumerate(self.segments[self.messages.rank]):
            self._sum_and_send(index, segment)
            all_finite &= self._decode(segment, self.buffers.sums_out)
        for peer in self.messages.peers:
            for segment, work in zip(self.segments[peer], self._sums[peer], strict=True):
                self.messages.wait(work)
                all_finite &= self._decode(segment, self.buffers.sums_in[peer])
        for send in self._sends:
            self.messages.wait(send)
        return all_finite

    def _sum_and_send(self, index: int, segment: Segment) -> None:
        messages, buffers = self.messages, self.buffers
        total = self._with_error(segment)
        for peer in sorted(self._parts):  # always in the same order, so that runs are reproducible
            messages.wait(self._parts[peer][index])
            self.compressor.add_decoded(segment.encoded(buffers.parts_in[peer]), total)
        if self.average:
            total.div_(messages.world_size)
        encoded = segment.encoded(buffers.sums_out)
        self.compressor.encode(total, encoded)
        self._sends += [messages.send(encoded, peer, FROM_OWNER) for peer in messages.peers]
        if self.average and self.errors is not None:
            total.mul_(messages.world_size)  # the next step divides this rank's error of the average again

    def _with_error(self, segment: Segment) -> Tensor:
        """This rank's values of a segment plus the error, in memory that may be overwritten."""
        given = self.values[segment.start : segment.stop]
        if self.errors is None:
            return given
        before, after = (errors[segment.start : segment.stop] for errors in self.errors)
        return torch.add(given, before, out=after)

    def _decode(self, segment: Segment, wire: Tensor) -> bool:
        encoded = segment.encoded(wire)
        self.compressor.decode(encoded, self.values[segment.start : segment.stop])
        # Without error feedback the result is not used.
        return self.errors is None or self.compressor.is_finite(encoded, segment.stop - segment.start)
