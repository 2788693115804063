"""Blocks of layers that can be split together, found by the order in which a step runs them.

A block begins with layers whose outputs are split and ends with the layer that sums them up::

    first, second              Linear - elementwise function - Linear
    gate, up, down             two Linear layers whose outputs are multiplied - Linear
    queries, keys, values, out attention, its heads split; or one fused layer, and out
    attention                  nn.MultiheadAttention
    vocabulary                 an embedding, and the head that has its weight or as many outputs as it has rows

Shapes do not show whether a block computes on parts, or gathers what lies between: whoever applies one looks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import Module, Parameter

from lightning_multigpu._torch_compat import is_transformed
from lightning_multigpu.engine.tensor_split.attention import SplitMultiheadAttention
from lightning_multigpu.engine.tensor_split.layers import (
    BlockInput,
    ColumnSplitLinear,
    RowSplitLinear,
    SplitLayer,
    VocabSplitEmbedding,
    is_linear,
    linear_sizes,
    restore,
)
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.parts import make_whole
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_LARGE_VOCABULARY = 0.05
"""Of a model's parameters; an embedding without a head is worth an all-reduce of its output from there on."""


Way = Mapping[str, Mapping[str, Any]]
"""One way to split a block: options of its layers, by name."""


@dataclass(frozen=True)
class Block:
    """Layers that are split together.

    Attributes:
        shape: of the block, as in this module's table.
        roles: "column", "row", "vocab", "head" or "attention" by the name of the layer.
        ways: to be tried in this order.
        problem: why it cannot be split.
    """

    shape: str
    roles: Mapping[str, str]
    ways: tuple[Way, ...] = ({},)
    problem: str = ""

    @property
    def kind(self) -> str:
        """What blocks of the same structure have in common: the names without the numbers of layers."""
        return kind_of(self.roles)

    @property
    def name(self) -> str:
        """The names of its layers."""
        return _joined(set(self.roles))


def kind_of(names: Iterable[str]) -> str:
    """The names of layers without the numbers of others."""
    return _joined({re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names})


def _joined(of_layers: set[str]) -> str:
    names = sorted(of_layers)
    parent = names[0].rpartition(".")[0]
    if parent and all(name.startswith(f"{parent}.") for name in names) and len(names) > 1:
        return f"{parent}.({', '.join(name[len(parent) + 1 :] for name in names)})"
    return ", ".join(names)


@contextmanager
def order_of_calls(module: Module) -> Iterator[dict[str, int]]:
    """Fills the dict with the names of layers that could be split, in the order in which the block runs them first.

    Layers with the same number have the same input.
    """
    called: dict[str, int] = {}
    inputs: dict[tuple[Any, ...], int] = {}
    kept = []  # alive, so that no other tensor gets the same address
    handles = []

    def note(name: str) -> Callable[..., None]:
        def hook(_: Module, args: tuple[Any, ...]) -> None:
            if name not in called:
                tensor = args[0] if args and isinstance(args[0], Tensor) else None
                kept.append(tensor)
                key = (name,) if tensor is None or is_transformed() else (tensor.data_ptr(), *tensor.shape)
                called[name] = inputs.setdefault(key, len(inputs))

        return hook

    skipped: set[int] = set()
    for name, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            skipped.update(id(inside) for inside in part.modules() if inside is not part)
        if id(part) not in skipped and (is_linear(part) or isinstance(part, nn.Embedding | nn.MultiheadAttention)):
            handles.append(part.register_forward_pre_hook(note(name)))
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def find_blocks(module: Module, called: Mapping[str, int]) -> list[Block]:
    """The blocks of a module, whose layers a step has ``called`` in the order of :func:`order_of_calls`."""
    parts = dict(module.named_modules())
    blocks = list(_vocabularies(module, called))
    taken = {name for block in blocks for name in block.roles}
    linears = [name for name in called if is_linear(parts[name]) and name not in taken]
    start = 0
    while start < len(linears):
        block = _block_at(parts, linears[start : start + 4], called)
        if block is not None:
            blocks.append(block)
        start += 1 if block is None else len(block.roles)
    for name in called:
        if isinstance(parts[name], nn.MultiheadAttention):
            blocks.append(Block("attention", {name: "attention"}))
    return blocks


