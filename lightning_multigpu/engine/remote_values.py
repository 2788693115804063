"""Remote values: tensors of other ranks, which arrive when the last rank of a group writes or needs them.

The last position of the group writes a checkpoint of its own tensors and remote ones. ``torch.save`` asks for the
memory of one tensor after the other, so that the rank writes an ordinary file without holding all of it::

    last position       torch.save: [own 0] [own 1] [ask 2 ..... write 2] [ask 3 ..... write 3] ... end
                                               |       ^                     |       ^               |
    position 0          offer 2, offer 3;    serve: send 2               serve: send 3             done
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.storage import TypedStorage
from torch.utils._pytree import tree_map_only

from lightning_multigpu.communication.point_to_point import PointToPointGroup
from lightning_multigpu.engine.placeholder import Placeholder

_SENT_AT_ONCE_BYTES = 4096


class RemoteTensor(Placeholder):
    """A placeholder of contiguous values that another rank sends on demand; ``torch.save`` writes these values.

    Args:
        like: gives the shape and dtype.
        source: the name of the missing tensor, for messages.
        fetch: returns the values, in the host's memory.
    """

    @staticmethod
    def __new__(cls, like: Tensor, source: str, fetch: Callable[[], Tensor]) -> RemoteTensor:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=torch.device("cpu"))

    def __init__(self, like: Tensor, source: str, fetch: Callable[[], Tensor]) -> None:
        super().__init__(like, source)
        self.fetch = fetch

    def __reduce_ex__(self, protocol: Any) -> Any:
        template: Any = torch.empty(0, dtype=self.dtype)
        rebuild, _ = template.__reduce_ex__(protocol)
        if rebuild is not torch._utils._rebuild_tensor_v2:  # torch.uint16, for example, has no typed storage
            values: Any = self.fetch()
            return values.__reduce_ex__(protocol)
        memory = _RemoteStorage(self.nbytes, self.fetch)
        storage = TypedStorage(wrap_storage=memory, dtype=self.dtype, _internal=True)  # type: ignore[no-untyped-call]
        storage._fake_device = "cpu"  # type: ignore[assignment]  # the device that the file names
        return rebuild, (storage, 0, tuple(self.shape), self.stride(), False, OrderedDict())


class _RemoteStorage(torch.UntypedStorage):
    """Memory that ``torch.save`` gets by ``cpu()``, as it does for storages of other devices."""

    def __new__(cls, num_bytes: int, fetch: Callable[[], Tensor]) -> _RemoteStorage:
        return super().__new__(cls, num_bytes, device="meta")  # type: ignore[call-arg]  # torch's stubs lack it

    def __init__(self, num_bytes: int, fetch: Callable[[], Tensor]) -> None:
        self._fetch = fetch

    def cpu(self) -> torch.UntypedStorage:
        return self._fetch().untyped_storage()


class RemoteValues:
    """Tensors that the ranks of a group offer to its last position."""

    def __init__(self, group: PointToPointGroup, position: int) -> None:
        self._group = group
        self._position = position
        self._last = group.num_ranks - 1
        self._offered: dict[Hashable, Tensor] = {}

    def offer(self, tensor: Tensor, key: Hashable | None = None) -> Hashable:
        """Keeps a tensor of this rank, which is not the last, until the next :meth:`served`; returns its key."""
        key = len(self._offered) if key is None else key
        self._offered[key] = tensor
        return key

    def remote(self, like: Tensor, key: Hashable, sender: int, source: str) -> RemoteTensor:
        """At the last position, the tensor that the rank at ``sender`` offers under ``key``."""

        def fetch() -> Tensor:
            self._group.send_object(key, sender)
            values = self._group.receive(torch.empty(like.shape, dtype=like.dtype), sender)
            self._group.finish()
            return values

        return RemoteTensor(like, source, fetch)

    def gather(self, states: Mapping[int, Any], senders: Sequence[int]) -> dict[int, Any]:
        """At the last position, the optimizer states at ``senders``, with remote tensors; elsewhere an empty dict.

        A collective of the last position and the senders.

        Args:
            states: this rank's states, by the number of a parameter: nested containers. Small tensors travel at once.
            senders: positions but the last, in order.
        """
        if self._position in senders:
            self._group.send_object(tree_map_only(Tensor, self._left_here, dict(states)), self._last)
        received: dict[int, Any] = {}
        for sender in senders if self._position == self._last else ():
            found = self._group.receive_object(sender)
            received.update(tree_map_only(_Offer, partial(self._remote_state, sender), found))
        self._group.finish()
        return received

    def fetched(self, whole: dict[Any, Any]) -> dict[Any, Any]:
        """At the last position, ``whole`` with the values of other ranks in host memory; elsewhere ``whole``.

        A collective of the group.
        """
        with self.served():
            is_last = self._position == self._last
            return tree_map_only(RemoteTensor, lambda tensor: tensor.fetch(), whole) if is_last else whole

    def _left_here(self, tensor: Tensor) -> Tensor | _Offer:
        """A small tensor of an optimizer's state itself, or an offer of a large one."""
        is_plain = type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided
        if not is_plain or tensor.nbytes <= _SENT_AT_ONCE_BYTES:
            return tensor.detach().to("cpu", copy=True)
        return _Offer(self.offer(tensor), tuple(tensor.shape), tensor.dtype)

    def _remote_state(self, sender: int, offer: _Offer) -> Tensor:
        like = torch.empty(offer.shape, dtype=offer.dtype, device="meta")
        return self.remote(like, offer.key, sender, "a state of an optimizer")

    @contextmanager
    def served(self) -> Iterator[None]:
        """Within the block the last position can fetch offered tensors; the others enter when it has left the block.

        A collective of the group, after which nothing is offered.
        """
        if self._position == self._last:
            try:
                yield
            finally:
                for position in range(self._last):
                    self._group.send_object(None, position)
                self._group.finish()
        else:
            while (key := self._group.receive_object(self._last)) is not None:
                self._group.send(self._offered[key], self._last)
                self._group.finish()
            self._offered.clear()
            yield


@dataclass(frozen=True)
class _Offer:
    """A tensor of an optimizer's state that another rank offers."""

    key: Hashable
    shape: tuple[int, ...]
    dtype: torch.dtype
