"""Hosts talk to each other and to nobody else, as fast as allowed, and are gone afterwards whatever happened.

They are children of this process: a test that leaves one fails.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lightning_multigpu
from lightning_multigpu.emulation import EmulatedHosts, Host, HostsUnavailable
from lightning_multigpu.emulation.namespaces import Namespace
from tests.hosts import require_hosts

pytestmark = pytest.mark.hosts

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
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000), timeout=20) as connection:
    start_s = time.perf_counter()
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(time.perf_counter() - start_s)
"""

# A program that puts hosts up, starts a process there, says so and waits for its end. The package's root would import
# Lightning, which takes seconds; the emulation must work without.
PROGRAM = """
import subprocess, sys, time, types
root = sys.modules["lightning_multigpu"] = types.ModuleType("lightning_multigpu")
root.__path__ = [sys.argv[2]]
from lightning_multigpu.emulation.emulated_hosts import EmulatedHosts
assert not {"torch", "lightning"} & set(sys.modules)
with EmulatedHosts(2) as hosts:
    child = hosts[1].popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE)
    grandchild = int(child.stdout.readline())
    print(*(host.namespace.pid for host in hosts), hosts.switch.pid, child.pid, grandchild, flush=True)
    if sys.argv[1] == "exit":
        sys.exit("an error on the way")
    for _ in range(10_000):  # a signal just before a sleep does not shorten it
        time.sleep(0.1)
"""


@pytest.fixture(scope="module", autouse=True)
def _available() -> None:
    require_hosts()


def ended(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


def run(host: Host, command: list[str], **options: Any) -> str:
    with host.popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return str(out)


def send(hosts: EmulatedHosts, num_bytes: int) -> tuple[str, int, float]:
    """Sends bytes from host 0 to host 1. Returns the sender's address as seen there, what arrived, and the seconds."""
    receiver = hosts[1].popen([sys.executable, "-c", RECEIVER, hosts[1].address], stdout=subprocess.PIPE, text=True)
    with receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listening\n"
        seconds = run(hosts[0], [sys.executable, "-c", SENDER, hosts[1].address, str(num_bytes)])
        address, received = receiver.stdout.readline().split()
    return address, int(received), float(seconds)


def test_hosts_reach_each_other_by_tcp_and_know_their_neighbours_for_good() -> None:
    """Namespaces share the kernel's table of 1,024 neighbours: 33 hosts, who each know 32, got "No route to host"."""
    with EmulatedHosts(3, bandwidth=None) as hosts:
        assert [host.node_rank for host in hosts] == [0, 1, 2]
        assert len({host.address for host in hosts}) == 3
        assert send(hosts, 1_000_000)[:2] == (hosts[0].address, 1_000_000)
        assert 1_000_000 < hosts[0].counters().sent_bytes < 1_200_000
        assert 1_000_000 < hosts[1].counters().received_bytes < 1_200_000
        for host in hosts:
            known = host.namespace.run("ip", "neighbour", "show", "nud", "permanent", "dev", "eth0").splitlines()
            assert {line.split()[0] for line in known} == {other.address for other in hosts} - {host.address}


def test_hosts_know_each_other_by_name_and_themselves_by_the_name_of_the_machine() -> None:
    """The names of a SLURM node list must be found; a machine's own name usually means its loopback, which no other
    host reaches. Each rank's terminal showed c10d's warning of a hostname that cannot be retrieved."""
    script = """
import socket
print(socket.gethostbyname("host0"), socket.gethostbyaddr("10.77.0.1")[0], socket.gethostbyname(socket.gethostname()))
print(socket.getnameinfo(("::ffff:10.77.0.1", 0), socket.NI_NAMEREQD)[0])
"""
    with EmulatedHosts(2) as hosts:
        found = run(hosts[1], [sys.executable, "-c", script])
        assert found == f"{hosts[0].address} host0 {hosts[1].address}\nhost0-ipv4\n"
    assert "host0" not in Path("/etc/hosts").read_text(), "the machine's own file is another one"


def test_the_bandwidth_limits_what_goes_beyond_the_burst() -> None:
    """4 MB at 80 Mbit/s take 0.4 s less the burst; without the limit it is 10 ms. The margin is wide: it is a loaded
    machine that measures."""
    with EmulatedHosts(2, bandwidth="80mbit", burst="64kb") as hosts:
        seconds = send(hosts, 4_000_000)[2]
    assert seconds > 0.3


def test_half_built_hosts_are_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses the bandwidth of the last host: what was made before must not stay."""
    real, limited = Namespace.run, []

    def refuse(namespace: Namespace, *command: str, **options: Any) -> str:
        limited.extend(word for word in command if word == "tbf")
        return real(namespace, *command, *(["unknown"] if len(limited) == 2 else []), **options)

    monkeypatch.setattr(Namespace, "run", refuse)
    with pytest.raises(HostsUnavailable, match=r"`tc .*` failed: tbf: unknown"), EmulatedHosts(2):
        pass


@pytest.mark.parametrize("way", ["exit", "SIGTERM", "SIGKILL"])
def test_the_end_of_the_process_takes_the_hosts_down(way: str) -> None:
    """A killed process cannot clean up; its namespaces and the ranks in them would stay for ever."""
    with (
        EmulatedHosts(1) as others,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, way, str(Path(lightning_multigpu.__file__).parent)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 5, "two hosts, the switch, a command and what it has started"
        if way != "exit":
            process.send_signal(signal.Signals[way])
        assert process.wait(timeout=30) == (1 if way == "exit" else -signal.Signals[way])
        assert all(ended(pid) for pid in pids)
        assert run(others[0], ["echo", "there"]) == "there\n", "those of a living process stay"