def planned_blocks(module: Module, roles: Mapping[str, str], found: Sequence[Block]) -> list[Block]:
    """The blocks of a user's plan, roles by name: those of ``found`` with all of their roles, and one of other layers.

    Raises:
        ValueError: a layer cannot have its role.
    """
    known = [block for block in found if block.roles.items() <= roles.items()]
    own = {name: role for name, role in roles.items() if not any(name in block.roles for block in known)}
    parts = dict(module.named_modules())
    for name, role in own.items():
        fits = isinstance(parts[name], nn.Embedding) if role == "vocab" else is_linear(parts[name])
        if not fits:
            raise ValueError(f"plan: {name} is {type(parts[name]).__name__}, which cannot be split by {role!r}")
    return [*known, *([Block("plan", own)] if own else [])]


def _block_at(parts: Mapping[str, Module], names: Sequence[str], called: Mapping[str, int]) -> Block | None:
    """The block that begins with the first of these layers."""
    attention = _attention_at(parts, names, called)
    if attention is not None:
        return attention
    sizes = [linear_sizes(parts[name]) for name in names]  # (in, out)
    have_one_input = len(names) >= 2 and called[names[0]] == called[names[1]]
    if (
        len(names) >= 3
        and have_one_input
        and sizes[0] == sizes[1]
        and sizes[0][1] == sizes[2][0]
        and _are_near(names[:3])
    ):
        return Block("gate, up, down", {names[0]: "column", names[1]: "column", names[2]: "row"})
    if len(names) >= 2 and not have_one_input and _are_near(names[:2]):
        if sizes[0][1] == sizes[1][0]:
            if len(names) >= 3 and sizes[1][1] == sizes[2][0] and _distance(*names[1:3]) < _distance(*names[:2]):
                return None  # the output layer of an attention before a feed-forward block
            return Block("first, second", {names[0]: "column", names[1]: "row"})
        if sizes[0][1] == 2 * sizes[1][0]:
            half = sizes[1][0]
            way = {names[0]: {"sections": (half, half)}}
            return Block("gate, up, down", {names[0]: "column", names[1]: "row"}, (way,))
    return None


