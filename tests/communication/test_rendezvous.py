"""Ranks that find each other, and every way in which they do not: as threads of this process on one store."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_multigpu.communication import main_store as main_store_module
from lightning_multigpu.communication import rendezvous as rendezvous_module
from lightning_multigpu.communication.connections import Connections
from lightning_multigpu.communication.main_store import MainStore, listening_socket
from lightning_multigpu.communication.rendezvous import Arrival, Limit, Rendezvous, RendezvousError
from tests.world import free_port

OTHER_LOOPBACK = "127.0.0.2"  # an address of its own, as those of networks are
LONG_S = 60.0  # nobody waits so long unless something is broken


def arrival(rank: int, world_size: int = 3, *, pid: int | None = None, **table: str) -> Arrival:
    return Arrival(rank, f"host{rank}", rank, 100 + rank if pid is None else pid, world_size, table)


def limit(timeout_s: float, check: Callable[[], object] = lambda: None) -> Limit:
    return Limit(time.monotonic() + timeout_s, timeout_s, check)


def rendezvous(store: Any, own: Arrival, timeout_s: float = LONG_S, attempt: str = "0") -> Rendezvous:
    return Rendezvous(store, own, limit(timeout_s), attempt=attempt)


def meet(*arrivals: Arrival, timeout_s: float = LONG_S) -> list[list[Arrival] | str]:
    """What each rank gets: the notes of all, or the message of its error."""
    store = HashStore()

    def join(own: Arrival) -> list[Arrival] | str:
        mine = rendezvous(store, own, timeout_s)
        try:
            mine.check_in()
            return mine.wait_for()
        except RendezvousError as error:
            return str(error)

    with ThreadPoolExecutor(len(arrivals)) as pool:
        return list(pool.map(join, arrivals))


@pytest.fixture
def _no_time_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads the verdict waits for nobody else."""
    monkeypatch.setattr("lightning_multigpu.communication.rendezvous._SETTLE_S", 0.05)


