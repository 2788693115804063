"""What a compressor is: a setting, and for most of them a way to write numbers in fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor


class Compressor(ABC):
    """How gradients are written on the wire. Objects are settings: they keep nothing, and may be shared."""

    name: ClassVar[str]
    """How a user writes it."""
    has_error_feedback: ClassVar[bool]
    """Whether what a step could not send is added to the gradients of the next step."""


class ElementwiseCompressor(Compressor):
    """Writes any run of elements by itself, in a number of bytes that depends on their number only.

    In the methods, ``values`` are flat and float32, and ``wire`` are flat ``uint8`` of :meth:`encoded_bytes`, at an
    address that is a multiple of 8.
    """

    @abstractmethod
    def encoded_bytes(self, numel: int) -> int:
        """Bytes of ``numel`` encoded elements."""

    @abstractmethod
    def encode(self, values: Tensor, wire: Tensor) -> None:
        """Writes ``values`` to ``wire`` and leaves in ``values`` what was lost: theirs minus what was written.

        NaN and infinity must show in ``wire``, as what :meth:`decode` makes of it.
        """

    @abstractmethod
    def decode(self, wire: Tensor, values: Tensor) -> None:
        """Overwrites ``values`` with what ``wire`` holds."""

    @abstractmethod
    def add_decoded(self, wire: Tensor, values: Tensor) -> None:
        """Adds to ``values`` what ``wire`` holds."""

    @abstractmethod
    def is_finite(self, wire: Tensor, numel: int) -> bool:
        """Whether all of the ``numel`` elements in ``wire`` are finite."""
