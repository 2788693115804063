"""Jobs of ranks: what they answer, how their failures are told, on one host and several; and where ranks come from."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lightning_multigpu.bench.jobs.host_agents import HostAgents, JobError, _cause, free_port
from lightning_multigpu.bench.jobs.local_ranks import RankFailure
from lightning_multigpu.bench.jobs.placement import Placement, placement
from tests.bench.conftest import ranks
from tests.bench.planted import obey

TIMEOUT_S = 60.0


class TestOneHost:
    @pytest.fixture
    def hosts(self) -> Any:
        with HostAgents(placement(2, environment={}), threads=3) as found:
            yield found

    def test_answers_come_in_rank_order(self, hosts: HostAgents, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "17")  # of a launcher: not the ranks' concern
        job = hosts.start("job", obey, "settings")
        for _ in range(2):
            assert job.ask(("answer", None), TIMEOUT_S) == [
                ["settings", 0, 0, None, 3],
                ["settings", 1, 1, None, 3],
            ]
        job.end()
        assert not ranks()

    @pytest.mark.parametrize(
        ("word", "kind", "reason"),
        [
            ("raise", "raised", "rank 1: ValueError: as told"),
            ("exit", "died", "rank 1: its process ended with exit status 3"),
            ("return", "died", "rank 1: ended before it had answered"),
            ("hang", "late", "no answer within 2 s"),
        ],
    )
    def test_a_failure_ends_the_job_and_is_told(self, hosts: HostAgents, word: str, kind: str, reason: str) -> None:
        job = hosts.start("job", obey, None)
        job.ask(("answer", None), TIMEOUT_S)
        with pytest.raises(JobError) as raised:
            job.ask((word, 1), 2.0 if word == "hang" else TIMEOUT_S)
        failure = raised.value.failure
        assert (failure.kind, failure.reason, failure.ranks, failure.all_ranks) == (kind, reason, (1,), False)
        assert not ranks()
        again = hosts.start("job", obey, None)
        assert len(again.ask(("answer", None), TIMEOUT_S)) == 2

    def test_what_is_not_ended_is_killed(self) -> None:
        with HostAgents(placement(2, environment={}), threads=1) as hosts:
            hosts.start("job", obey, None).ask(("answer", None), TIMEOUT_S)
            assert len(ranks()) == 2
        assert not ranks()


class TestTwoHosts:
    def test_each_host_hears_the_answers_and_the_failures_of_all(self) -> None:
        on_both_hosts(self._run)
        assert not ranks()

    @staticmethod
    def _run(hosts: HostAgents) -> None:
        hosts.check_settings({"--devices": "2"})
        job = hosts.start("job", obey, None)
        assert [answer[1:3] for answer in job.ask(("answer", None), TIMEOUT_S)] == [[0, 0], [1, 1], [2, 0], [3, 1]]
        with pytest.raises(JobError, match="rank 3: its process ended with exit status 3") as raised:
            job.ask(("exit", 3), TIMEOUT_S)
        assert (raised.value.failure.ranks, raised.value.failure.all_ranks) == ((3,), False)
        assert len(hosts.start("job", obey, None).ask(("answer", None), TIMEOUT_S)) == 4

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
            hosts._store.set("0/0", base64.b64encode(pickle.dumps(Touch())))
            silent = patch.object(hosts, "_store", wraps=hosts._store, set=lambda *_: None)
            with silent, pytest.raises(ValueError, match="Expecting value"):
                hosts.check_settings({})
        assert not target.exists()

    def test_of_several_failures_the_one_that_explains_the_others_is_told(self) -> None:
        """The ranks of one host have died; those of the others have waited for them, or lost their connections."""
        late = RankFailure("late", (0, 1), True, "no answer within 3 s")
        died = RankFailure("died", (2,), False, "rank 2: its process was ended by SIGKILL")
        raised = RankFailure("raised", (4, 5), True, "rank 4: RuntimeError: connection closed")
        assert _cause([late, raised, died], 3) == died
        assert _cause([late, raised], 3) == replace(raised, all_ranks=False)
        both = _cause([raised, raised], 2)
        assert (both.all_ranks, both.ranks) == (True, (4, 5, 4, 5))


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

    def test_several_hosts(self) -> None:
        place = _place(1, 1234)
        assert (place.agent, place.num_agents, place.world_size, place.rank(1)) == (1, 2, 4, 3)
        assert (place.main_address, place.main_port, place.has_store) == ("127.0.0.1", 1234, False)

    @pytest.mark.parametrize("environment", [{}, {"MASTER_ADDR": "a"}, {"MASTER_ADDR": "a", "NODE_RANK": "2"}])
    def test_several_hosts_need_the_first_ones_address(self, environment: dict[str, str]) -> None:
        with pytest.raises(ValueError, match=r"--num-nodes=2: .*MASTER_ADDR .*0 to 1, in NODE_RANK"):
            placement(2, 2, environment)

    TORCHRUN = {  # noqa: RUF012 - a constant
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "first",
        "MASTER_PORT": "29500",
    }

    def test_torchrun(self) -> None:
        place = placement(None, None, self.TORCHRUN)
        assert (place.agent, place.num_agents) == (5, 6)
        assert (place.node_rank, place.num_nodes, place.devices, place.local_ranks) == (1, 2, 3, (2,))
        assert place.rank(2) == 5
        assert place.has_store

    def test_torchrun_decides_how_many(self) -> None:
        with pytest.raises(ValueError, match="--devices=2, and the launcher has started 3"):
            placement(2, None, self.TORCHRUN)
        with pytest.raises(ValueError, match="--num-nodes=1, and the launcher has started 2"):
            placement(3, 1, self.TORCHRUN)

    def test_slurm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slurm = {
            "SLURM_NTASKS": "4",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_JOB_NAME": "train",
            "SLURM_JOB_ID": "4242",
            "SLURM_NNODES": "2",
            "SLURM_NODELIST": "node[7-8]",
            "SLURM_NODEID": "1",
            "SLURM_PROCID": "3",
            "SLURM_LOCALID": "1",
        }
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
