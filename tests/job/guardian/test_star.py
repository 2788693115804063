"""Guardians of several hosts in one process, on a clock that the test moves: no test here waits."""

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from lightning_multigpu.job.guardian.failure import Failure, host_name
from lightning_multigpu.job.guardian.host_links import Hosts
from lightning_multigpu.job.guardian.protocol import Connection, decode, encode

SECRET = "of the job"
SILENCE_S = 3.0


class Node:
    """The guardian of one host, reduced to its connections."""

    def __init__(self, node_rank: int) -> None:
        self.node_rank = node_rank
        self.readers: dict[socket.socket, Callable[[], None]] = {}
        self.found: list[str] = []
        self.hosts = Hosts(
            silence_s=SILENCE_S,
            watch=self.readers.__setitem__,
            forget=lambda sock: self.readers.pop(sock, None),
            on_message=lambda host, message: None,
        )

    def connection_to(self, node_rank: int) -> Connection:
        (peer,) = [peer for peer in self.hosts._peers if peer.node_rank == node_rank]
        return peer.connection

    def neighbours(self) -> list[int | None]:
        return sorted(peer.node_rank or 0 for peer in self.hosts.connected())


class Network:
    """Nodes that have met; ``go_on`` lets time pass for all of them, ``cut`` separates two of them silently.

    Of ``expected`` nodes, those beyond ``num_nodes`` are still to come.
    """

    def __init__(self, num_nodes: int, *, expected: int | None = None) -> None:
        self.now_s = 1000.0
        self.nodes = [Node(node_rank) for node_rank in range(num_nodes)]
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.nodes[0].hosts.listen(self.listener, num_nodes=expected or num_nodes, secret=SECRET, now_s=self.now_s)
        for node in self.nodes[1:]:
            self.join(node)

    def join(self, node: Node, secret: str = SECRET, sock: socket.socket | None = None) -> Any:
        """Does what a rank does for its guardian; returns the answer of node 0."""
        sock = sock or socket.create_connection(self.listener.getsockname())
        sock.send(encode("hello", secret=secret, node_rank=node.node_rank, host=host_name()))
        self.deliver()
        with sock.makefile("rb", buffering=0) as file:
            answer = decode(file.readline())
        if answer["kind"] == "welcome":
            node.hosts.join(sock, node_rank=node.node_rank, host=answer["host"], now_s=self.now_s)
        else:
            sock.close()
        return answer

    def deliver(self) -> None:
        """Reads until nothing more comes; loopback delivers at once."""
        while True:
            ready = [
                read
                for node in self.nodes
                for sock in select.select(list(node.readers), [], [], 0)[0]
                if (read := node.readers.get(sock)) is not None
            ]
            if not ready:
                return
            for read in ready:
                read()

    def go_on(self, seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            self.now_s += 0.5
            for node in self.nodes:
                found = node.hosts.observe(self.now_s)
                if found is not None:
                    node.found.append(found.describe())
                    node.hosts.send("failure", failure=found.to_message())
            self.deliver()

    def cut(self, one: int, other: int) -> None:
        for node, peer in ((one, other), (other, one)):
            del self.nodes[node].readers[self.nodes[node].connection_to(peer).socket]

    def close(self) -> None:
        for node in self.nodes:
            node.hosts.close()


@pytest.fixture
def three() -> Iterator[Network]:
    with closing(Network(3)) as network:
        yield network


def name(node_rank: int) -> str:
    return f"node {node_rank} (host {host_name()})"


def test_all_know_node_0_and_nobody_listens_any_more(three: Network) -> None:
    """A listener that stayed open all run was there for strangers only."""
    assert [node.neighbours() for node in three.nodes] == [[1, 2], [0], [0]]
    assert three.listener.fileno() == -1
    three.go_on(60)
    assert [node.found for node in three.nodes] == [[], [], []]


def test_a_cut_is_named_by_both_ends_and_the_others_are_told(three: Network) -> None:
    three.cut(0, 2)
    three.go_on(6)
    first, second, third = (node.found[0] for node in three.nodes)
    assert first.startswith(f"{name(0)} has received nothing from {name(2)} for 3.")
    assert third.startswith(f"{name(2)} has received nothing from {name(0)} for 3.")
    assert second == first


def test_a_failure_and_its_age_reach_all(three: Network) -> None:
    failure = Failure("was ended by SIGKILL", rank=5, host="h", age_s=2.0)
    three.nodes[2].hosts.send("failure", failure=failure.to_message())
    three.deliver()
    for node in three.nodes[:2]:
        found: Any = node.hosts.observe(three.now_s)
        assert found.describe() == "rank 5 (host h) was ended by SIGKILL"
        assert found.age_s == 2.0
        node.hosts.send("failure", failure=found.to_message())  # node 0 passes it on
        three.deliver()


def test_what_a_host_says_before_it_ends_counts_more_than_its_end(three: Network) -> None:
    three.nodes[1].hosts.send("failure", failure=Failure("was ended by SIGKILL", rank=1, host="h").to_message())
    three.nodes[1].hosts.close()
    # What is sent now comes back as an error.
    for _ in range(3):
        three.nodes[0].connection_to(1).send("alive")
    three.go_on(1)
    assert three.nodes[0].found[0] == "rank 1 (host h) was ended by SIGKILL"


@pytest.mark.parametrize(
    ("node_rank", "secret", "why"),
    [
        (2, "of another job", "its secret is not this job's"),
        (0, SECRET, "there is a node 0 already"),
        (1, SECRET, "there is a node 1 already"),
        (99, SECRET, "node 99 is not awaited here"),
        (-1, SECRET, "node -1 is not awaited here"),
    ],
)
def test_one_that_does_not_belong_to_the_job_is_refused(node_rank: int, secret: str, why: str) -> None:
    """One that knew the secret came as node 99 of 2, and was believed."""
    with closing(Network(2, expected=3)) as network:
        answer = network.join(Node(node_rank), secret=secret)
        assert answer["why"].startswith(why)
        assert network.nodes[0].neighbours() == [1]
        assert network.nodes[0].found == [], "a stranger is nobody's loss"


def test_strangers_are_nobodys_loss_and_keep_no_host_out() -> None:
    with closing(Network(1, expected=2)) as network, ExitStack() as crowd:
        address = network.listener.getsockname()
        silent = [crowd.enter_context(socket.create_connection(address)) for _ in range(20)]
        loud = crowd.enter_context(socket.create_connection(address))
        loud.send(encode("failure", failure=Failure("forged").to_message(), age_s=0) * 100)
        network.nodes.append(node := Node(1))
        assert network.join(node)["kind"] == "welcome"
        assert node.neighbours() == [0]
        network.go_on(1)
        loud.settimeout(10)
        assert b"refused" in loud.recv(1000)
        assert len(silent) == 20, "the kernel keeps them"
        assert [node.found for node in network.nodes] == [[], []]


def test_the_last_message_of_a_guardian_arrives_although_it_has_left_others_unread() -> None:
    """A socket that is closed with something unread drops what it has not sent yet. So a second Ctrl-C did not reach
    the other hosts now and then, and their ranks went on until they were killed."""
    with closing(Network(2)) as network:
        first, second = network.nodes
        link = second.connection_to(0).socket
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)  # sends 0.2 s later
        first.hosts.observe(network.now_s + 1)
        assert select.select([link], [], [], 10)[0]
        second.hosts.send("end now", status=143)
        second.hosts.close()
        network.deliver()
        assert first.hosts.end_now == 143
