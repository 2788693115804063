"""Jobs of ranks: what they answer, how their failures are told, on one host and several; and where ranks come from."""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lightning_multigpu.bench.jobs import rank_process
from lightning_multigpu.bench.jobs.host_agents import HostAgents, JobError, RankJob
from lightning_multigpu.bench.jobs.placement import Placement, placement
from tests.bench.conftest import ranks
from tests.bench.planted import obey
from tests.world import free_port

TIMEOUT_S = 60.0


def started(
    hosts: HostAgents, *words: tuple[str, int | None], settings: Any = None, timeout_s: float = TIMEOUT_S
) -> tuple[RankJob, Callable[[], list[Any]]]:
    """A job that does these in its turns; returns a function for the answers of the next one."""
    turns = hosts.turns(words)
    job = hosts.start("job", obey, settings, turns, timeout_s=timeout_s, start_timeout_s=TIMEOUT_S)
    numbers = iter(number for number, _ in turns)
    return job, lambda: job.answers(next(numbers))


class TestOneHost:
    @pytest.fixture
    def hosts(self) -> Any:
        with HostAgents(placement(2, environment={}), threads=3) as found:
            yield found

    def test_answers_come_in_rank_order(self, hosts: HostAgents, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "17")  # of a launcher: not the ranks' concern
        job, answers = started(hosts, ("answer", None), ("answer", None), settings="settings")
        for _ in range(2):
            assert answers() == [["settings", rank, rank, None, 3] for rank in range(2)]
        job.end()
        assert not ranks()

    @pytest.mark.parametrize(
        ("word", "status", "reason"),
        [
            ("raise", "failed", "rank 1: ValueError: as told"),
            ("exit", "crashed", "rank 1: its process ended with exit status 3"),
            ("return", "crashed", "rank 1: its process ended with exit status 0"),
            ("hang", "timed out", "no answer within 2 s"),
        ],
    )
    def test_a_failure_ends_the_job_and_is_told(self, hosts: HostAgents, word: str, status: str, reason: str) -> None:
        _, answers = started(hosts, ("answer", None), (word, 1), timeout_s=2.0)
        answers()
        with pytest.raises(JobError) as raised:
            answers()
        assert (raised.value.status, str(raised.value)) == (status, reason)
        assert status == "timed out" or not raised.value.all_ranks
        assert not ranks()
        _, again = started(hosts, ("answer", None))
        assert len(again()) == 2

    def test_a_rank_that_ends_after_its_last_turn_has_not_failed(self, hosts: HostAgents) -> None:
        job, answers = started(hosts, ("answer", None))
        while ranks():
            time.sleep(0.02)
        asked_before = iter([False])
        with patch.object(job, "store", wraps=job.store) as store:
            store.check.side_effect = lambda keys: next(asked_before, hosts.store.check(keys))
            assert len(answers()) == 2
        assert not rank_process.failures(hosts.store, job.name)

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
        _, answers = started(hosts, ("answer", None))
        with pytest.raises(JobError, match="rank 1: EOFError: unexpected") as raised:
            answers()
        assert raised.value.status == "crashed"
        assert not ranks()

    def test_jobs_take_turns(self, hosts: HostAgents) -> None:
        """And so do what is left of them, where one of them fails."""
        turns = hosts.turns([("answer", None), ("exit", 0), ("answer", None), ("answer", None)])
        limits = {"timeout_s": TIMEOUT_S, "start_timeout_s": TIMEOUT_S}
        jobs: list[RankJob] = [hosts.start("job", obey, name, turns[name::2], **limits) for name in (0, 1)]
        assert [answer[0] for answer in jobs[0].answers(0)] == [0, 0]
        with pytest.raises(JobError, match="exit status 3"):
            jobs[1].answers(1)
        assert [answer[0] for answer in jobs[0].answers(2)] == [0, 0]
        hosts.skip(3)
        _, again = started(hosts, ("answer", None))
        assert len(again()) == 2


