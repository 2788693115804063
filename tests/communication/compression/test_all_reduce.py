"""The compressed all-reduce on real ranks: sums, the same bits everywhere, nothing lost for good, bytes."""

import math
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.compression import CompressedAllReduce
from lightning_multigpu.communication.compression.compressors import Bf16, Compressor, Int8
from tests.communication.shared import own_errors
from tests.world import World, init_group

SETTINGS: dict[str, Compressor] = {"bf16": Bf16(), "int8": Int8(chunk_size=32)}
NAN_STEP = 3
NUMEL = 1695


def engine(name: str, *, segment_elements: int = 100, group: dist.ProcessGroup | None = None) -> CompressedAllReduce:
    """Of short segments: every tensor of these tests has several a rank, and an incomplete one."""
    init_group()
    group = group or dist.new_group(backend="gloo")
    return CompressedAllReduce(group, SETTINGS[name], segment_elements=segment_elements)


def gradients(step: int, rank: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))


def mean_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).double().mean(0).float()


def _sums(dtype: torch.dtype) -> list[Tensor]:
    init_group()
    group = dist.new_group(backend="gloo")
    results = []
    for name in SETTINGS:
        for numel in SIZES:
            for average in (False, True):
                tensor = gradients(0, dist.get_rank(), numel).to(dtype)
                assert engine(name, group=group)(tensor, "a", average=average) is tensor
                results.append(tensor)
    return results


SIZES = (0, 1, 2, 3, 997)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_sums_of_every_size_and_type(world: World, dtype: torch.dtype) -> None:
    results = world.run(_sums, dtype)
    cases = [(numel, average) for _ in SETTINGS for numel in SIZES for average in (False, True)]
    for index, (numel, average) in enumerate(cases):
        given = torch.stack([gradients(0, rank, numel).to(dtype).double() for rank in range(world.num_ranks)])
        expected = given.sum(0) / (world.num_ranks if average else 1)
        atol = 0.02 * float(given.abs().max()) * (1 if average else world.num_ranks) if numel else 0
        for result in results:
            assert result[index].dtype == dtype
            assert torch.equal(result[index], results[0][index])
            torch.testing.assert_close(result[index].double(), expected, rtol=0, atol=atol)


def _accumulate(name: str, average: bool) -> tuple[Tensor, Tensor]:
    """The sum of all results over twenty steps of two tensors, and the mean of what ranks keep in the end."""
    reduce = engine(name)
    total = torch.zeros(NUMEL)
    for step in range(20):
        given = gradients(step, dist.get_rank())
        for key, tensor in zip("ab", given.split([700, NUMEL - 700]), strict=True):
            reduce(tensor, key, average=average)
        total += given
        reduce.end_step()
    assert reduce.step == 20
    kept = own_errors(reduce, "a", "b")
    dist.all_reduce(kept)
    return total, kept / reduce.world_size


@pytest.mark.parametrize("average", [False, True])
def test_what_was_sent_and_what_is_kept_is_what_was_given(world: World, average: bool) -> None:
    """Exactly, whatever was lost on the way: on the way to the owner, by the owner, by any rank."""
    results = world.run(_accumulate, "int8", average)
    given = sum(mean_of([gradients(step, rank) for rank in range(world.num_ranks)]) for step in range(20))
    scale = 1 if average else world.num_ranks
    for total, kept in results:
        torch.testing.assert_close(total + kept * scale, given * scale, rtol=1e-4, atol=1e-4)
        assert kept.norm() > 0


