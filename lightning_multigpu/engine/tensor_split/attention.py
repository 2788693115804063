"""``nn.MultiheadAttention`` with its heads split over the ranks of a tensor group."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_multigpu.engine.tensor_split.layers import (
    RowSplitLinear,
    SplitLayer,
    column_linear,
    enter,
    split_as,
    summed,
)
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit
from lightning_multigpu.engine.tensor_split.parts import PartLayout, SplitTensor, cut, local
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup


class SplitMultiheadAttention(SplitLayer, nn.MultiheadAttention):
    """Multi-head attention with its heads split over the ranks; ``out_proj`` sums up their results.

    ====================  ==========================  ========================================================
    N ranks, E features   shape on each rank          in backward
    ====================  ==========================  ========================================================
    query, key, value     (batch, length, E)          gradients, summed over the ranks
    in_proj_weight        (3 E / N, E)                gradient, this rank's own; so are those of the biases
    out_proj.weight       (E, E / N)                  gradient, this rank's own
    output                (batch, length, E), summed  gradient, the same on all
    ====================  ==========================  ========================================================

    Torch's default is ``need_weights=True``: the weights are summed also where nobody uses them. After Shoeybi et al.,
    Megatron-LM (2019), section 3.
    """

    _qkv_same_embed_dim = property(lambda self: False, lambda self, value: None)
    """torch's fast path, which computes all heads, leaves such a layer alone."""

    @classmethod
    def of(cls, attention: nn.MultiheadAttention, group: TensorGroup, *, name: str = "") -> SplitMultiheadAttention:
        """Splits an attention in place: its parameters, hooks and places in modules stay.

        Raises:
            ValueError: it has ``bias_k`` or ``add_zero_attn``: keys of its own, which belong to all heads.
        """
        if attention.bias_k is not None or attention.add_zero_attn:
            raise ValueError("attention with add_bias_kv or add_zero_attn cannot be split")
        split_as(attention, cls)
        split: Any = attention
        size, unit = split.embed_dim, split.head_dim
        fused = ParameterSplit.even(3 * size, group.size, sections=(size, size, size), unit=unit)
        split.part_layout = placed = PartLayout(ParameterSplit.even(size, group.size, unit=unit), group, name)
        cuts = [(each, placed._replace(split=fused)) for each in (split.in_proj_weight, split.in_proj_bias)]
        cuts += [(each, placed) for each in (split.q_proj_weight, split.k_proj_weight, split.v_proj_weight)]
        for parameter, of_parameter in cuts:
            if parameter is not None:
                cut(parameter, of_parameter)
        RowSplitLinear.of(split.out_proj, group, unit=unit, name=name)
        return split  # type: ignore[no-any-return]

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention``; the weights are those of all heads.

        Raises:
            ValueError: ``average_attn_weights=False``, which would gather the weights of all heads.
        """
        if need_weights and not average_attn_weights:
            raise ValueError("average_attn_weights=False needs the weights of all heads, which are on different ranks")
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        has_batch, batch_dim = query.dim() == 3, 0 if self.batch_first else 1
        projected = [part if has_batch else part.unsqueeze(batch_dim) for part in self._project(query, key, value)]
        if not self.batch_first:
            projected = [part.transpose(0, 1) for part in projected]
        group = self.part_layout.group
        start, stop = (entry // self.head_dim for entry in self.part_layout.split.bounds(group.rank))
        heads = stop - start
        q, k, v = (part.view(*part.shape[:-1], heads, self.head_dim).transpose(1, 2) for part in projected)
        mask = self._mask(attn_mask, key_padding_mask, q, k.shape[2], start)
        dropout = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        with group.own_random(q.device) if dropout else nullcontext():
            if need_weights:
                scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
                own = (scores if mask is None else scores + mask).softmax(-1)
                own = F.dropout(own, dropout) if dropout else own
                mixed = own @ v
                weights = summed(own.sum(1), group, f"{self.part_layout.layer} weights") / self.num_heads
            elif heads:
                mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
            else:  # some versions of torch divide by the number of heads
                mixed = q @ k.transpose(-2, -1) @ v
        mixed = mixed.transpose(1, 2).flatten(2)
        if not self.batch_first:
            mixed = mixed.transpose(0, 1)
        output = self.out_proj(SplitTensor.of(mixed, self.part_layout.at(mixed.dim() - 1)))
        if not has_batch:
            return output.squeeze(batch_dim), None if weights is None else weights.squeeze(0)
        return output, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """This rank's queries, keys and values: (..., heads of this rank x head_dim) each."""
        is_self_attention = query is key and key is value
        fused, bias = local(self.in_proj_weight), local(self.in_proj_bias)
        if fused is not None and is_self_attention:
            return list(column_linear(query, fused, bias, self.part_layout).chunk(3, -1))
        weights = (
            fused.chunk(3) if fused is not None else [local(getattr(self, f"{name}_proj_weight")) for name in "qkv"]
        )
        biases = [None] * 3 if bias is None else bias.chunk(3)
        entered: dict[int, Tensor] = {}
        for tensor in (query, key, value):
            if id(tensor) not in entered:
                entered[id(tensor)] = enter(tensor, self.part_layout.group, self.part_layout.layer)
        return [
            F.linear(entered[id(each)], weight, bias)
            for each, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]

    def _mask(self, mask: Tensor | None, padding: Tensor | None, q: Tensor, num_keys: int, start: int) -> Tensor | None:
        """What is added to the scores (batch, heads of this rank, queries, keys)."""
        total: Tensor | None = None
        if mask is not None:
            total = _added(mask, q.dtype)
            if total.dim() == 3:
                total = total.view(-1, self.num_heads, *total.shape[1:])[:, start : start + q.shape[1]]
        if padding is not None:
            of_keys = _added(padding, q.dtype).view(-1, 1, 1, num_keys)
            total = of_keys if total is None else total + of_keys
        return total


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers: a boolean one is true where nothing may be seen."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)
    return mask.to(dtype)