class TestTwoHosts:
    def test_each_host_hears_the_answers_and_the_failures_of_all(self) -> None:
        on_both_hosts(self._run)
        assert not ranks()

    @staticmethod
    def _run(hosts: HostAgents) -> None:
        hosts.check_settings({"--devices": "2"})
        _, answers = started(hosts, ("answer", None), ("exit", 3))
        assert [answer[1:3] for answer in answers()] == [[0, 0], [1, 1], [2, 0], [3, 1]]
        with pytest.raises(JobError, match="rank 3: its process ended with exit status 3") as raised:
            answers()
        assert not raised.value.all_ranks
        _, again = started(hosts, ("answer", None))
        assert len(again()) == 4

    def test_hosts_that_were_started_with_different_options_are_told(self) -> None:
        def check(hosts: HostAgents) -> None:
            agent = hosts.placement.agent
            with pytest.raises(ValueError, match=f"--steps={agent} here, {1 - agent} on host {1 - agent}; run the"):
                hosts.check_settings({"--devices": "2", "--steps": str(agent)})

        on_both_hosts(check)

    def test_what_a_stranger_writes_into_the_store_is_not_run(self, tmp_path: Path) -> None:
        """Commands were pickles; anyone who reached the store could run code on every host."""
        target = tmp_path / "written"

        class Touch:
            def __reduce__(self) -> Any:
                return target.touch, ()

        with HostAgents(placement(1, environment={}), threads=1) as hosts:
            hosts.store.set("0/0", base64.b64encode(pickle.dumps(Touch())))
            silent = patch.object(hosts, "store", wraps=hosts.store, set=lambda *_: None)
            with silent, pytest.raises(ValueError, match="Expecting value"):
                hosts.check_settings({})
        assert not target.exists()

    def test_a_death_explains_what_the_ranks_of_other_hosts_raise(self) -> None:
        def check(hosts: HostAgents) -> None:
            _, answers = started(hosts, ("answer", None), ("die and raise", 3))
            answers()
            with pytest.raises(JobError, match="rank 3: its process was ended by SIGKILL") as raised:
                answers()
            assert raised.value.status == "crashed"

        on_both_hosts(check)
        assert not ranks()


def _place(node_rank: int, port: int) -> Placement:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(node_rank)}
    return placement(2, 2, environment)


def on_both_hosts(bench: Callable[[HostAgents], None]) -> None:
    """Runs a bench on two agents, each in a thread; raises what it raises."""

    def run(place: Placement) -> None:
        with HostAgents(place, threads=1) as hosts:
            bench(hosts)

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
        assert (place.agent, place.num_agents, place.world_size, place.rank(1)) == (1, 2, 4, 3)
        assert (place.main_address, place.main_port, place.has_store) == ("127.0.0.1", 1234, False)

    @pytest.mark.parametrize("environment", [{}, {"MASTER_ADDR": "a"}, {"MASTER_ADDR": "a", "NODE_RANK": "2"}])
    def test_several_hosts_need_the_first_ones_address(self, environment: dict[str, str]) -> None:
        with pytest.raises(ValueError, match=r"--num-nodes=2: .*MASTER_ADDR .*0 to 1, in NODE_RANK"):
            placement(2, 2, environment)

    @pytest.mark.parametrize("port", ["abc", "0", "65536"])
    def test_a_port_that_is_none(self, port: str) -> None:
        with pytest.raises(ValueError, match=f"MASTER_PORT={port} is out of range"):
            placement(2, 2, {"MASTER_ADDR": "a", "MASTER_PORT": port, "NODE_RANK": "0"})

    def test_torchrun_decides_how_many(self) -> None:
        ranks = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "1"}
        store = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        environment = {**ranks, **store, "MASTER_ADDR": "first", "MASTER_PORT": "29500"}
        place = placement(None, None, environment)
        assert (place.agent, place.num_agents) == (5, 6)
        assert (place.node_rank, place.num_nodes, place.devices, place.local_ranks) == (1, 2, 3, (2,))
        assert place.rank(2) == 5
        assert place.has_store
        with pytest.raises(ValueError, match="--devices=2, and the launcher has started 3"):
            placement(2, None, environment)
        with pytest.raises(ValueError, match="--num-nodes=1, and the launcher has started 2"):
            placement(3, 1, environment)

    def test_slurm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        job = {"NTASKS": "4", "NTASKS_PER_NODE": "2", "JOB_NAME": "train", "JOB_ID": "4242", "NNODES": "2"}
        task = {"NODELIST": "node[7-8]", "NODEID": "1", "PROCID": "3", "LOCALID": "1"}
        slurm = {f"SLURM_{name}": value for name, value in {**job, **task}.items()}
        for name, value in slurm.items():
            monkeypatch.setenv(name, value)
        for name in ("MASTER_ADDR", "MASTER_PORT"):  # Lightning sets both: what was there before is put back
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        place = placement(None, None, slurm)
        assert (place.agent, place.num_agents) == (3, 4)
        assert (place.node_rank, place.num_nodes, place.devices, place.local_ranks) == (1, 2, 2, (1,))
        assert place.main_address == "node7"

    def test_numbers_out_of_range(self) -> None:
        with pytest.raises(ValueError, match="--devices=0"):
            placement(0, environment={})