def _attention_at(parts: Mapping[str, Module], names: Sequence[str], called: Mapping[str, int]) -> Block | None:
    """The attention that begins with the first of these layers."""
    sizes = [linear_sizes(parts[name]) for name in names]  # (in, out)
    if len(names) == 4:
        (_, q), (_, k), (_, v), (o_in, _) = sizes
        have_one_input = len({called[name] for name in names[:3]}) == 1
        number, of_keys = _heads_of(parts, names[0], names[3], may_be_h=have_one_input)
        if k == v and q == o_in and number and q % number == 0 and k == q // number * of_keys:
            keys, group = {"unit": q // number}, {"unit": q // of_keys}
            way = {names[0]: group, names[1]: keys, names[2]: keys, names[3]: group}
            return Block("attention", dict.fromkeys(names[:3], "column") | {names[3]: "row"}, (way,))
        if not number and q == k == v == o_in and have_one_input and _are_near(names):
            return _uncounted(parts, dict.fromkeys(names[:3], "column") | {names[3]: "row"})
    if len(names) >= 2:
        names = names[:2]
        (q_in, fused), (o_in, _) = sizes[:2]
        # A module around an attention has an attribute of its own about heads, and not just a config.
        counts_heads = any("head" in own for around in _ancestors(*names) for own in vars(parts[around]))
        is_gate = fused == 2 * o_in and not counts_heads
        roles = {names[0]: "column", names[1]: "row"}
        number, of_keys = (0, 0) if is_gate else _heads_of(parts, *names, may_be_h=True)
        unit = o_in // (number or 1)
        if number and o_in % number == 0 and fused == o_in + 2 * unit * of_keys:
            size, of_queries = unit * of_keys, o_in // of_keys
            in_sections = {"sections": (o_in, size, size), "unit": (of_queries, unit, unit)}
            ways = [
                {names[0]: fused_options, names[1]: {"unit": of_queries}}
                for fused_options in (in_sections, {"unit": fused // of_keys})
            ]
            return Block("attention", roles, tuple(ways))
        if fused == 3 * o_in == 3 * q_in and _are_near(names):
            return _uncounted(parts, roles)
    return None


def _uncounted(parts: Mapping[str, Module], roles: dict[str, str]) -> Block:
    """An attention whose number of heads is not known."""
    first, *_, last = roles
    around = kind_of([_ancestors(first, last)[-1]]) or "the module"
    problem = f"no attribute of {around} counts the heads: store their number in __init__, as self.num_heads"
    return Block("attention", roles, problem=problem)


def _are_near(names: Sequence[str]) -> bool:
    """Whether no number of a layer in a list differs between the names, but the last of a sequence."""
    paths = [name.split(".") for name in names]
    for position in range(min(map(len, paths))):
        found = {path[position] for path in paths}
        if len(found) > 1:
            return not any(part.isdecimal() for part in found) or all(position == len(path) - 1 for path in paths)
    return True


def _distance(first: str, second: str) -> int:
    """The number of steps from one layer to the other in the tree of modules."""
    one, other = first.split("."), second.split(".")
    common = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    return len(one) + len(other) - 2 * common


def _ancestors(first: str, last: str) -> list[str]:
    """Modules that contain ``first`` up to the one that contains ``last`` too, the innermost first."""
    found, name = [], first
    while name:
        name = name.rpartition(".")[0]
        found.append(name)
        if not name or last.startswith(f"{name}."):
            break
    other = last.rpartition(".")[0]
    return found if other in found else [*found, other]


def _heads_of(parts: Mapping[str, Module], first: str, last: str, *, may_be_h: bool) -> tuple[int, int]:
    """How many heads an attention has, and those of its keys and values, by attributes with usual names; 0 if none.

    If it ``may_be_h``, an attribute ``h`` counts them where no other does.
    """
    for name in _ancestors(first, last) if _are_near((first, last)) else ():
        known = vars(parts[name])
        config = known.get("config")
        heads = _number(known, None, _HEADS) or _number({}, config, _HEADS)
        heads = heads or (_number(known, None, ("h",)) if may_be_h else 0)
        if heads:
            return heads, _number(known, config, _KEY_VALUE_HEADS) or heads
    return 0, 0


def _number(known: Mapping[str, Any], config: Any, names: Iterable[str]) -> int:
    """The first integer with one of the names; 0 if there is none."""
    found = (known.get(each, getattr(config, each, None)) for each in names)
    return next((n for n in found if type(n) is int), 0)


def _vocabularies(module: Module, called: Iterable[str]) -> Iterator[Block]:
    """Embeddings with their heads, and large embeddings."""
    parts = dict(module.named_modules())
    total = sum(parameter.numel() for parameter in module.parameters())
    embeddings: dict[int, list[str]] = {}
    for name in called:
        part = parts[name]
        if isinstance(part, nn.Embedding) and not (part.max_norm or part.scale_grad_by_freq or part.sparse):
            embeddings.setdefault(id(part.weight), []).append(name)
    largest = max((parts[names[0]].weight.numel() for names in embeddings.values()), default=0)
    linears = [name for name in called if is_linear(parts[name])]
    for names in embeddings.values():
        weight = parts[names[0]].weight
        assert isinstance(weight, Parameter)
        heads = [name for name in linears if parts[name].weight is weight]
        if not heads and linears and weight.numel() == largest and linear_sizes(parts[linears[-1]])[1] == len(weight):
            heads = linears[-1:]
        if heads or weight.numel() >= _LARGE_VOCABULARY * total:
            yield Block("vocabulary", dict.fromkeys(names, "vocab") | dict.fromkeys(heads, "head"))


class Applied:
    """A block that is split in one way, until :meth:`undo`.

    Raises:
        ValueError: the sizes do not allow it.
    """

    def __init__(self, module: Module, block: Block, way: Way, group: TensorGroup) -> None:
        if block.problem:
            raise ValueError(block.problem)
        self._changed: list[Module] = []
        self._whole: list[tuple[Parameter, Tensor]] = []
        parts: dict[str, Any] = dict(module.named_modules())
        try:
            for name, role in block.roles.items():
                part = parts[name]
                self._changed += [part, part.out_proj] if role == "attention" else [part]
                self._whole += [(p, p.data) for p in part.parameters() if split_of(p) is None]
                _SPLIT_BY[role].of(part, group, name=name, **way.get(name, {}))
        except BaseException:
            self.undo()
            raise
        columns = [parts[name] for name, role in block.roles.items() if role == "column"]
        if len(columns) > 1 and block.shape != "plan":
            layer = columns[0].part_layout.layer
            block_input = BlockInput(group, layer, columns[-1])  # which sums up its gradient once for all
            for column in columns:
                column.block_input = block_input

    def undo(self) -> None:
        """Makes the layers whole again, with the values that they had."""
        self.restore()
        for parameter, value in self._whole:
            make_whole(parameter, value)
        self._whole = []

    def keep(self) -> None:
        """The split stays, and the whole values are forgotten."""
        self._whole = []

    def restore(self) -> None:
        """Makes the layers what they were; their parameters stay as they are."""
        for part in self._changed:
            if isinstance(part, SplitLayer):
                restore(part)
        self._changed = []


_SPLIT_BY: dict[str, Any] = {
    "attention": SplitMultiheadAttention,
    "vocab": VocabSplitEmbedding,
    "row": RowSplitLinear,
    "column": ColumnSplitLinear,
    "head": ColumnSplitLinear,
}
