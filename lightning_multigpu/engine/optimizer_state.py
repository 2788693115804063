"""``optimizer.state`` as user code sees it where this process does not hold all of it.

On one device user code reads the states, changes them in place, clears them, or puts others in place. Each class does
the same, or raises:

================  =========================  =================================  ====================================
class             where states are           a value that is read               what user code changes
================  =========================  =================================  ====================================
StateElsewhere    in servers, or in shards   raises                             is noted; the next step carries it out
PartialState      with the parameters: each  whole on the rank that has it, a   takes place on the rank that has it
                  rank has some              placeholder on the others
================  =========================  =================================  ====================================

All ranks run the same user code, so that a change comes to the rank that has the value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from lightning_multigpu.engine.placeholder import Placeholder

_WHOLE = "trainer.save_checkpoint(path) on all ranks writes whole states"


class StateElsewhere(MutableMapping[Any, Any]):
    """The state of an optimizer whose updates other processes make.

    Args:
        name: of the optimizer's class, for messages.

    Attributes:
        given: states that user code has put in place since :meth:`take`, by parameter; empty ones where it has removed
            some.
        own: the states that this process has: none.

    Raises:
        ValueError: a value is read.
    """

    def __init__(self, name: str) -> None:
        self.given: dict[Any, Any] = {}
        self.own: MutableMapping[Any, Any] = defaultdict(dict)
        self._name = name
        self._is_cleared = False

    def take(self, parameters: Iterable[Tensor]) -> dict[Tensor, Mapping[str, Any]]:
        """The new states of those parameters whose states user code has changed; forgets the changes."""
        changes = {p: self.given.get(p, {}) for p in parameters if self._is_cleared or p in self.given}
        self.given, self._is_cleared = {}, False
        return changes

    def clear(self) -> None:
        self.given.clear()
        self._is_cleared = True

    def __setitem__(self, parameter: Any, state: Any) -> None:
        self.given[parameter] = state

    def __delitem__(self, parameter: Any) -> None:
        self.given[parameter] = {}

    def pop(self, parameter: Any, *default: Any) -> None:
        """Removes a parameter's state, and returns None: the state is elsewhere."""
        del self[parameter]

    def _refuse(self, *_: Any) -> NoReturn:
        raise ValueError(
            f"the state of {self._name} is read, by optimizer.state or optimizer.state_dict(), and this process does "
            "not have it: the optimizer is stepped by servers or on the host. optimizer.state.clear(), del "
            "optimizer.state[parameter] and optimizer.load_state_dict(...) take effect in the next step; "
            f"{_WHOLE}; to read states or to change them in place, use strategy='ring_ddp'"
        )

    __getitem__ = __iter__ = __len__ = __contains__ = __reduce_ex__ = _refuse


