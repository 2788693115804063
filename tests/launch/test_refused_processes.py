"""Ranks that the system refuses to start: the user is told why, and nothing of the job is left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import job

pytestmark = pytest.mark.launch

# The second of the two further ranks cannot be started; the program catches that and goes on, as a notebook does.
SCRIPT = """
import errno, os, subprocess, sys
from lightning_multigpu import RingDDPStrategy
from tests.launch.job import marked
from tests.strategies.tasks import Case, Classifier, make_trainer, train_loader

def refusing(start, is_rank):
    begun = []
    def start_or_refuse(*arguments, **options):
        begun.append(is_rank(*arguments))
        if sum(begun) > 1:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(*arguments, **options)
    return start_or_refuse

if __name__ == "__main__":
    trainer = make_trainer(Case(), RingDDPStrategy(start_method=sys.argv[1]), 3)
    if sys.argv[1] == "popen":
        starts = subprocess.Popen.__init__
        subprocess.Popen.__init__ = refusing(starts, lambda self, command, *rest: "guardian" not in str(command))
    else:
        os.fork = refusing(os.fork, lambda: True)
    try:
        trainer.fit(Classifier(), train_loader(Case(), trainer))
    except OSError as error:
        print(f"raised {error}: {error.__notes__}")
    print("left", [p.pid for p in marked(os.environ["JOB_MARK"]) if p.pid != os.getpid()])
"""


@pytest.mark.parametrize(("method", "rank"), [("popen", 2), ("fork", 1)])
def test_a_rank_that_cannot_be_started(method: str, rank: int, tmp_path: Path) -> None:
    """With popen, the ranks that had been started and the guardian waited on, for as long as the program lived."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    finished = job.run(str(tmp_path), str(script), method)
    raised, left = finished.stdout.strip().splitlines()[-2:]
    assert re.fullmatch(
        rf"raised \[Errno 11\] Resource temporarily unavailable: \['rank {rank} of 3 on this host cannot start: no "
        r"more processes are allowed: see `ulimit -u`, and pids.max of the container'\]",
        raised,
    ), finished.stderr[-2000:]
    assert left == "left []"
    assert "The job failed" not in finished.stderr, "the guardian would call the ranks that are ended the cause"
