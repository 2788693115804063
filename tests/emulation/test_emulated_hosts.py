"""Hosts talk to each other and to nobody else, as fast as allowed, and are gone afterwards whatever happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_multigpu
from lightning_multigpu.emulation import EmulatedHosts, HostsUnavailable, namespaces
from lightning_multigpu.emulation.namespaces import existing, remove_leftovers
from tests.hosts import require_hosts

pytestmark = pytest.mark.hosts

REAL_IP = namespaces.ip

RECEIVER = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("listening", flush=True)
    connection, (sender, _) = server.accept()
    received = 0
    while data := connection.recv(1 << 20):
        received += len(data)
    print(sender, received, flush=True)
"""

SENDER = """
import socket, struct, sys, time
with socket.create_connection((sys.argv[1], 7000), timeout=20) as connection:
    start_s = time.perf_counter()
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(time.perf_counter() - start_s)
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    print(*struct.unpack_from("I", info, 136), *struct.unpack_from("Q", info, 200))  # tcpi_segs_out, tcpi_bytes_sent
"""

# A program that puts hosts up, starts a process there, says so and waits for its end. The package's root would import
# Lightning, which takes seconds; the emulation must work without.
PROGRAM = """
import sys, time, types
root = sys.modules["lightning_multigpu"] = types.ModuleType("lightning_multigpu")
root.__path__ = [sys.argv[2]]
from lightning_multigpu.emulation.emulated_hosts import EmulatedHosts
assert not {"torch", "lightning"} & set(sys.modules)
with EmulatedHosts(2) as hosts:
    child = hosts[1].popen(["sleep", "1000"])
    print(hosts[0].namespace, child.pid, flush=True)
    if sys.argv[1] == "exit":
        sys.exit("an error on the way")
    for _ in range(10_000):  # a signal just before a sleep does not shorten it
        time.sleep(0.1)
"""


@pytest.fixture(scope="module", autouse=True)
def _available() -> None:
    require_hosts()


@pytest.fixture(autouse=True)
def _no_namespace_stays() -> Iterator[None]:
    before = existing()
    yield
    assert set(existing()) <= set(before)


def send(hosts: EmulatedHosts, num_bytes: int) -> tuple[str, int, float, tuple[int, ...]]:
    """Sends bytes from host 0 to host 1.

    Returns:
        The sender's address as seen there, what arrived, the seconds, and TCP's own count of segments and bytes sent,
        those that a busy machine sends again among them.
    """
    receiver = hosts[1].popen([sys.executable, "-c", RECEIVER, hosts[1].address], stdout=subprocess.PIPE, text=True)
    with receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listening\n"
        sender = hosts[0].run([sys.executable, "-c", SENDER, hosts[1].address, str(num_bytes)], timeout_s=60)
        address, received = receiver.stdout.readline().split()
    seconds, *counts = sender.stdout.split()
    return address, int(received), float(seconds), tuple(map(int, counts))


def test_hosts_reach_each_other_by_tcp_and_know_their_neighbours_for_good() -> None:
    """Namespaces share the kernel's table of 1,024 neighbours: 33 hosts, who each know 32, got "No route to host"."""
    with EmulatedHosts(3, bandwidth=None) as hosts:
        assert [host.node_rank for host in hosts] == [0, 1, 2]
        assert len({host.address for host in hosts}) == len(hosts) == 3
        assert send(hosts, 1000)[:2] == (hosts[0].address, 1000)
        for host in hosts:
            known = namespaces.ip_json("-n", host.namespace, "neighbour", "show", "nud", "permanent", "dev", "eth0")
            assert {entry["dst"] for entry in known} == {other.address for other in hosts} - {host.address}


REACHES = """
import sys, types
root = sys.modules["lightning_multigpu"] = types.ModuleType("lightning_multigpu")
root.__path__ = [sys.argv[1]]
root.communication = sys.modules["lightning_multigpu.communication"] = types.ModuleType("communication")
root.communication.__path__ = [sys.argv[1] + "/communication"]
from lightning_multigpu.communication.interface import unreachable
print(unreachable(sys.argv[2:], timeout_s=2.0))
"""


def test_an_address_without_a_way_is_told_from_one_that_refuses() -> None:
    """A rank that cannot connect while joining asks which addresses it finds no way to."""
    with EmulatedHosts(3, bandwidth=None) as hosts:
        namespaces.ip("-n", hosts[2].namespace, "route", "add", "unreachable", hosts[1].address)
        package = str(Path(lightning_multigpu.__file__).parent)
        addresses = [host.address for host in hosts]
        done = hosts[2].run([sys.executable, "-c", REACHES, package, *addresses, "192.0.2.1"])
    assert done.stdout == f"{ {addresses[1]: 'No route to host', '192.0.2.1': 'Network is unreachable'} }\n"