class PartialState(MutableMapping[Any, Any]):
    """The state of an optimizer some of whose parameters other ranks update.

    Their states are placeholders: to change one in place does nothing here, and to compute a number with one raises.

    Args:
        optimizer: whose groups list all parameters.
        key: returns under which key a parameter's state is kept; None if another rank has it.
        show: returns what user code gets for the state that this rank has of a parameter.
        take: returns what is kept of a state that user code puts in a parameter's place.

    Attributes:
        own: the states that this rank has, by key.
        given: none: what user code puts in place is in ``own``.
    """

    given: Mapping[Any, Any] = {}

    def __init__(
        self,
        optimizer: Optimizer,
        key: Callable[[Any], Any],
        show: Callable[[Any, Any], Any] = lambda parameter, state: state,
        take: Callable[[Any, Any], Any] = lambda parameter, state: state,
        *,
        own: MutableMapping[Any, Any] | None = None,
    ) -> None:
        self.own: MutableMapping[Any, Any] = defaultdict(dict) if own is None else own
        self._optimizer, self._key, self._show, self._take = optimizer, key, show, take

    def take(self, parameters: Iterable[Tensor]) -> dict[Any, Any]:
        """As that of :class:`StateElsewhere`: changes took place at once, and none is left."""
        return {}

    def adopt(self, states: Any) -> None:
        """Takes a whole mapping that the optimizer's constructor, or user code, has put in place; it stays the same."""
        self.own = states
        for parameter, state in [*states.items()]:
            key = self._key(parameter)
            if key is not parameter:
                del states[parameter]
            if key is not None:
                states[key] = self._take(parameter, state)

    def clear(self) -> None:
        self.own.clear()

    def __getitem__(self, parameter: Any) -> Any:
        key = self._key(parameter)
        if key is None:
            first = next((state for state in self.own.values() if isinstance(state, Mapping) and state), ("state",))
            return _RemoteState(parameter, first)
        return self._show(parameter, self.own[key])

    def __setitem__(self, parameter: Any, state: Any) -> None:
        if (key := self._key(parameter)) is not None:
            self.own[key] = self._take(parameter, state)

    def __delitem__(self, parameter: Any) -> None:
        self.own.pop(self._key(parameter), None)

    def __iter__(self) -> Iterator[Any]:
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        keys = [self._key(parameter) for parameter in parameters]
        pairs = [*zip(parameters, keys, strict=True)]
        # Before the first step no rank has a state; a rank that trains no parameter of its own does not know.
        lists_others = bool(self.own) or all(key is None or not parameter.requires_grad for parameter, key in pairs)
        for parameter, key in pairs:
            if lists_others if key is None else key in self.own:
                yield parameter
        known = set(keys)
        yield from (key for key in [*self.own] if key not in known)  # of the optimizer as a whole

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: Any) -> bool:
        return any(parameter is each for each in self)

    def get(self, parameter: Any, default: Any = None) -> Any:
        if parameter in self:
            return self[parameter]
        return default

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _not_written()


class _RemoteState(dict[str, Any]):
    """A parameter's state on another rank: placeholders by name."""

    def __init__(self, parameter: Tensor, names: Iterable[str]) -> None:
        self._parameter = parameter
        super().__init__({name: self[name] for name in names})

    def __missing__(self, name: str) -> Placeholder:
        return Placeholder(self._parameter, f"{name!r} of optimizer.state ({_WHOLE})")

    def __deepcopy__(self, memo: Any) -> _RemoteState:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _not_written()


def watch(optimizer: Optimizer, *functions: Callable[..., Any]) -> None:
    """Makes the state of an optimizer a :class:`PartialState`, also where user code has put another in its place.

    ``functions`` are its ``key``, ``show`` and ``take``.
    """
    if not isinstance(optimizer.state, PartialState):
        watched = PartialState(optimizer, *functions)
        watched.adopt(optimizer.state)
        optimizer.state = watched  # type: ignore[assignment]


def held_states(optimizer: Optimizer) -> MutableMapping[Any, Any]:
    """The states that this process has, by parameter, as the optimizer's step uses them."""
    state: Any = optimizer.state
    return state.own if isinstance(state, PartialState | StateElsewhere) else state


@contextmanager
def plain_state(optimizer: Optimizer) -> Iterator[None]:
    """Within the block ``optimizer.state`` has the states that this process has, for methods of the optimizer."""
    watched: Any = optimizer.state
    if not isinstance(watched, PartialState):
        yield
        return
    optimizer.state = watched.own  # type: ignore[assignment]
    try:
        yield
    finally:
        watched.own, optimizer.state = optimizer.state, watched  # type: ignore[assignment]


def release(optimizers: Iterable[Optimizer]) -> None:
    """Gives optimizers the states that this process has."""
    for optimizer in optimizers:
        optimizer.state = held_states(optimizer)  # type: ignore[assignment]


def _not_written() -> ValueError:
    return ValueError(f"an optimizer's state is copied or written, and other ranks have a part of it: {_WHOLE}")
