"""The step model, against cases worked by hand: whole numbers of seconds, and links that take a second a unit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_multigpu.planning.pipelines.stage_costs import ChainFigures, MeasuredParts, PartCost
from lightning_multigpu.planning.pipelines.timeline import HeldBytes
from lightning_multigpu.planning.scaling.machine import (
    Link,
    Machine,
    MeasuredCollective,
    Point,
    ReferenceCost,
    World,
)
from lightning_multigpu.planning.scaling.model_profile import ModelProfile, Phases, SplitPart
from lightning_multigpu.planning.scaling.ranking import ranked
from lightning_multigpu.planning.scaling.step_model import (
    Candidate,
    ImpossibleError,
    buckets_of,
    exposed,
    largest_shard,
    one_device,
    predict,
)

PHASES = Phases(forward_s=4.0, backward_s=10.0, optimizer_s=2.0, input_s=1.0, other_s=1.0)
MIB = 1 << 20
MODEL = ModelProfile(
    name="Model",
    samples=8,
    parameters=MIB // 2,
    held=HeldBytes(2 * MIB, 2 * MIB, 4 * MIB),
    activations_bytes=MIB,
    gradients=[(MIB, 0.5), (MIB, 1.0)],
    phases=PHASES,
)
HOSTS = World(2, 1)
ONE_HOST = World(1, 2)
A_SECOND_A_MIB = Link.straight(0.0, 1 / MIB)
MACHINE = Machine(
    name="hosts",
    device_type="cuda",
    devices=1,
    inside=Link.straight(0.0, 0.0),
    between=A_SECOND_A_MIB,
    collectives=[MeasuredCollective(operation="all_reduce", world=HOSTS, link=Link.straight(0.0, 2 / MIB))],
)


def step(strategy: str, world: World = HOSTS, machine: Machine = MACHINE, accumulate: int = 1, **options: Any) -> Any:
    return predict(MODEL, machine, Candidate(strategy, options, accumulate), world)


@pytest.mark.parametrize(
    ("transfer_s", "bucket", "exposed_s"),
    [
        (2.0, 1, 2.0),  # the first transfer hides, the second is exposed
        (2.0, 2, 4.0),  # one bucket begins when backward is over
        (8.0, 1, 11.0),  # transfers follow each other
    ],
)
def test_what_hides_of_two_gradients(transfer_s: float, bucket: int, exposed_s: float) -> None:
    """They are ready after 5 s and 10 s."""
    buckets = buckets_of([(1, 0.5), (1, 1.0)], bucket)
    assert exposed([(share, transfer_s * size) for size, share in buckets], 10.0) == exposed_s


class TestDataParallel:
    def test_one_device_sends_nothing(self) -> None:
        one = one_device(MODEL, MACHINE)
        assert one.step_s == 18.0
        assert (one.exposed_s, one.samples_per_s) == (0.0, pytest.approx(8 / 18))

    def test_an_all_reduce_after_backward_where_one_bucket_has_all(self) -> None:
        found = step("ring_ddp")
        assert found.exposed_s == pytest.approx(4.0)
        assert found.step_s == pytest.approx(22.0)
        assert found.samples == 16
        assert found.sent_bytes == {"network": 2 * MIB}
        assert found.efficiency(one_device(MODEL, MACHINE)) == pytest.approx(18 / 22)

    def test_small_buckets_hide(self) -> None:
        found = step("ring_ddp", bucket_cap_mb=1)
        assert (found.exposed_s, found.hidden_s) == (pytest.approx(2.0), pytest.approx(2.0))

    def test_accumulation_sends_once(self) -> None:
        found = step("ring_ddp", accumulate=4)
        assert found.step_s == pytest.approx(4 * (4 + 10 + 1 + 1) + 2 + 4)
        assert found.samples == 64

    def test_a_global_batch_is_divided(self) -> None:
        found = predict(replace(MODEL, divides_batch=True), MACHINE, Candidate("ring_ddp"), HOSTS)
        assert (found.compute_s, found.samples) == (7.0, 8)

    def test_compression_sends_less_and_has_a_cost_of_its_own(self) -> None:
        own = ReferenceCost(strategy="ring_ddp:compression=bf16", world=HOSTS, scale=1.5)
        found = step("ring_ddp", machine=replace(MACHINE, references=[own]), compression="bf16")
        assert found.exposed_s == pytest.approx(1.5 * 2 * 1.0)
        assert found.sent_bytes["network"] == MIB
        with pytest.raises(ImpossibleError, match="compression='int8' is not calibrated on hosts"):
            step("ring_ddp", compression="int8")

    def test_weights_that_are_averaged_less_often(self) -> None:
        plain, outer = (step("ring_ddp", average_every=4, outer_optimizer=each) for each in (None, "nesterov"))
        assert plain.exposed_s == outer.exposed_s == pytest.approx(1.0)
        assert outer.memory.optimizer_bytes == plain.memory.optimizer_bytes + 2 * plain.memory.parameters_bytes

    def test_costs_of_the_calibration(self) -> None:
        cost = ReferenceCost(strategy="ring_ddp", world=HOSTS, fixed_s=3.0, scale=2.0, tensor_s=0.5)
        found = step("ring_ddp", machine=replace(MACHINE, references=[cost]), accumulate=4)
        assert found.exposed_s == pytest.approx(2 * 4.0)
        assert found.other_s == pytest.approx(4 * (1.0 + 3.0) + 2 * 0.5)

    def test_ranks_of_one_machine_are_slower_and_hide_nothing(self) -> None:
        """The cores that compute move the bytes, too."""
        cpus = replace(MACHINE, device_type="cpu", devices=2, shares_cores=True)
        model = replace(MODEL, slowdown={2: 1.5})
        found = predict(model, cpus, Candidate("ring_ddp", {"bucket_cap_mb": 1}), HOSTS)
        assert (found.compute_s, found.exposed_s, found.hidden_s) == pytest.approx((1.5 * 14, 4.0, 0.0))

    @pytest.mark.parametrize(("world", "shares_cores"), [(World(1, 4), False), (World(4, 1), True)])
    def test_ranks_that_share_cores_are_not_known(self, world: World, shares_cores: bool) -> None:
        """Plans of layers split over 4 ranks on 2 cores were wrong by 28 %."""
        cpus = replace(MACHINE, device_type="cpu", devices=2, shares_cores=shares_cores)
        with pytest.raises(ImpossibleError, match="4 ranks would share 2 cores"):
            step("ring_ddp", world, cpus)

    def test_owners_update_and_hold_their_shard(self) -> None:
        found = step("ddp_sharded")
        assert found.optimizer_s == 1.0
        assert found.memory == HeldBytes(2 * MIB, MIB, 2 * MIB)
        # A gradient takes a second to its owner; the first one hides, and the weights of 2 MiB follow.
        assert found.exposed_s == pytest.approx(3.0)

    def test_fairscale_gives_each_tensor_to_the_smallest_shard(self) -> None:
        assert largest_shard([5, 3, 3, 1], 2) == 6

    def test_adding_gradients_takes_time_after_the_first_batch(self) -> None:
        model = replace(MODEL, phases=replace(PHASES, adding_s=0.5))
        found = predict(model, MACHINE, Candidate("ring_ddp", accumulate=4), HOSTS)
        assert found.compute_s == pytest.approx(4 * 14 + 3 * 0.5)

    def test_servers_cut_large_tensors(self) -> None:
        """A transfer of half a MiB or more takes twice as long for each byte; buckets are of 256 KiB."""
        bent = Link([Point(0, 0.0), Point(MIB // 2, 0.5), Point(3 * MIB // 2, 2.5)])
        model = replace(MODEL, gradients=[(2 * MIB, 1.0)])
        machine = replace(MACHINE, between=bent, collectives=[])
        found = predict(model, machine, Candidate("sync_ps", {"bucket_cap_mb": 0.25}), HOSTS)
        assert found.exposed_s == pytest.approx(2.0 + 0.25)  # and the last bucket's weights

    def test_servers_hold_the_optimizer(self) -> None:
        assert step("sync_ps").memory == HeldBytes(2 * MIB, 2 * MIB, 0)

    def test_strategies_of_one_host(self) -> None:
        with pytest.raises(ImpossibleError, match="cpu_ps works on one host only"):
            step("cpu_ps")
        with pytest.raises(ImpossibleError, match="ring_ddp needs 2 devices or more"):
            step("ring_ddp", World(1, 1))


def chain(layers: int) -> ChainFigures:
    """Layers that take 1 s forward and 2 s backward, whatever the samples."""
    parts = [PartCost(), *[PartCost(1.0, 2.0, MIB, 7)] * layers, PartCost()]
    nothing = HeldBytes(0, 0, 0)
    return ChainFigures(
        name="layers",
        measured=[MeasuredParts(samples=samples, parts=parts) for samples in (1, 8)],
        held=[nothing, *[HeldBytes(MIB, MIB, 2 * MIB)] * layers, nothing],
    )


class TestSplitModels:
    model = replace(
        MODEL,
        chain=chain(2),
        splits={
            2: SplitPart(
                phases=PHASES.times(0.5),
                collectives=[("all_reduce", MIB)] * 3,
                held=HeldBytes(MIB, MIB, 2 * MIB),
                activations_bytes=5,
            )
        },
    )

    def found(self, strategy: str, world: World = ONE_HOST, machine: Machine = MACHINE, **options: Any) -> Any:
        return predict(self.model, machine, Candidate(strategy, {"num_micro_batches": 4, **options}), world)

    def test_the_bubble_of_gpipe(self) -> None:
        found = self.found("gpipe")
        assert found.compute_s == pytest.approx(4 * 3)
        assert found.bubble_s == pytest.approx(3)  # (P - 1) / (M + P - 1) of 15 s
        assert found.optimizer_s == pytest.approx(2.0 / 2)
        assert found.samples == 8

    def test_model_parallel_has_one_micro_batch(self) -> None:
        assert self.found("model_parallel").bubble_s == pytest.approx(3)

    def test_messages_between_hosts_take_time(self) -> None:
        assert self.found("model_parallel", HOSTS).exposed_s == pytest.approx(2.0)

    def test_each_pass_costs_what_the_calibration_found(self) -> None:
        cost = ReferenceCost(strategy="pipeline_1f1b", world=World(1, 2), pass_s=0.5, tensor_s=0.25)
        found = self.found("gpipe", machine=replace(MACHINE, references=[cost]))
        assert found.compute_s == pytest.approx(4 * 3)
        assert found.exposed_s == pytest.approx(2 * (4 + 2 - 1) * 0.5)  # passes one after the other, on both ranks
        assert found.other_s == pytest.approx(1.0 + 4 * 2 * 0.25)

    def test_micro_batches_after_the_first_add_gradients(self) -> None:
        phases = replace(PHASES, adding_s=4.0)  # for all parameters, of which a stage has half
        model = replace(self.model, phases=phases)
        assert predict(model, MACHINE, Candidate("model_parallel"), World(1, 2)).compute_s == pytest.approx(3)
        gpipe = Candidate("gpipe", {"num_micro_batches": 4})
        assert predict(model, MACHINE, gpipe, World(1, 2)).compute_s == pytest.approx(4 * 3 + 3 * 2)

    def test_each_collective_of_split_layers_costs_what_the_calibration_found(self) -> None:
        cost = ReferenceCost(strategy="tensor_split", world=HOSTS, pass_s=0.25)
        found = self.found("tensor_split", HOSTS, replace(MACHINE, references=[cost]))
        assert found.exposed_s == pytest.approx(3 * (2.0 + 0.25))

    def test_a_part_of_the_layers_and_its_collectives(self) -> None:
        found = self.found("tensor_split", HOSTS)
        assert found.compute_s == pytest.approx(7.0)
        assert found.exposed_s == pytest.approx(3 * 2.0)
        assert found.memory_bytes == 4 * MIB + 5

    def test_what_was_not_measured_is_impossible(self) -> None:
        with pytest.raises(ImpossibleError, match="4 stages for a chain of 2 layers"):
            self.found("gpipe", World(1, 4))
        with pytest.raises(ImpossibleError, match="no split of the layers over 4 ranks is known"):
            self.found("tensor_split", World(1, 4))
        with pytest.raises(ImpossibleError, match="the step of hybrid is not known"):
            self.found("hybrid", World(1, 4))

    def test_a_refusal_is_the_reason(self) -> None:
        refused = replace(self.model, refused={"gpipe": "the loss is no mean"})
        with pytest.raises(ImpossibleError, match="the loss is no mean"):
            predict(refused, MACHINE, Candidate("gpipe"), World(1, 2))
        refused = replace(self.model, refused={"gpipe on 4 ranks": "3 layers are no 4 stages"})
        with pytest.raises(ImpossibleError, match="3 layers are no 4 stages"):
            predict(refused, MACHINE, Candidate("gpipe"), World(1, 4))
        assert predict(refused, MACHINE, Candidate("gpipe"), World(1, 2)).samples == 8


class TestRanking:
    candidates = (Candidate("ring_ddp"), Candidate("ddp_sharded"), Candidate("cpu_ps"))

    def test_the_most_samples_a_second_come_first(self) -> None:
        found = ranked(MODEL, MACHINE, self.candidates, [HOSTS])
        assert [each.candidate.strategy for each in found.predictions] == ["ddp_sharded", "ring_ddp"]
        assert [(str(c), reason) for c, _, reason in found.impossible] == [("cpu_ps", "cpu_ps works on one host only")]
        text = " ".join(found.explanation())
        assert "First choice: ddp_sharded on 2 x 1" in text
        assert "limited by computation, 70 %; the next is ring_ddp" in text

    def test_what_does_not_fit_in_memory_is_no_choice(self) -> None:
        small = replace(MACHINE, memory_bytes=7 * MIB)
        found = ranked(MODEL, small, self.candidates, [HOSTS])
        assert [each.candidate.strategy for each in found.predictions] == ["ddp_sharded"]
        assert [each.candidate.strategy for each in found.too_large] == ["ring_ddp"]

    def test_it_says_no(self) -> None:
        slow = replace(MACHINE, between=Link.straight(0.0, 100 / MIB), collectives=[])
        found = ranked(MODEL, slow, [Candidate("sync_ps")], [World(2, 1), World(4, 1)])
        text = "\n".join(found.explanation())
        # One server: 2 (n - 1) MiB come in, then the weights of the last bucket leave.
        assert "One device alone is faster" in text

    def test_remedies_have_their_gain_the_largest_first(self) -> None:
        coded = replace(MACHINE, references=[ReferenceCost(strategy="ring_ddp:compression=int8", world=HOSTS)])
        found = ranked(MODEL, coded, [Candidate("ring_ddp")], [HOSTS])
        by_change = {remedy.change: remedy.prediction for remedy in found.remedies}
        assert by_change["With compression='int8'"].exposed_s == pytest.approx(4 / 3.98)
        assert by_change["With accumulate_grad_batches=4"].step_s == pytest.approx(4 * 16 + 2 + 4)
        assert by_change["With batches 4 times as large"].step_s == pytest.approx(4 * 15 + 1 + 2 + 4)
        gains = [remedy.prediction.samples_per_s for remedy in found.remedies]
        assert gains == sorted(gains, reverse=True)

    def test_nothing_possible_is_an_error_with_the_reasons(self) -> None:
        with pytest.raises(ValueError, match=r"^cpu_ps works on one host only$"):
            ranked(MODEL, MACHINE, [Candidate("cpu_ps")], [HOSTS])
