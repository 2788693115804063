"""What is ring_ddp's own: hooks, buckets, buffers, and the traffic that it reports."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

from lightning_multigpu.communication.metering.traffic import StepTraffic
from lightning_multigpu.planning.numbers import usual_bucket_bytes
from tests.modules import Normalised
from tests.strategies.tasks import Case, Classifier, eval_loader, fit, fit_module, make_strategy
from tests.world import World

GRADIENT_BYTES = (16 * 6 + 16 + 3 * 16 + 3) * 8  # of the Classifier, in float64


def traffic(accumulate: int, **options: Any) -> list[StepTraffic]:
    strategy, case = make_strategy("ring_ddp"), Case(max_epochs=1)
    fit_module(Classifier(), strategy, 2, case, None, eval_loader(), accumulate_grad_batches=accumulate, **options)
    strategy.meter.flush()
    return list(strategy.meter.steps)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_optimizer_step_sends_the_gradients_once(accumulate: int, world2: World) -> None:
    """2(N-1)/N x S a rank and step, S being the gradients, however many batches are accumulated."""
    both = world2.run(traffic, accumulate)
    for steps in both:
        assert len(steps) == -(-7 // accumulate)
        for step in steps:
            (totals,) = step.of("all_reduce", "data")
            assert (totals.size_bytes, totals.group_size) == (GRADIENT_BYTES, 2)
            assert 0 <= totals.exposed_s <= totals.total_s
            assert totals.total_s > 0
        assert all(step.end_s <= after.start_s for step, after in pairwise(steps))
    for each in zip(*both, strict=True):
        assert sum(step.of("all_reduce", "data")[0].sent_bytes for step in each) == 2 * GRADIENT_BYTES


BUCKETS: list[tuple[dict[str, Any], int]] = [
    ({}, 1),
    ({"shared_memory": False}, 3),
    ({"bucket_cap_mb": 3}, 3),
    ({"ddp_comm_hook": allreduce_hook}, 2),
]


def bucket_count(options: dict[str, Any]) -> int:
    """Buckets of one step, once torch has put them into the order of backward."""
    strategy, module = make_strategy("ring_ddp", **options), Classifier()
    module.wide = wide = nn.ModuleList(nn.Linear(1, 300_000) for _ in range(2))  # type: ignore[assignment]
    module.first.register_forward_hook(
        lambda layer, inputs, output: output + sum(0 * w(output[:, :1]).sum() for w in wide)
    )
    fit_module(module, strategy, 2, Case(max_epochs=1), max_steps=3)
    strategy.meter.flush()
    (totals,) = strategy.meter.steps[-1].of("all_reduce", "data")
    return int(totals.count)


def test_buckets_suit_the_way_that_they_take(world2: World) -> None:
    """Four parameters of 2.4 MB. torch closes a bucket when it is full, and with its own default the first at 1 MiB."""
    found = world2.run(lambda: [bucket_count(options) for options, _ in BUCKETS])
    assert found[0] == [expected for _, expected in BUCKETS]
    for between_hosts, smallest in ((True, 4 << 20), (False, 25 << 20)):
        assert usual_bucket_bytes(100 << 20, between_hosts=between_hosts) == smallest
        assert usual_bucket_bytes(4 << 30, between_hosts=between_hosts) == 32 << 20


class HookError(Exception):
    """Raised by a user's own communication hook."""


def raising_hook(state: Any, bucket: Any) -> Any:
    raise HookError("the hook broke")


def raising_later(state: Any, bucket: Any) -> Any:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_exception(HookError("the hook's future broke"))  # type: ignore[no-untyped-call]
    return future


@pytest.mark.parametrize("hook", [raising_hook, raising_later])
def test_an_exception_in_a_hook_reaches_the_user_as_itself(hook: Any, world2: World) -> None:
    world2.run_raising(HookError, "broke", fit, Case(strategy={"ddp_comm_hook": hook}), "ring_ddp", 2)


def test_hooks_of_torch_work_on_cpu(world2: World) -> None:
    """Stock Lightning ignores them there without a word."""
    case = Case(precision="32-true", max_epochs=1, strategy={"ddp_comm_hook": fp16_compress_hook})
    plain = fit(replace(case, strategy={}), None, 1)["weights"]
    first, second = (found["weights"] for found in world2.run(fit, case, "ring_ddp", 2))
    for name, value in plain.items():
        torch.testing.assert_close(first[name], value, rtol=2e-2, atol=2e-3)
        assert (first[name] - value).abs().max() > 1e-5, "the hook was not used"
        assert torch.equal(first[name], second[name])


def means(strategy_name: str, **options: Any) -> list[Tensor]:
    module = Normalised()
    fit_module(module, strategy_name, 2, Case(max_epochs=1, strategy=options), None, eval_loader())
    return module.means


@pytest.mark.parametrize("strategy", ["ring_ddp", "ddp_sharded"])
def test_buffers_are_those_of_rank_zero(strategy: str, world2: World) -> None:
    """Each step and each validation begin with them."""
    first, second = world2.run(means, strategy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])
    if strategy == "ring_ddp":
        first, second = world2.run(means, strategy, broadcast_buffers=False)
        assert not any(torch.equal(a, b) for a, b in zip(first[1:], second[1:], strict=True))


def test_bfloat16_parameters_travel_as_such(world2: World) -> None:
    both = world2.run(traffic, 1, precision="bf16-true")
    assert {step.of("all_reduce", "data")[0].size_bytes for steps in both for step in steps} == {GRADIENT_BYTES // 4}
