"""Times of NCCL's transfers, on a stand-in for a GPU: the stream waits for them, and the host does not."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.clocks import recorded_event
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer
from lightning_multigpu.engine.pipeline.measuring.recorder import Recorder
from lightning_multigpu.engine.pipeline.stages.stage_messages import Message, PipelineGroup, ScheduledMessages
from tests.communication.test_collective_observer import Told
from tests.fake_gpu import DEVICE, FakeGPU, Work

BYTES = 400


@pytest.fixture
def meter(fake_gpu: FakeGPU) -> Meter:
    meter = Meter(clock=lambda: fake_gpu.now_s)
    meter.waited(recorded_event())  # the first event waits for the device
    meter.discard()
    fake_gpu.waits = 0
    return meter


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def tensor() -> Tensor:
    return torch.ones(BYTES // 4, device=DEVICE)


def figures(meter: Meter, gpu: FakeGPU) -> dict[str, tuple[float, float]]:
    """Total and exposed seconds of each operation and of the step; nothing has made the host wait before."""
    assert gpu.waits == 0, "the host has waited for the device within the step"
    meter.end_step()
    meter.flush()
    step = meter.steps[-1]
    assert all(totals.sent_bytes == BYTES * totals.count for totals in step.of("all_reduce"))
    found = {totals.operation: (totals.total_s, totals.exposed_s) for totals in step.operations}
    return {**found, "step": (step.total_s, step.exposed_s)}


class Bucket:
    """What DistributedDataParallel hands to a hook."""

    def __init__(self, *, last: bool) -> None:
        self._buffer, self._last = tensor(), last

    def buffer(self) -> Tensor:
        return self._buffer

    def is_last(self) -> bool:
        return self._last


def user_hook(state: FakeGPU, bucket: Any) -> Any:
    work = state.collective(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future()


@pytest.mark.parametrize("hook", [None, user_hook], ids=["the reducer's", "a user's"])
def test_buckets_are_hidden_by_backward_but_for_the_last(hook: Any, meter: Meter, fake_gpu: FakeGPU) -> None:
    """::

    compute  [ 0 backward 2 ][ backward 4 ].........[5
    nccl                     [b0 3]        [ b1   5 ]
    """
    reducer = GradientReducer(world(), meter, hook=None if hook is None else (fake_gpu, hook))
    futures: list[Any] = []
    for last in (False, True):
        fake_gpu.run(2.0)
        futures.append(reducer.reduce(Bucket(last=last)))  # type: ignore[arg-type]
    for future in futures:
        future.wait()
    assert reducer.finish()
    fake_gpu.run(3.0)  # the optimizer
    assert figures(meter, fake_gpu)["all_reduce"] == pytest.approx((2.0, 1.0))


def test_an_average_between_two_kernels_is_exposed(meter: Meter, fake_gpu: FakeGPU) -> None:
    """``average_every``: the host is done at once, so that its clock shows nothing."""
    reducer = GradientReducer(world(), meter)
    fake_gpu.run(2.0)
    reducer.average(tensor())
    fake_gpu.run(2.0)
    assert figures(meter, fake_gpu)["all_reduce"] == pytest.approx((1.0, 1.0))


def test_collectives_of_strategies_are_exposed(
    meter: Meter, fake_gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = MeteredGroup(world(), meter, name="data", device=DEVICE)
    monkeypatch.setattr(group, "_meet", lambda *call: None)  # it reads values, which fake tensors do not have
    fake_gpu.run(2.0)
    group.all_reduce(tensor(), "mean")
    group.all_gather(tensor())
    group.broadcast_tensors([tensor()], src=0)
    group.barrier()
    fake_gpu.run(2.0)
    found = figures(meter, fake_gpu)
    for operation in ("all_reduce", "all_gather", "broadcast", "barrier"):
        assert found[operation] == pytest.approx((1.0, 1.0)), operation
    assert found["step"] == pytest.approx((4.0, 4.0))


def test_messages_of_a_schedule_are_exposed_while_no_pass_runs(meter: Meter, fake_gpu: FakeGPU) -> None:
    """torch posts the second receive ahead, as its interleaved schedules do: three of its five seconds are hidden. ::

    compute  [0 forward 2]..........[3 backward 4][4 forward 7]......[9 backward 10]
    nccl                 [send, recv][---------- recv ------------- 9]
    """
    messages = ScheduledMessages(PipelineGroup(world(), meter, DEVICE), Recorder(meter, torch.device("cpu")), 0, 2)
    first, ahead = Message("backward", 1, 0), Message("backward", 1, 1)

    def run_pass(seconds: float, needed: Message | None = None) -> None:
        messages.pass_begins("a pass", 0, needed)
        fake_gpu.run(seconds)

    def post() -> Work:
        work = fake_gpu.collective(None, async_op=True)
        assert work is not None
        return work

    run_pass(2.0)
    sent = Message("forward", 0, 0)
    messages.send(sent, [tensor()], 1)
    messages.pass_ends(0)
    operations = [*messages.outgoing(sent), *messages.receive(first, [tensor()], 1)]
    assert [operation.tensor.device for operation in operations] == [DEVICE, DEVICE]
    post().wait()
    run_pass(1.0, first)
    messages.pass_ends(0)
    messages.receive(ahead, [tensor()], 1)
    fake_gpu.collective_s = 5.0
    work = post()
    run_pass(3.0)
    messages.pass_ends(0)
    work.wait()
    run_pass(1.0, ahead)
    messages.pass_ends(0)
    messages.finish()
    found = figures(meter, fake_gpu)
    assert found["recv"] == pytest.approx((1.0 + 5.0, 1.0 + 2.0))
    assert found["send"] == pytest.approx((1.0, 1.0))
    assert found["step"] == pytest.approx((6.0, 3.0))


def test_the_clocks_are_compared_between_steps_only(meter: Meter, fake_gpu: FakeGPU) -> None:
    """A rank that waited for its device in the middle of a step could hold up the ranks that the device waits for."""
    reducer = GradientReducer(world(), meter)
    fake_gpu.now_s += 100.0
    reducer.average(tensor())
    assert fake_gpu.waits == 0
    meter.end_step()
    assert fake_gpu.waits > 0


def test_the_observer_hears_what_the_device_waits_for(meter: Meter, fake_gpu: FakeGPU) -> None:
    """A rank whose main thread spins in ``.item()`` waits, as soon as its device has come to a collective."""
    meter.notes = told = Told()
    reducer = GradientReducer(world(), meter)
    fake_gpu.run(2.0)
    future: Any = reducer.reduce(Bucket(last=True))  # type: ignore[arg-type]
    heard = []
    for now_s in (1.0, 2.5, 2.6, 3.5):
        fake_gpu.now_s = now_s
        meter._stream_watch.look()
        heard.append(list(told.events))
    future.wait()
    begun, waits = ["began, not awaited"], ["began, not awaited", "awaited"]
    assert heard == [begun, waits, waits, [*waits, "ended"]]
    assert told.fields[0] == {
        "operation": "all_reduce", "group": "data", "ranks": "0-1"
    }  # fmt: skip
    meter.notes = None


def test_a_transfer_has_no_time_before_both_its_events_have(meter: Meter, fake_gpu: FakeGPU) -> None:
    """FairScale's reduces begin to be metered behind their launch: NCCL's stream may be ahead of the other one."""
    fake_gpu.run(5.0)
    transfer = meter.begin("reduce", group="shards", group_size=2, size_bytes=BYTES, on_stream=True)
    with fake_gpu.on("of a callback"):
        transfer.finish()
    fake_gpu.now_s = 1.0
    assert not transfer.done()
    meter.end_step()
    assert not meter.steps
    fake_gpu.now_s = 5.0
    assert transfer.done()


def test_a_transfer_ends_on_the_device_on_which_it_began(
    meter: Meter, fake_gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's threads, which call back, are on device 0: CUDA tells no time between events of two devices."""
    chosen: list[Any] = []
    transfer = meter.begin("reduce", group="shards", group_size=2, size_bytes=BYTES, on_stream=True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index + 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: chosen.append(device) or fake_gpu.on(fake_gpu.stream))
    transfer.finish()
    assert chosen == [DEVICE]