def _steps_with_one_bad(name: str, bad: float | None, where: int, who: int) -> list[Tensor]:
    """Five steps of two tensors each, in one of which a rank gives a number that is not finite: the results of all, the
    errors that are kept, and the step count."""
    reduce = engine(name)
    results: list[Tensor] = []
    for step in range(5):
        if step == NAN_STEP and bad is None:
            continue
        tensors = [gradients(10 * step + index, dist.get_rank()) for index in range(2)]
        if step == NAN_STEP and dist.get_rank() == who:
            assert bad is not None
            tensors[0][where] = bad
        for tensor, key in zip(tensors, "ab", strict=True):
            reduce(tensor, key, average=True)
        reduce.end_step()
        results += tensors
    return [*results, own_errors(reduce, "a", "b"), torch.tensor(reduce.step)]


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_step_that_is_not_finite_is_seen_by_all_and_leaves_no_trace(world2: World, name: str) -> None:
    """As if it had not been: the results before and after it, what is kept, the step count. Of the two tensors of
    the step, only the first is not finite, on one rank only, in a matrix or a vector, in its own shard or another's."""
    without = world2.run(_steps_with_one_bad, name, None, 0, 0)
    for bad, where, who in [(math.nan, 3, 1), (math.inf, NUMEL - 3, 0), (-math.inf, 645, 0), (math.inf, 900, 1)]:
        results = world2.run(_steps_with_one_bad, name, bad, where, who)
        for result, expected in zip(results, without, strict=True):
            at = 2 * NAN_STEP
            assert not result[at][where].isfinite(), (bad, where, who)
            torch.testing.assert_close(result[at], results[0][at], rtol=0, atol=0, equal_nan=True)
            assert result[at + 1].isfinite().all()
            kept = result[:at] + result[at + 2 :]
            if name == "int8":
                assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True)), (bad, where, who)


def _bytes(name: str) -> tuple[int, int, int, int]:
    """What is announced, what was handed to the back end, what is counted, and what a ring would have sent."""
    reduce = engine(name)
    tensor = gradients(0, dist.get_rank())
    announced, handed = reduce.sent_bytes(tensor), 0
    isend = dist.isend

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        nonlocal handed
        handed += tensor.numel() * tensor.element_size()
        return isend(tensor, *args, **kwargs)

    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", counting)
        reduce(tensor, "a", average=True)
    reduce.end_step()
    assert torch.equal(before, torch.get_rng_state())
    return announced, handed


@pytest.mark.parametrize("name", list(SETTINGS))
def test_bytes_are_exact_and_the_random_state_is_left_alone(world: World, name: str) -> None:
    n = world.num_ranks
    results = world.run(_bytes, name)
    assert all(announced == handed for announced, handed in results)
    if name == "bf16":
        assert sum(result[0] for result in results) == 2 * 2 * (n - 1) * NUMEL


def _unfinished(name: str) -> list[int]:
    """How many messages, of a good and of a bad step, nobody has waited for."""
    reduce = engine(name)
    messages: list[list[Any]] = []

    def watched(post: Any) -> Any:
        def posted(*args: Any, **kwargs: Any) -> Any:
            message = [post(*args, **kwargs), False]
            messages.append(message)

            class Watched:
                def wait(self, timeout: timedelta) -> None:
                    message[0].wait(timeout)
                    message[1] = True

            return Watched()

        return posted

    found = []
    for bad in (False, True):
        tensor = gradients(0, dist.get_rank())
        if bad:
            tensor[:: NUMEL // 5] = math.nan
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "isend", watched(dist.isend))
            patch.setattr(dist, "irecv", watched(dist.irecv))
            reduce(tensor, "a")
        reduce.end_step()
        assert messages
        found.append(sum(not waited for _, waited in messages))
        messages.clear()
    return found


def test_every_message_is_waited_for(world2: World) -> None:
    """A message whose work was dropped before it had left never arrived, and the other rank waited for it for ever."""
    assert world2.run(lambda: [_unfinished(name) for name in SETTINGS]) == [[[0, 0]] * len(SETTINGS)] * 2


def _begun_ahead(name: str) -> bool:
    """Whether tensors that are all begun before the first is finished come out as one after the other."""
    ahead, one_by_one = engine(name), engine(name)
    for step in range(3):
        tensors = [gradients(10 * step + index, dist.get_rank()) for index in range(2)]
        copies = [tensor.clone() for tensor in tensors]
        pending = [ahead.begin(t, key, average=True) for t, key in zip(tensors, "ab", strict=True)]
        finished = [finish() for finish in pending]
        ahead.end_step()
        for copy, key in zip(copies, "ab", strict=True):
            one_by_one(copy, key, average=True)
        one_by_one.end_step()
        if not all(a is b and torch.equal(b, c) for a, b, c in zip(finished, tensors, copies, strict=True)):
            return False
    return True


def test_tensors_may_begin_before_others_have_finished(world4: World) -> None:
    assert world4.run(lambda: [_begun_ahead(name) for name in SETTINGS]) == [[True] * len(SETTINGS)] * 4
