"""The launcher that starts the ranks of a host from the running interpreter, and returns the first one's result."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_multigpu._lightning_internals import (
    EndOfRun,
    GlobalStateSnapshot,
    MultiProcessingLauncher,
    check_cuda_fork,
    check_main_guard,
    disable_module_memory_sharing,
    given_checkpoint,
    interrupt,
    set_num_threads_if_needed,
)
from lightning_multigpu.job.failure_watch import SIGTERM_STATUS
from lightning_multigpu.job.guardian import Failure, Guardian
from lightning_multigpu.job.guardian.failure import host_name
from lightning_multigpu.job.guardian.proc import ended_text
from lightning_multigpu.job.guardian.protocol import INTERRUPTED_STATUS
from lightning_multigpu.job.joining import Joining, start_guardian
from lightning_multigpu.job.run_context import RunContext
from lightning_multigpu.job.uncaught_errors import EXIT

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ParallelStrategy

_TUNED_IN_VAIN = (
    "a Tuner changes the module of the process that it runs in, and spawned ranks end with theirs; tune with "
    "start_method='popen', under 'ring_ddp' for example"
)
_INTERRUPTED = "interrupted"  # the answer of a rank that a SIGINT, to it or to another rank, has ended in order


class SpawnLauncher(MultiProcessingLauncher):
    """Runs a function of the current interpreter in one new process a rank, with a copy of the strategy.

    ``check`` raises if the run is impossible, before any process is started.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        run: RunContext,
        joining: Joining,
        check: Callable[[pl.Trainer], None],
        start_method: Literal["spawn", "fork", "forkserver"],
    ) -> None:
        super().__init__(strategy, start_method=start_method)
        self.run = run
        self.joining = joining
        self._check = check

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        spawns, fits = self._start_method == "spawn", trainer is not None and trainer.state.fn == TrainerFn.FITTING
        (check_main_guard if spawns else check_cuda_fork)()
        if trainer is not None:
            self._check(trainer)
            self.joining.resumes = given_checkpoint(function, args) is not None
        if self._already_fit and fits:
            raise NotImplementedError(
                "This Trainer has run fit() in spawned processes already, and their state is lost; make a new Trainer, "
                "and pass fit(ckpt_path=...) to go on where the first one ended"
            )
        states = GlobalStateSnapshot.capture() if spawns else None
        _ = self.run.environment.main_port  # chosen now, for the copies that the ranks get
        returned, extra = self._run_ranks(partial(self.run_rank, trainer, function, args, kwargs, states))
        self._already_fit |= fits
        if trainer is not None:
            self.update_main_process_results(trainer, extra)
        return returned

    def _run_ranks(self, task: Callable[[int, Connection, str], None]) -> _Result:
        """Starts the ranks and waits for all of them; raises the failed rank's exception, or SystemExit at SIGTERM."""
        EXIT.forget()
        guardian = start_guardian(self.run)
        ranks: _Ranks | None = None
        try:
            ranks = _Ranks(self.run, self._start_method, task, guardian)
            self.procs = ranks.processes
            ranks.await_end()
            result = ranks.result()
        except BaseException as error:
            self.joining.watch.ranks_have_ended = True  # callbacks that save at exceptions do not know
            EXIT.after(error, self.run.failure_timeout_s)
            try:
                if isinstance(error, KeyboardInterrupt) and ranks is not None:
                    ranks.interrupt()
                elif ranks is not None:
                    ranks.end(signal.SIGTERM, signal.SIGKILL)
            finally:
                guardian.stop()
            raise
        finally:
            # They end so at a second Ctrl-C.
            if ranks is not None and any(each.exitcode == INTERRUPTED_STATUS for each in ranks.processes):
                os._exit(INTERRUPTED_STATUS)
        guardian.stop()
        return result

    def run_rank(
        self,
        trainer: pl.Trainer | None,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        states: GlobalStateSnapshot | None,
        local_rank: int,
        answers: Connection,
        address: str,
    ) -> None:
        """The work of each process. It answers with a result, or a failure's message, over its own pipe."""
        run, joining, watch = self.run, self.joining, self.joining.watch
        if states is not None:
            states.restore()
            if run.device_type == "cpu":
                args, kwargs = disable_module_memory_sharing((args, kwargs))
        set_num_threads_if_needed(num_processes=run.ranks_per_host)
        os.environ["LOCAL_RANK"] = str(local_rank)
        try:
            joining.begin(run, address=address)
            returned = watch.guarded(function, args, kwargs, run=run, trainer=trainer)
            result = _Result(returned, None if trainer is None else self.get_extra_results(trainer))
            answer = pickle.dumps(move_data_to_device(result, "cpu") if local_rank == 0 else None)
        except (KeyboardInterrupt, SIGTERMException) as error:
            # Lightning handles them in the first process only, which lacks the trained weights.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            if trainer is not None:
                interrupt(trainer, error)
                trainer._teardown()
            watch.stop()
            if isinstance(error, SIGTERMException):
                raise SystemExit(SIGTERM_STATUS) from None
            answers.send_bytes(pickle.dumps(_INTERRUPTED))
            raise SystemExit(1) from None
        except SystemExit:
            watch.stop()
            raise
        except Exception as error:
            if isinstance(error, EndOfRun):
                error = ValueError(_TUNED_IN_VAIN)
                watch.settle(error, run, None)
            if watch.failure is None:  # it has not joined, and the guardian sees only its end
                traceback.print_exception(error)
                watch.failure = Failure.of(error, rank=run.rank, step=None)
            if not watch.is_lost:  # else the process that has started the ranks goes on
                answers.send_bytes(pickle.dumps(watch.failure))
            watch.stop()
            raise SystemExit(1) from None
        answers.send_bytes(answer)

    @override
    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """In a rank: the results for the process that has started it."""
        fits = trainer.state.fn == TrainerFn.FITTING
        weights = trainer.lightning_module.state_dict()  # on all ranks: metrics synchronise
        return {
            **super().get_extra_results(trainer),
            "state": trainer.state,
            "weights": weights if fits else None,
            "progress": trainer.fit_loop.state_dict() if fits else None,  # global_step, current_epoch
            "best": str(getattr(trainer.checkpoint_callback, "best_model_path", "")),
            "of callbacks": {
                number: callback.results()
                for number, callback in enumerate(trainer.callbacks)  # type: ignore[attr-defined]
                if hasattr(callback, "results")
            },
        }

    @override
    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        trainer.state = extra["state"]
        if extra["weights"] is not None:
            # The module of rank 0 may have got other parts.
            trainer.lightning_module.load_state_dict(extra["weights"], strict=False)
            trainer.fit_loop.load_state_dict(extra["progress"])
        callback: Any = trainer.checkpoint_callback
        if hasattr(callback, "best_model_path"):
            callback.best_model_path = extra["best"]
        for number, results in extra["of callbacks"].items():
            vars(trainer.callbacks[number]).update(results)  # type: ignore[attr-defined]


