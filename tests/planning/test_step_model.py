"""The step model, against cases worked by hand: whole numbers of seconds, and links that take a second a unit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_multigpu.planning.pipelines.stage_costs import ChainFigures, MeasuredParts, PartCost
from lightning_multigpu.planning.pipelines.timeline import HeldBytes
from lightning_multigpu.planning.scaling.machine import Link, Machine, MeasuredCollective, Point, ReferenceCost, World
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


def chain(layers: int) -> ChainFigures:
    """Layers that take 1 s forward and 2 s backward, whatever the samples."""
    parts = [PartCost(), *[PartCost(1.0, 2.0, MIB, 7)] * layers, PartCost()]
    nothing = HeldBytes(0, 0, 0)
    return ChainFigures(
        name="layers",
        measured=[MeasuredParts(samples=samples, parts=parts) for samples in (1, 8)],
        held=[nothing, *[HeldBytes(MIB, MIB, 2 * MIB)] * layers, nothing],
    )


SPLIT = replace(
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
# The cores that compute move the bytes, too.
CPUS = replace(MACHINE, device_type="cpu", devices=2, shares_cores=True)


def step(strategy: str, world: World = HOSTS, accumulate: int = 1, machine: Any = MACHINE, **options: Any) -> Any:
    model = options.pop("model", MODEL)
    return predict(model, machine, Candidate(strategy, options, accumulate), world)


def split(strategy: str, world: World = ONE_HOST, **options: Any) -> Any:
    return step(strategy, world, **{"model": SPLIT, "num_micro_batches": 4, **options})


def found(strategy: str, world: World = HOSTS, **costs: float) -> Machine:
    """The machine, for which a calibration has found costs."""
    return replace(MACHINE, references=[ReferenceCost(strategy=strategy, world=world, **costs)])


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


def adding(seconds: float, model: ModelProfile = MODEL) -> ModelProfile:
    return replace(model, phases=replace(PHASES, adding_s=seconds))


# A transfer of half a MiB or more takes twice as long for each byte.
BENT = replace(MACHINE, between=Link([Point(0, 0.0), Point(MIB // 2, 0.5), Point(3 * MIB // 2, 2.5)]), collectives=[])
LARGE = replace(MODEL, gradients=[(2 * MIB, 1.0)])
CALIBRATED = found("ring_ddp", fixed_s=3.0, scale=2.0, tensor_s=0.5)
TWO_A_HOST = {"device_type": "cpu", "devices": 2, "inside": A_SECOND_A_MIB, "collectives": []}
FOUR_CPUS = replace(CALIBRATED, between=Link.straight(0.25, 1 / MIB), **TWO_A_HOST)
NOT_ON_FOUR = replace(SPLIT, refused={"gpipe on 4 ranks": "3 layers are no 4 stages"})
STEPS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "one bucket has all: an all-reduce after backward": (
        lambda: step("ring_ddp"),
        {"exposed_s": 4.0, "step_s": 22.0, "samples": 16, "sent_bytes": {"network": 2 * MIB}},
    ),
    "small buckets hide": (lambda: step("ring_ddp", bucket_cap_mb=1), {"exposed_s": 2.0, "hidden_s": 2.0}),
    "accumulation sends once": (
        lambda: step("ring_ddp", accumulate=4),
        {"step_s": 4.0 * (4 + 10 + 1 + 1) + 2 + 4, "samples": 64},
    ),
    "a global batch is divided": (
        lambda: step("ring_ddp", model=replace(MODEL, divides_batch=True)),
        {"compute_s": 7.0, "samples": 8},
    ),
    "compression sends less and has a cost of its own": (
        lambda: step("ring_ddp", machine=found("ring_ddp:compression=bf16", scale=1.5), compression="bf16"),
        {"exposed_s": 1.5 * 2 * 1.0, "sent_bytes": {"network": MIB}},
    ),
    "weights are averaged less often": (lambda: step("ring_ddp", average_every=4), {"exposed_s": 1.0}),
    "an outer optimizer keeps weights and momentum": (
        lambda: step("ring_ddp", average_every=4, outer_optimizer="nesterov"),
        {"exposed_s": 1.0, "memory": HeldBytes(2 * MIB, 2 * MIB, 8 * MIB)},
    ),
    "ft_ddp sums after backward, as ring_ddp does within a host": (
        lambda: step("ft_ddp", ONE_HOST, machine=FOUR_CPUS, accumulate=2),
        {"exposed_s": 2 * 2.0, "other_s": 2 * (1.0 + 3.0) + 2 * 0.5},
    ),
    "ft_ddp has a header": (
        lambda: step("ft_ddp", World(2, 2), machine=FOUR_CPUS),
        {"exposed_s": 2 * (2.0 + 2.0 + 2 * 2 * 0.25), "sent_bytes": {"host": 2 * MIB, "network": 2 * MIB}},
    ),
    "costs of the calibration": (
        lambda: step("ring_ddp", machine=CALIBRATED, accumulate=4),
        {"exposed_s": 2 * 4.0, "other_s": 4 * (1.0 + 3.0) + 2 * 0.5},
    ),
    "ranks of one machine are slower and hide nothing": (
        lambda: step("ring_ddp", machine=CPUS, model=replace(MODEL, slowdown={2: 1.5}), bucket_cap_mb=1),
        {"compute_s": 1.5 * 14, "exposed_s": 4.0, "hidden_s": 0.0},
    ),
    "owners update and hold their shard": (  # a gradient takes a second; the first one hides, the weights follow
        lambda: step("ddp_sharded"),
        {"optimizer_s": 1.0, "memory": HeldBytes(2 * MIB, MIB, 2 * MIB), "exposed_s": 3.0},
    ),
    "gradients are added after the first batch": (
        lambda: step("ring_ddp", accumulate=4, model=adding(0.5)),
        {"compute_s": 4 * 14 + 3 * 0.5},
    ),
    "servers cut large tensors": (  # into buckets of 256 KiB; the last one's weights follow
        lambda: step("sync_ps", machine=BENT, model=LARGE, bucket_cap_mb=0.25),
        {"exposed_s": 2.0 + 0.25},
    ),
    "servers hold the optimizer": (lambda: step("sync_ps"), {"memory": HeldBytes(2 * MIB, 2 * MIB, 0)}),
    "the bubble of gpipe": (  # (P - 1) / (M + P - 1) of 15 s
        lambda: split("gpipe"),
        {"compute_s": 12.0, "bubble_s": 3.0, "optimizer_s": 2.0 / 2, "samples": 8},
    ),
    "model_parallel has one micro-batch": (lambda: split("model_parallel"), {"bubble_s": 3.0}),
    "messages between hosts take time": (lambda: split("model_parallel", HOSTS), {"exposed_s": 2.0}),
    "each pass costs": (  # passes one after the other, on both ranks
        lambda: split("gpipe", machine=found("pipeline_1f1b", ONE_HOST, pass_s=0.5, tensor_s=0.25)),
        {"compute_s": 12.0, "exposed_s": 2 * (4 + 2 - 1) * 0.5, "other_s": 1.0 + 4 * 2 * 0.25},
    ),
    "one micro-batch adds no gradients": (
        lambda: split("model_parallel", model=adding(4.0, SPLIT)),
        {"compute_s": 3.0},
    ),
    "later micro-batches add gradients": (  # 4 s for all parameters, of which a stage has half
        lambda: split("gpipe", model=adding(4.0, SPLIT)),
        {"compute_s": 4.0 * 3 + 3 * 2},
    ),
    "each collective of split layers costs": (
        lambda: split("tensor_split", HOSTS, machine=found("tensor_split", pass_s=0.25)),
        {"exposed_s": 3 * (2.0 + 0.25)},
    ),
    "a part of the layers and its collectives": (
        lambda: split("tensor_split", HOSTS),
        {"compute_s": 7.0, "exposed_s": 3 * 2.0, "memory_bytes": 4 * MIB + 5},
    ),
    "what is refused on four ranks": (lambda: split("gpipe", model=NOT_ON_FOUR), {"samples": 8}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step(name: str) -> None:
    make, expected = STEPS[name]
    predicted = make()
    for figure, value in expected.items():
        wanted = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        assert getattr(predicted, figure) == wanted, figure


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: step("ring_ddp", compression="int8"), "compression='int8' is not calibrated on hosts"),
        # Plans of layers split over 4 ranks on 2 cores were wrong by 28 %.
        (lambda: step("ring_ddp", World(1, 4), machine=replace(CPUS, shares_cores=False)), "4 ranks would share 2 c"),
        (lambda: step("ring_ddp", World(4, 1), machine=CPUS), "4 ranks would share 2 cores"),
        (lambda: step("cpu_ps"), "cpu_ps works on one host only"),
        (lambda: step("ft_ddp"), "gradients of ft_ddp travel over the host, whose links are not calibrated beside"),
        (lambda: step("ring_ddp", World(1, 1)), "ring_ddp needs 2 devices or more"),
        (lambda: split("gpipe", World(1, 4)), "4 stages for a chain of 2 layers"),
        (lambda: split("tensor_split", World(1, 4)), "no split of the layers over 4 ranks is known"),
        (lambda: split("hybrid", World(1, 4)), "the step of hybrid is not known"),
        (lambda: split("gpipe", model=replace(SPLIT, refused={"gpipe": "the loss is no mean"})), "the loss is no mean"),
        (lambda: split("gpipe", World(1, 4), model=NOT_ON_FOUR), "3 layers are no 4 stages"),
    ],
)
def test_what_is_not_known_is_impossible(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ImpossibleError, match=words):
        make()


def test_one_device_sends_nothing() -> None:
    one = one_device(MODEL, MACHINE)
    assert one.step_s == 18.0
    assert (one.exposed_s, one.samples_per_s) == (0.0, pytest.approx(8 / 18))
    assert step("ring_ddp").efficiency(one) == pytest.approx(18 / 22)


def test_fairscale_gives_each_tensor_to_the_smallest_shard() -> None:
    assert largest_shard([5, 3, 3, 1], 2) == 6


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