class TestRendezvous:
    def test_all_come_and_know_each_other(self) -> None:
        everybody = [arrival(rank) for rank in range(3)]
        assert meet(*reversed(everybody)) == [everybody] * 3

    def test_who_came_and_who_did_not(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        """Rank 0 waited in silence."""
        monkeypatch.setattr(rendezvous_module, "QUIET_S", 0.2)
        first, second = meet(arrival(0, 5), arrival(2, 5), timeout_s=0.5)
        [line] = capfd.readouterr().err.splitlines()
        assert re.match(r"rank 0 on \S+ waits for ranks 1, 3-4 of 5; \d s are left \(join_timeout_s\)$", line)
        for message in (first, second):
            assert isinstance(message, str)
            assert message.startswith("ranks 1, 3-4 of 5 did not come within 0.5 s (join_timeout_s)")
            assert "rank 0 (host host0, node 0, pid 100), rank 2 (host host2, node 2, pid 102)" in message

    def test_what_differs_is_said_at_once_and_to_all(self) -> None:
        for message in meet(arrival(0, mode="sum"), arrival(1, mode="mean")):  # rank 2 has not come
            assert "alike: mode: sum on rank 0; mean on rank 1\n" in str(message)
        for message in meet(arrival(0, 2), arrival(1, 4)):
            assert "alike: world size: 2 on rank 0; 4 on rank 1\n" in str(message)

    def test_two_that_claim_one_rank(self) -> None:
        for message in meet(arrival(1, pid=7), arrival(1, pid=8)):
            assert "two processes claim to be rank 1: " in str(message)
            assert "pid 7)" in str(message)
            assert "pid 8)" in str(message)

    def test_an_earlier_attempt_in_the_same_store_does_not_count(self) -> None:
        store = HashStore()
        rendezvous(store, arrival(0, 2), attempt="0").check_in()
        late = rendezvous(store, arrival(1, 2), timeout_s=0.2, attempt="1")
        late.check_in()
        with pytest.raises(RendezvousError, match="rank 0 of 2 did not come"):
            late.wait_for()

    @pytest.mark.parametrize(
        "note",
        [
            *("", "7", "[]", "{", "{}", "[" * 100_000, '{"rank": 1}', "\x00"),
            '{"rank": "1", "host": "h", "node_rank": 0, "pid": 1, "world_size": 2}',
            '{"rank": 1, "host": "h", "node_rank": 0, "pid": 1, "world_size": 2, "table": {"a": 1}}',
            '{"rank": 1, "host": "h", "node_rank": 0, "pid": 1, "world_size": 2, "colour": "red"}',
        ],
    )
    @pytest.mark.usefixtures("_no_time_to_settle")
    def test_a_note_that_is_no_ranks_is_named(self, note: str) -> None:
        """In its place came the error of a constructor, on one rank only."""
        store = HashStore()
        prefixed = PrefixStore("lightning-multigpu/0", store)
        prefixed.add("tickets", 1)
        prefixed.set("note/0", note)
        mine = rendezvous(store, arrival(0, 2))
        mine.check_in()
        with pytest.raises(RendezvousError, match="cannot read a note in the store of rank 0"):
            mine.wait_for()

    @pytest.mark.parametrize("rank", [-1, 2, 99])
    def test_a_rank_out_of_range(self, rank: int) -> None:
        (message, *_) = meet(arrival(rank, 2))
        assert f"rank {rank} (host host{rank}, node {rank}, pid {100 + rank}) is out of range: of 2 ranks" in str(
            message
        )

    def test_the_keeper_of_the_store_stays_until_the_others_have_read(self) -> None:
        store = HashStore()
        read_late = threading.Event()
        first = rendezvous(store, arrival(0, 2, mode="sum"))
        first.check_in()
        other = rendezvous(store, arrival(1, 2, mode="mean"))
        other.check_in()

        def read() -> None:
            read_late.set()
            with pytest.raises(RendezvousError):
                other.wait_for()

        timer = threading.Timer(0.5, read)
        timer.start()
        with pytest.raises(RendezvousError):
            first.wait_for()
        assert read_late.is_set()
        timer.join()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def listening_at(port: int) -> set[str]:
    connections = psutil.net_connections("tcp")
    return {found.laddr.ip for found in connections if found.status == "LISTEN" and found.laddr.port == port}


def main_store(
    rank: int,
    port: int,
    address: str = "127.0.0.1",
    timeout_s: float = LONG_S,
    check: Callable[[], object] = lambda: None,
    **options: Any,
) -> MainStore:
    values: dict[str, Any] = {"is_one_host": False, "is_kept": False, "connections": Connections(), **options}
    return MainStore(address, port, limit(timeout_s, check), rank=rank, **values)


class TestMainStore:
    def test_rank_0_listens_and_the_others_find_it(self) -> None:
        port = free_port()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(main_store(1, port).open)
            time.sleep(0.3)  # it comes first, and tries until somebody is there
            store = main_store(0, port).open()
            store.set("key", "value")
            assert waiting.result().get("key") == b"value"

    def test_a_taken_port_is_named_at_once(self, listener: socket.socket) -> None:
        with pytest.raises(RendezvousError, match=rf"port {port_of(listener)} .*MASTER_PORT to a free port"):
            main_store(0, port_of(listener)).open()

    @pytest.mark.parametrize("address", ["127.0.0.1", "localhost", socket.gethostname(), OTHER_LOOPBACK])
    def test_the_store_of_one_host_listens_at_loopback_alone(self, address: str) -> None:
        """It listened at all interfaces: a client from the network ended the job, or filled its memory."""
        store = main_store(0, port := free_port(), address, is_one_host=True).open()
        main_store(1, port, address, is_one_host=True).open().set("key", "value")
        assert store.get("key") == b"value"
        assert listening_at(port) == {"127.0.0.1"}
        assert main_store(0, port, address, is_one_host=True).open().get("key") == b"value"  # a second run's

    def test_the_store_of_several_hosts_listens_at_the_main_address_alone(self) -> None:
        store = main_store(0, port := free_port(), OTHER_LOOPBACK).open()
        assert main_store(1, port, OTHER_LOOPBACK).open().num_keys() == store.num_keys()
        assert listening_at(port) == {OTHER_LOOPBACK}

    def test_a_name_that_leads_to_loopback_here_may_lead_to_a_network_elsewhere(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Debian gives the host's own name 127.0.1.1."""
        found = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [found])
        assert listening_socket("node0", 0) is None
        monkeypatch.undo()
        with listening_socket(OTHER_LOOPBACK, 0) as sock:  # type: ignore[union-attr]
            assert sock.getsockname()[0] == OTHER_LOOPBACK

    def test_nobody_there(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        """A wrong port was silence for minutes."""
        monkeypatch.setattr(main_store_module, "QUIET_S", 0.0)
        port = free_port()
        with pytest.raises(RendezvousError, match=rf"rank 3 .* at 127.0.0.1 port {port} within 0.3 s .*refused"):
            main_store(3, port, timeout_s=0.3).open()
        [line] = capfd.readouterr().err.splitlines()
        assert re.match(rf"rank 3 on .* waits for rank 0 at 127.0.0.1 port {port}: .*; 0 s are left \(join", line)

    def test_somebody_else_there(self, listener: socket.socket) -> None:
        with pytest.raises(RendezvousError, match=f"port {port_of(listener)}.* is not rank 0 of a job"):
            main_store(1, port_of(listener), timeout_s=0.5).open()

    def test_an_address_of_no_host_of_the_job(self) -> None:
        with pytest.raises(RendezvousError, match=r"MASTER_ADDR=192\.0\.2\.1 is no address of .*where rank 0 runs"):
            main_store(0, free_port(), "192.0.2.1").open()

    def test_a_name_that_nobody_knows(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(main_store_module, "QUIET_S", 0.0)
        with pytest.raises(RendezvousError, match=r"reach rank 0 at no-such-host\.invalid .* within 0.3 s .*Errno -\d"):
            main_store(0, free_port(), "no-such-host.invalid", timeout_s=0.3).open()
        assert capfd.readouterr().err.count("rank 0 at no-such-host.invalid") == 1

    def test_a_store_that_torchrun_keeps(self) -> None:
        kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        kept.set("key", "of the agent")
        assert main_store(0, kept.port, is_kept=True).open().get("key") == b"of the agent"

    def test_a_failure_elsewhere_ends_the_waiting(self) -> None:
        def check() -> None:
            raise OSError("rank 0 was ended by SIGKILL")

        with pytest.raises(OSError, match="rank 0"):
            main_store(1, free_port(), check=check).open()

    @pytest.mark.parametrize("port", [0, -1, 65_536])
    def test_no_port(self, port: int) -> None:
        with pytest.raises(ValueError, match=f"MASTER_PORT={port} is out of range"):
            main_store(0, port)