class _Result(NamedTuple):
    """The answer of the first rank to the process that has started it."""

    returned: Any
    extra: Any


class _Ranks:
    """The processes, each with a pipe of its own, so that a killed process cannot damage another one's answer."""

    def __init__(self, run: RunContext, start_method: str, task: Callable[..., None], guardian: Guardian) -> None:
        self._timeout_s = run.failure_timeout_s
        self._guardian = guardian
        self._first_rank = run.node_rank * run.ranks_per_host
        self._pipes: dict[int, Connection] = {}
        self._answers: dict[int, Any] = {}
        self.processes: list[Any] = []
        context: Any = multiprocessing.get_context(start_method)
        try:
            for local_rank in range(run.ranks_per_host):
                self._pipes[local_rank], writer = context.Pipe(duplex=False)
                with writer:
                    arguments = local_rank, writer, guardian.address
                    process = context.Process(target=task, args=arguments, name=f"rank-{local_rank}")
                    process.start()
                self.processes.append(process)
                guardian.started(self._first_rank + local_rank, process.pid)
        except BaseException:
            guardian.kill()
            self.end(signal.SIGKILL)
            raise

    def await_end(self) -> None:
        """Reads answers until all processes have ended; after a failure their guardian ends them."""
        left = dict(enumerate(self.processes))
        while left:
            wait([*(process.sentinel for process in left.values()), *self._pipes.values()])
            for index, process in list(left.items()):
                has_ended = process.exitcode is not None  # checked before the pipe is read
                if index in self._pipes and (has_ended or self._pipes[index].poll()):
                    with self._pipes.pop(index) as pipe, contextlib.suppress(EOFError, OSError):
                        if pipe.poll():
                            self._answers[index] = pickle.loads(pipe.recv_bytes())
                if has_ended:
                    del left[index]
                    self._guardian.ended(self._first_rank + index, process.exitcode)

    def result(self) -> _Result:
        """The answer of the first rank, which has come to the end of its run with all ranks that were not lost.

        Raises the exception of a rank that has failed, or what the first process raises at a signal.
        """
        codes = [process.exitcode for process in self.processes]
        failed = [answer for answer in self._answers.values() if isinstance(answer, Failure)]
        if not failed and isinstance(result := self._answers.get(0), _Result):
            return result
        if not failed and _INTERRUPTED in self._answers.values():
            raise KeyboardInterrupt
        if not failed and {*codes} - {0} == {SIGTERM_STATUS}:
            raise SystemExit(SIGTERM_STATUS)
        if not failed:
            index = codes.index(min(codes)) if min(codes) < 0 else codes.index(next(filter(None, codes), 0))
            when = " before its work was done" if codes[index] == 0 else ""
            what = f"{ended_text(codes[index])}{when}"
            failed = [Failure(what, self._first_rank + index, host_name(), self.processes[index].pid)]
        error = max(failed, key=lambda each: bool(each.traceback)).exception()
        EXIT.is_printed = self._guardian.has_printed()
        raise error from None

    def interrupt(self) -> None:
        """After a Ctrl-C: lets the ranks end in order; at a second one their guardian ends them.

        Ranks that the terminal has signalled too count both signals as one.
        """
        signal.signal(signal.SIGINT, lambda *_: self._signal(signal.SIGINT))
        self._signal(signal.SIGINT)
        self.await_end()

    def end(self, *numbers: signal.Signals) -> None:
        """Sends the signals one after the other to those that have not ended in time."""
        for number in numbers:
            self._signal(number)
            until_s = time.monotonic() + self._timeout_s
            for process in self.processes:
                process.join(max(0.0, until_s - time.monotonic()))

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.exitcode is None:
                os.kill(process.pid, number)