def test_nothing_outside_can_be_reached() -> None:
    probe = "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('192.0.2.1', 9))"
    with EmulatedHosts(1) as hosts:
        done = hosts[0].run([sys.executable, "-c", probe], check=False)
        assert "Network is unreachable" in done.stderr


def test_hosts_know_each_other_by_name_and_themselves_by_the_name_of_the_machine() -> None:
    """The names of a SLURM node list must be found; a machine's own name usually means its loopback, which no other
    host reaches. Each rank's terminal showed c10d's warning of a hostname that cannot be retrieved."""
    script = """
import socket
print(socket.gethostbyname("host0"), socket.gethostbyaddr("10.77.0.1")[0], socket.gethostbyname(socket.gethostname()))
print(socket.getnameinfo(("::ffff:10.77.0.1", 0), socket.NI_NAMEREQD)[0])
"""
    with EmulatedHosts(2) as hosts:
        done = hosts[1].run([sys.executable, "-c", script])
        assert done.stdout == f"{hosts[0].address} host0 {hosts[1].address}\nhost0-ipv4\n"
        file = namespaces._FILES / hosts[1].namespace
        assert file.exists()
    assert not file.exists()
    assert "host0" not in Path("/etc/hosts").read_text(), "the machine's own file is another one"


def test_commands_see_their_environment_and_a_failing_one_raises_and_its_text_is_kept() -> None:
    with EmulatedHosts(2) as hosts:
        environment = hosts[1].environment()
        assert environment == {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", "NODE_RANK": "1"}
        script = "import os; print(os.environ['NODE_RANK'], os.environ['PATH'])"
        done = hosts[1].run([sys.executable, "-c", script], env=environment)
        assert done.stdout.strip() == f"1 {os.environ['PATH']}"
        with pytest.raises(subprocess.CalledProcessError) as caught:
            hosts[0].run([sys.executable, "-c", "raise SystemExit('no such luck')"])
        assert caught.value.stderr == "no such luck\n"


def test_counters_count_frames_as_on_a_wire() -> None:
    """A frame of MTU 1500 carries 1448 bytes behind headers of 14 + 20 + 32: the counters must see each of them."""
    num_bytes = 4_000_000
    with EmulatedHosts(2, bandwidth=None) as hosts:
        before = [host.counters() for host in hosts]
        segments, segment_bytes = send(hosts, num_bytes)[3]
        sent, received = (host.counters() - b for host, b in zip(hosts, before, strict=True))
    assert segments >= num_bytes / 1448
    assert sent.sent_packets == pytest.approx(segments, rel=0.01)
    assert sent.sent_bytes == pytest.approx(segment_bytes + segments * 66, rel=0.01)
    assert received.received_bytes == pytest.approx(sent.sent_bytes, rel=0.03)


def test_without_wire_frames_the_kernel_hands_over_more_at_once() -> None:
    with EmulatedHosts(2, bandwidth=None, wire_frames=False) as hosts:
        before = hosts[0].counters()
        send(hosts, 4_000_000)
        assert (hosts[0].counters() - before).sent_packets < 1500


def test_the_bandwidth_limits_what_goes_beyond_the_burst() -> None:
    """4 MB at 80 Mbit/s take 0.4 s less the burst; without the limit it is 10 ms. The margin is wide: it is a loaded
    machine that measures."""
    with EmulatedHosts(2, bandwidth="80mbit", burst="64kb") as hosts:
        seconds = send(hosts, 4_000_000)[2]
    assert seconds > 0.3


def test_two_networks_at_once_do_not_meet() -> None:
    with EmulatedHosts(2) as first, EmulatedHosts(2) as second:
        assert {host.namespace for host in first}.isdisjoint(host.namespace for host in second)
        assert send(first, 10)[1] == send(second, 20)[1] - 10
        assert second[0].counters().sent_packets > 0


def test_an_exception_takes_the_hosts_down_with_what_runs_there() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def fail(hosts: EmulatedHosts) -> None:
        process = hosts[1].popen(["sh", "-c", "echo there; exec sleep 1000"], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n", "one that has not got there yet ends by itself"
        raise KeyError

    before = existing()
    with pytest.raises(KeyError), EmulatedHosts(2) as hosts:
        fail(hosts)
    with started[0] as process:
        assert process.wait(timeout=5) == -signal.SIGKILL
    assert existing() == before


def test_hosts_can_be_put_up_again_but_not_twice_and_the_handler_of_sigterm_is_back() -> None:
    hosts, before = EmulatedHosts(1), signal.getsignal(signal.SIGTERM)
    with hosts, pytest.raises(RuntimeError, match="up already"), hosts:
        pass
    with hosts:
        assert len(hosts) == 1
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_half_built_hosts_are_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses the bandwidth of the last host: what was made before must not stay."""
    before = existing()
    calls = []

    def refuse(*arguments: str) -> str:
        calls.append(arguments)
        if len(calls) == 2:
            raise HostsUnavailable("Specified qdisc kind is unknown")
        return namespaces.tc(*arguments)

    monkeypatch.setattr("lightning_multigpu.emulation.emulated_hosts.tc", refuse)
    with pytest.raises(HostsUnavailable, match="qdisc kind is unknown"), EmulatedHosts(2):
        pass
    assert existing() == before


@pytest.fixture
def forgotten() -> Iterator[list[str]]:
    """Namespaces that this test deletes in the end, should the code have forgotten them."""
    names: list[str] = []
    yield names
    for name in set(names) & set(existing()):
        namespaces._delete(name)


def test_an_interrupt_while_a_namespace_is_made_leaves_none(
    monkeypatch: pytest.MonkeyPatch, forgotten: list[str]
) -> None:
    """Ctrl-C while ``ip netns add`` ran: the namespace was in no list, and stayed for ever."""

    def interrupted(*arguments: str) -> str:
        done = REAL_IP(*arguments)
        if arguments[:2] == ("netns", "add") and arguments[2].endswith("host1"):
            forgotten.append(arguments[2])
            raise KeyboardInterrupt
        return done

    before = existing()
    monkeypatch.setattr(namespaces, "ip", interrupted)
    with pytest.raises(KeyboardInterrupt), EmulatedHosts(2):
        pass
    assert existing() == before


def test_a_namespace_that_could_not_be_deleted_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, forgotten: list[str]
) -> None:
    """Nobody looked for it any more: the lock of its set, by which leftovers are found, had gone."""
    names = forgotten

    def busy(*arguments: str) -> str:
        if arguments[:2] == ("netns", "delete") and arguments[2] in names:
            raise HostsUnavailable("Device or resource busy")
        return REAL_IP(*arguments)

    hosts = namespaces.NamespaceSet()
    names.append(hosts.add("host0"))
    hosts.add("host1")
    monkeypatch.setattr(namespaces, "ip", busy)
    with pytest.raises(HostsUnavailable, match="busy"):
        hosts.delete()
    assert [name for name in existing() if hosts.token in name] == names, "the other one has gone all the same"
    assert remove_leftovers() == []
    monkeypatch.undo()
    assert remove_leftovers() == names


def test_a_half_made_namespace_is_deleted() -> None:
    """``ip`` is killed between the file of a namespace and what it stands for."""
    made = namespaces.NamespaceSet()
    made.names.append(f"lmg-{made.token}-half")
    Path("/run/netns", made.names[0]).touch()
    assert made.names[0] in existing()
    made.delete()
    assert not [name for name in existing() if made.token in name]


def start_program(way: str) -> tuple[subprocess.Popen[str], str, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, way, str(Path(lightning_multigpu.__file__).parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    namespace, pid = process.stdout.readline().split()
    return process, namespace, int(pid)


def ended(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(("way", "status"), [("wait", 128 + signal.SIGTERM), ("exit", 1)])
def test_sigterm_and_an_exit_take_the_hosts_down(way: str, status: int) -> None:
    process, namespace, child = start_program(way)
    with process:
        if way == "wait":
            process.terminate()
    assert process.returncode == status
    assert namespace not in existing()
    assert ended(child)


def test_hosts_of_a_killed_process_are_taken_down_by_the_next_but_those_of_a_living_one_are_not() -> None:
    """A killed process cannot clean up; its namespaces and the ranks in them would stay for ever."""
    with EmulatedHosts(1) as living:
        process, namespace, child = start_program("wait")
        with process:
            process.kill()
        assert namespace in existing()
        removed = remove_leftovers()
        assert namespace in removed
        assert living[0].namespace not in removed
        assert living[0].namespace in existing()
        assert ended(child)
