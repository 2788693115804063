"""Jobs of ranks: what they answer, how their failures are told, on one host and several; and where ranks come from."""

import base64
import os
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lightning_multigpu.bench.jobs.host_agents import HostAgents, JobError, RankJob, fork_server
from lightning_multigpu.bench.jobs.placement import Placement, placement
from lightning_multigpu.bench.jobs.rank_process import Seat
from tests.bench.conftest import ranks
from tests.bench.planted import obey
from tests.world import free_port

TIMEOUT_S = 60.0


def started(hosts: HostAgents, settings: Any = None, timeout_s: float = TIMEOUT_S) -> RankJob:
    return hosts.start(obey, settings, timeout_s=timeout_s, start_timeout_s=TIMEOUT_S)


class TestOneHost:
    @pytest.fixture
    def hosts(self) -> Any:
        with HostAgents(placement(2, environment={}), threads=3) as found:
            yield found

    def test_answers_come_in_rank_order(self, hosts: HostAgents, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "17")  # of a launcher: not the ranks' concern
        job = started(hosts, "settings")
        for _ in range(2):
            assert job.turn(("answer", None)) == [["settings", rank, rank, None, 3] for rank in range(2)]
        job.end()
        assert not ranks()

    @pytest.mark.parametrize(
        ("word", "reason"),
        [
            ("raise", "rank 1: ValueError: as told"),
            ("exit", "rank 1: its process ended with exit status 3"),
            ("return", "rank 1: its process ended with exit status 0"),
            ("hang", "rank 1: no answer within 2 s"),
        ],
    )
    def test_a_failure_ends_the_job_and_is_told(self, hosts: HostAgents, word: str, reason: str) -> None:
        job, other = started(hosts, timeout_s=2.0), started(hosts)
        for each in (job, other):
            each.turn(("answer", None))
        with pytest.raises(JobError, match=f"^{reason}$"):
            job.turn((word, 1))
        assert len(ranks()) == 2
        assert len(other.turn(("answer", None))) == 2

    def test_a_rank_that_cannot_be_started_ends_the_others(
        self, hosts: HostAgents, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where the system refuses the server a fork, the bench ended with EOFError, and rank 0 went on."""
        start, errors = ForkServerProcess.start, iter([None, EOFError("unexpected")])

        def started_or_not(process: ForkServerProcess) -> None:
            if (raised := next(errors)) is not None:
                raise raised
            start(process)

        monkeypatch.setattr(ForkServerProcess, "start", started_or_not)
        with pytest.raises(JobError, match="rank 1: EOFError: unexpected"):
            started(hosts).turn(("answer", None))
        assert not ranks()


class TestTwoHosts:
    def test_each_host_hears_the_answers_and_the_failures_of_all(self) -> None:
        """A death explains what the ranks of other hosts raise."""

        def check(hosts: HostAgents) -> None:
            job = started(hosts)
            assert [answer[1:3] for answer in job.turn(("answer", None))] == [[0, 0], [1, 1], [2, 0], [3, 1]]
            with pytest.raises(JobError, match="rank 3: its process was ended by SIGKILL"):
                job.turn(("die and raise", 3))
            assert len(started(hosts).turn(("answer", None))) == 4

        on_both_hosts(check)
        assert not ranks()

    def test_hosts_that_were_started_with_different_commands_are_told(self) -> None:
        def check(hosts: HostAgents) -> None:
            agent = hosts.placement.agent
            if agent == 0:
                hosts.check_command("bench 0")
                return
            with pytest.raises(ValueError, match="'bench 1' here, 'bench 0' on the first host; run the same command"):
                hosts.check_command(f"bench {agent}")

        on_both_hosts(check)

    def test_what_a_stranger_writes_into_the_store_is_not_run(self, tmp_path: Path) -> None:
        """Commands were pickles; anyone who reached the store could run code on every host."""
        target = tmp_path / "written"

        class Touch:
            def __reduce__(self) -> Any:
                return target.touch, ()

        with HostAgents(placement(1, environment={}), threads=1) as hosts:
            job = started(hosts)
            store: Any = job._seat.store()
            store.set("answer 0 0", base64.b64encode(pickle.dumps(Touch())))
            with patch.object(RankJob, "_ask"), pytest.raises(ValueError, match="Expecting value"):
                job.turn(("answer", None))
        assert not target.exists()


def _place(node_rank: int, port: int) -> Placement:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(node_rank)}
    return placement(2, 2, environment)


def on_both_hosts(bench: Callable[[HostAgents], None]) -> None:
    def run(place: Placement) -> None:
        with HostAgents(place, threads=1) as hosts:
            bench(hosts)

    fork_server([obey.__module__])  # of both
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, _place(node_rank, port)) for node_rank in range(2)]:
            done.result(2 * TIMEOUT_S)


class TestPlacement:
    def test_one_host(self) -> None:
        assert placement(4, environment={}).local_ranks == (0, 1, 2, 3)
        assert placement(None, environment={}).world_size == 2

    def test_emulate_decides_how_many(self) -> None:
        """Two hosts without --num-nodes calibrated alone, at the same time, into one file."""
        emulated = {"PL_TRAINER_NUM_NODES": "2", "PL_TRAINER_DEVICES": "1", "MASTER_ADDR": "a", "NODE_RANK": "1"}
        place = placement(None, None, emulated)
        assert (place.num_agents, place.devices, place.node_rank) == (2, 1, 1)
        with pytest.raises(ValueError, match="--num-nodes=1, and the launcher has started 2"):
            placement(1, 1, emulated)

    def test_several_hosts(self) -> None:
        place = _place(1, 1234)
        assert (place.agent, place.num_agents, place.world_size) == (1, 2, 4)
        assert Seat(placement=place, local_rank=1).rank == 3
        assert (place.main_address, place.main_port, place.has_store) == ("127.0.0.1", 1234, False)

    @pytest.mark.parametrize("environment", [{}, {"MASTER_ADDR": "a"}, {"MASTER_ADDR": "a", "NODE_RANK": "2"}])
    def test_several_hosts_need_the_first_ones_address(self, environment: dict[str, str]) -> None:
        with pytest.raises(ValueError, match=r"--num-nodes=2: .*MASTER_ADDR .*0 to 1, in NODE_RANK"):
            placement(2, 2, environment)

    @pytest.fixture
    def launched(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Mapping[str, str]]:
        for name in ("MASTER_ADDR", "MASTER_PORT"):  # Lightning sets both: what was there before is put back
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)

        def set_all(**variables: str) -> Mapping[str, str]:
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            return os.environ

        return set_all

    def test_torchrun_decides_how_many(self, launched: Callable[..., Mapping[str, str]]) -> None:
        ranks = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "1"}
        store = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        environment = launched(**ranks, **store, MASTER_ADDR="first", MASTER_PORT="29500")
        place = placement(None, None, environment)
        assert (place.agent, place.num_agents) == (5, 6)
        assert (place.node_rank, place.num_nodes, place.devices, place.local_ranks) == (1, 2, 3, (2,))
        assert (place.main_address, place.main_port, place.has_store) == ("first", 29500, True)
        with pytest.raises(ValueError, match="--devices=2, and the launcher has started 3"):
            placement(2, None, environment)
        with pytest.raises(ValueError, match="--num-nodes=1, and the launcher has started 2"):
            placement(3, 1, environment)

    def test_slurm(self, launched: Callable[..., Mapping[str, str]]) -> None:
        job = {"NTASKS": "4", "NTASKS_PER_NODE": "2", "JOB_NAME": "train", "JOB_ID": "4242", "NNODES": "2"}
        task = {"NODELIST": "node[7-8]", "NODEID": "1", "PROCID": "3", "LOCALID": "1"}
        place = placement(None, None, launched(**{f"SLURM_{name}": value for name, value in {**job, **task}.items()}))
        assert (place.agent, place.num_agents) == (3, 4)
        assert (place.node_rank, place.num_nodes, place.devices, place.local_ranks) == (1, 2, 2, (1,))
        assert place.main_address == "node7"
