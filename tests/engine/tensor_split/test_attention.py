"""Attention whose heads are split computes what ``nn.MultiheadAttention`` computes."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_multigpu.engine.tensor_split.attention import SplitMultiheadAttention
from tests.engine.tensor_split.shared import assert_equal, assert_parts, counts, tensor_group
from tests.world import World

SIZE, HEADS, BATCH, QUERIES, KEYS = 12, 3, 2, 5, 6


def _masks(case: str, num_keys: int) -> dict[str, Tensor]:
    if case == "none":
        return {}
    hidden = torch.rand(QUERIES, num_keys) > 0.7
    padded = torch.rand(BATCH, num_keys) > 0.7
    hidden[:, 0] = padded[:, 0] = False
    return {
        "numbers": {
            "attn_mask": torch.randn(QUERIES, num_keys),
            "key_padding_mask": torch.zeros(BATCH, num_keys).masked_fill(padded, -torch.inf),
        },
        "of heads": {"attn_mask": torch.randn(BATCH * HEADS, QUERIES, num_keys)},
        "booleans": {"attn_mask": hidden, "key_padding_mask": padded},
    }[case]


def _attend(options: dict[str, Any], own_keys: bool, cases: Sequence[tuple[bool, str]]) -> None:
    with tensor_group() as (group, meter):
        for need_weights, case in cases:
            meter.end_step()
            torch.manual_seed(0)
            whole = nn.MultiheadAttention(SIZE, HEADS, **options)
            for parameter in whole.parameters():
                nn.init.normal_(parameter)
            split = SplitMultiheadAttention.of(copy.deepcopy(whole), group, name="attention")
            lengths = [(QUERIES, SIZE), (KEYS, options.get("kdim", SIZE)), (KEYS, options.get("vdim", SIZE))]
            given = [torch.randn(BATCH, *shape) for shape in (lengths if own_keys else lengths[:1])]
            if not options.get("batch_first"):
                given = [each.transpose(0, 1) for each in given]
            masks = _masks(case, KEYS if own_keys else QUERIES)
            seen = []
            for module in (whole, split):
                inputs = [each.clone().requires_grad_() for each in given]
                output, weights = module(*inputs * (1 if own_keys else 3), need_weights=need_weights, **masks)
                loss = (output * torch.linspace(0, 1, output.numel()).view_as(output)).sum()
                if weights is not None:
                    loss = loss + (weights * torch.linspace(0, 1, weights.numel()).view_as(weights)).sum()
                loss.backward()
                seen.append([output, weights, *[each.grad for each in inputs]])
            if not own_keys:
                expected = {("all_reduce", "tensor attention"): 2}
                expected |= {("all_reduce", "tensor attention weights"): 1} if need_weights else {}
                assert counts(meter) == expected
            for of_whole, actual in zip(*seen, strict=True):
                assert (of_whole is None) == (actual is None)
                if of_whole is not None:
                    torch.testing.assert_close(actual, of_whole, rtol=1e-10, atol=1e-11)
            assert_parts(split, whole, group)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
def test_self_attention(world2: World, need_weights: bool) -> None:
    cases = [(need_weights, masks) for masks in ("none", "numbers", "of heads", "booleans")]
    world2.run(_attend, {"batch_first": True}, False, cases)


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": 5, "vdim": 7, "batch_first": True}], ids=["own", "no bias", "other sizes"]
)
def test_attention_to_other_keys(world2: World, options: dict[str, Any]) -> None:
    world2.run(_attend, options, True, [(True, "of heads"), (False, "booleans")])


class Doubled(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return 2 * output, weights


def without_a_batch_and_in_an_encoder() -> None:
    with tensor_group() as (group, _):
        torch.manual_seed(0)
        whole = Doubled(SIZE, HEADS)
        split = SplitMultiheadAttention.of(copy.deepcopy(whole), group)
        x = torch.randn(QUERIES, SIZE)
        for need_weights in (True, False):
            for actual, expected in zip(*(m(x, x, x, need_weights=need_weights) for m in (split, whole)), strict=True):
                if expected is not None:
                    assert_equal(actual, expected)
        layer = nn.TransformerEncoderLayer(SIZE, HEADS, 20, batch_first=True).eval()
        split_layer = copy.deepcopy(layer)
        SplitMultiheadAttention.of(split_layer.self_attn, group)  # type: ignore[arg-type]
        with torch.no_grad():  # torch's fast path would take the weights of all heads
            assert_equal(split_layer(x.unsqueeze(0)), layer(x.unsqueeze(0)))


def what_needs_all_heads_is_refused() -> None:
    with tensor_group() as (group, _):
        with pytest.raises(ValueError, match="add_bias_kv or add_zero_attn"):
            SplitMultiheadAttention.of(nn.MultiheadAttention(SIZE, HEADS, add_zero_attn=True), group)
        split = SplitMultiheadAttention.of(nn.MultiheadAttention(SIZE, HEADS), group)
        x = torch.randn(QUERIES, SIZE)
        with pytest.raises(ValueError, match="average_attn_weights=False"):
            split(x, x, x, average_attn_weights=False)
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            split(x, x, x, is_causal=True)


@pytest.mark.parametrize("check", [without_a_batch_and_in_an_encoder, what_needs_all_heads_is_refused])
def test_on_ranks(world2: World, check: Callable[[], None]) -> None:
    world2.run(check)
