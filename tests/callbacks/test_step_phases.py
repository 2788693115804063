"""The phases of a step: each moment belongs to one."""

import pytest

from lightning_multigpu.callbacks.profile.profiled_steps import Span, partition, phase_of, seconds_of
from lightning_multigpu.report.rank_figures import PHASES


@pytest.mark.parametrize(
    ("action", "phase"),
    [
        ("[_TrainingEpochLoop].train_dataloader_next", "data_wait"),
        ("[Strategy]RingDDPStrategy.batch_to_device", "device_transfer"),
        ("[Strategy]RingDDPStrategy.training_step", "forward"),
        ("[Strategy]RingDDPStrategy.backward", "backward"),
        ("[LightningModule]Net.optimizer_step", "optimizer"),
        ("[LightningModule]Net.configure_gradient_clipping", "optimizer"),
        ("[LightningModule]Net.on_train_batch_end", "callbacks"),
        ("[Callback]ModelCheckpoint{'monitor': 'a.b'}.on_train_batch_end", "callbacks"),
        ("run_training_batch", "other"),
    ],
)
def test_phase_of_an_action(action: str, phase: str) -> None:
    assert phase_of(action) == phase
    assert phase in PHASES


def test_the_innermost_action_counts_and_overlays_cover_it() -> None:
    spans = [Span(1, 2, "data_wait"), Span(3, 9, "optimizer"), Span(4, 5, "forward"), Span(5, 8, "backward")]
    parts = partition(spans, [[Span(6.0, 7.0, "communication")], [Span(6.5, 7.5, "stage_wait")]], 0.0, 10.0)
    assert [(p.name, p.start_s, p.end_s) for p in parts] == [
        ("other", 0.0, 1.0),
        ("data_wait", 1.0, 2.0),
        ("other", 2.0, 3.0),
        ("optimizer", 3.0, 4.0),
        ("forward", 4.0, 5.0),
        ("backward", 5.0, 6.0),
        ("communication", 6.0, 6.5),
        ("stage_wait", 6.5, 7.5),
        ("backward", 7.5, 8.0),
        ("optimizer", 8.0, 9.0),
        ("other", 9.0, 10.0),
    ]
    assert (seconds_of(parts)["other"], seconds_of(parts)["backward"]) == (3.0, 1.5)


def test_what_is_outside_of_the_step_is_left_out() -> None:
    parts = partition([Span(-1.0, 0.5, "callbacks"), Span(0.8, 3.0, "data_wait")], [], 0.0, 1.0)
    assert seconds_of(parts) == pytest.approx({"data_wait": 0.2, "callbacks": 0.5, "other": 0.3})


def test_a_later_span_of_a_list_covers_an_earlier_one() -> None:
    """Also where both cross, and where many begin together: each moment belongs to the last that covers it."""
    spans = [Span(0, 6, "forward"), Span(0, 3, "backward"), Span(4, 8, "optimizer"), Span(5, 5, "other")]
    cover = [Span(2.0, 5.0, "communication")]
    parts = partition(spans, [cover], 0.0, 9.0)
    for at_s in (half / 2 for half in range(1, 18, 2)):
        *_, last = [each for each in (Span(0.0, 9.0, "other"), *spans, *cover) if each.start_s <= at_s < each.end_s]
        assert [part.name for part in parts if part.start_s <= at_s < part.end_s] == [last.name]
