"""The page that a rank shares with its guardian: what is written there, and how it is read from outside."""

import threading
import time
from typing import Any

import pytest

from lightning_multigpu.job.guardian.hang.flight_recorder import (
    AWAITED,
    BROKEN,
    ENDED,
    PAGE_BYTES,
    UNDER_WAY,
    Entry,
    FlightRecorder,
    progress,
    read_entries,
    read_line,
    read_steps,
)


def began(flight_recorder: FlightRecorder, operation: str = "all_reduce", group: str = "data", **fields: Any) -> Any:
    return flight_recorder.began(operation, group=group, **{"ranks": "0-1", **fields})


def only(memory: bytearray, slot: int = 0) -> Entry:
    (entry,) = read_entries(memory, slot)
    return entry


@pytest.fixture
def memory() -> bytearray:
    return bytearray(3 * PAGE_BYTES)


@pytest.fixture
def flight_recorder(memory: bytearray) -> FlightRecorder:
    return FlightRecorder(memory, 0)


def test_a_collective_from_its_beginning_to_its_end(memory: bytearray, flight_recorder: FlightRecorder) -> None:
    assert read_entries(memory, 0) == []
    before_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    note = began(flight_recorder)
    entry = only(memory)
    assert entry.name == "all_reduce #1 of group data"
    assert (entry.ranks, entry.state) == ("0-1", AWAITED)
    assert before_s <= entry.since_s <= time.clock_gettime(time.CLOCK_BOOTTIME)
    note.ended()
    assert only(memory)._replace(since_s=0) == entry._replace(state=ENDED, since_s=0)
    began(flight_recorder, "broadcast").broke()
    assert (only(memory).name, only(memory).state) == ("broadcast #2 of group data", BROKEN)
    began(flight_recorder).ended()
    assert (only(memory).state, only(memory).number) == (ENDED, 3)


def test_numbers_are_those_of_a_group_and_its_members(memory: bytearray, flight_recorder: FlightRecorder) -> None:
    for group, ranks in (("data", "0-1"), ("world", "0-3"), ("data", "0-1"), ("data", "0-2:2")):
        began(flight_recorder, group=group, ranks=ranks).ended()
    entries = read_entries(memory, 0)
    assert [(e.group, e.ranks, e.begun) for e in entries] == [
        ("data", "0-1", 2), ("world", "0-3", 1), ("data", "0-2:2", 1)
    ]  # fmt: skip


def test_the_oldest_that_has_not_ended_is_shown(memory: bytearray, flight_recorder: FlightRecorder) -> None:
    """A second report of an end, by the thread that watches the device, counts for nothing."""
    notes = [began(flight_recorder) for _ in range(3)]
    assert (only(memory).number, only(memory).begun) == (1, 3)
    for number, note in enumerate(notes, 2):
        for _ in range(2):
            note.ended()
            note.awaited()
        assert (only(memory).number, only(memory).state) == ((number, AWAITED) if number < 4 else (3, ENDED))


def test_what_nobody_waits_for_is_under_way_until_somebody_does(
    memory: bytearray, flight_recorder: FlightRecorder
) -> None:
    note = began(flight_recorder, awaited=False)
    begun_s = only(memory).since_s
    assert only(memory).state == UNDER_WAY
    time.sleep(0.01)
    waiter = threading.Thread(target=note.awaited)
    waiter.start()
    waiter.join()
    assert only(memory).state == AWAITED
    assert only(memory).since_s > begun_s, "the wait counts from here"


def test_the_main_threads_line_is_no_progress(memory: bytearray, flight_recorder: FlightRecorder) -> None:
    before = progress(memory, 0)
    thread = threading.Thread(target=flight_recorder.note_line)
    thread.start()
    thread.join()
    assert progress(memory, 0) == before
    assert "test_flight_recorder.py" in read_line(memory, 0)[0]
    assert read_line(memory, 1) == ("", "")
    flight_recorder.completed(1)
    assert progress(memory, 0) != before


def test_ranks_have_pages_of_their_own(memory: bytearray) -> None:
    for slot in range(3):
        flight_recorder = FlightRecorder(memory, slot)
        flight_recorder.completed(100 + slot)
        began(flight_recorder, f"op{slot}")
    assert [read_steps(memory, slot) for slot in range(3)] == [100, 101, 102]
    assert [only(memory, slot).operation for slot in range(3)] == ["op0", "op1", "op2"]


def test_more_groups_than_rows_and_names_that_are_too_long(memory: bytearray, flight_recorder: FlightRecorder) -> None:
    notes = [began(flight_recorder, "o" * 99, f"{index}" + "g" * 99, ranks="0," * 99) for index in range(100)]
    entries = read_entries(memory, 0)
    assert len(entries) == len([note for note in notes if note is not None]) >= 8
    assert set(entries[0].operation) == {"o"}
    assert entries[0].ranks == "", "half a list of members would be a wrong one"
    assert not any(memory[PAGE_BYTES:])


def test_nothing_is_written_after_leaving(memory: bytearray, flight_recorder: FlightRecorder) -> None:
    note = began(flight_recorder)
    flight_recorder.detach()
    before = bytes(memory)
    note.ended()
    flight_recorder.completed(7)
    began(flight_recorder)
    assert bytes(memory) == before


def test_a_row_whose_editions_differ_is_left_out(memory: bytearray, flight_recorder: FlightRecorder) -> None:
    """A rank was stopped in the middle of a store."""
    began(flight_recorder)
    memory[256] ^= 1
    assert read_entries(memory, 0) == []
