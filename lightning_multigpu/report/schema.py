"""The schema of ``multigpu_report.json``.

Version 2::

    {
      "schema_version": 2,
      "date": "2026-11-22T12:00:00Z",                             start of the fit
      "wall_s": number,                                           seconds of the fit, validation included
      "model": {"class": "package.Class", "parameters": int, "trainable_parameters": int},
      "precision": str,                                           of the Trainer
      "global_batch": int,                                        samples of an optimizer step, all ranks together
      "hardware": {"device": "cpu" or "cuda", "threads_per_rank": int, "processor": str, "cores": int,
                   "usable_cores": int, "memory_bytes": int, "gpus": [str], "system": str},   of the host of rank 0
      "strategy": {"name": str, "options": {option: any JSON}},   the options that are not at their default
      "world": {"size": int, "nodes": int, "hosts": [str]},       ranks; nodes; one host name a node, in node order
      "versions": {software: str},
      "steps": int,                                               optimizer steps of the fit
      "ranks": [{"rank": int, "host": str, "metrics": METRICS}],  one a rank, in rank order
      "aggregate": {"metrics": METRICS},
      "communication_ms": {purpose: number},                      only where a meter measured communication
      "one_device": ONE_DEVICE,                                   only with RunReport(compare_with_one_device=True)
      "parameter_servers": SERVERS,                               only where servers made the updates
      "memory": [{"rank": int, **MEMORY}],                        one a rank; not with stages
      "tensor_split": SPLIT,                                      only where layers were split over ranks
      "pipeline": PIPELINE                                        only where the model was split into stages
    }
    ONE_DEVICE = {"ratio": number, "step_ms": number, "run_step_ms": number, "threads": int} or {"reason": str}
    METRICS = {KEY: {"median": number, "p95": number, "mean": number, "last": number}}
    SERVERS = {"servers": [{"server": int, "bytes_in": int, "bytes_out": int, "queue_ms": number}],
               "workers": [{"rank": int, "updates": int, "staleness": {"median": int, "p95": int, "max": int}}]}
    SPLIT = the object of "plan --blocks --json", without its version
    PIPELINE = {"schedule": str, "stages_per_rank": int, "pipelines": [{**STEP, "ranks": [RANK]}]}
    STEP = {"num_micro_batches": int, "wall_s": number, "bubble": number, "theoretical_bubble": number}
    RANK = {"rank": int, "stages": [int], **PASSES, **TIMES, **MEMORY}

Version 2 has all that version 1 had, with the same meanings, and ``date``, ``wall_s``, ``model``, ``precision``,
``global_batch``, ``hardware``, ``communication_ms`` and ``one_device``. Programs that read version 1 can read version 2
once they accept the number.

``global_batch`` is of steps with full batches, and absent where the samples of a batch are not known, and under
``async_ps``, where each rank makes steps of its own and ``steps`` is their sum. ``gpus`` has the host's GPUs under
``cuda``. ``communication_ms`` has the parts of ``communication/total_ms`` by purpose, means over the steps but the
first and over the ranks; parts that overlap in time add up to more than the total. In ``one_device``, ``ratio`` is the
samples that the run trains in a given time over those of one device: ``step_ms`` are the milliseconds of one device for
an optimizer step on the batches of one data rank, measured before the first step with ``threads`` intra-op threads (on
CPUs only), and ``run_step_ms`` the median of the run, on the slowest rank; loading of data is in neither. ``reason``
says why there is no figure.

``memory`` has the memory of each rank at the end of training, by the keys of MEMORY below but ``activations_bytes``.
Buffers in which gradients travel count as gradients. Optimizer states that are offloaded to the host do not count. It
is absent if servers have the states.

``parameter_servers`` counts from the start of the servers to the end of training: the bytes of each server from and to
all ranks, and ``queue_ms``, the mean time for which a rank's update in a step waited at the server for those of other
ranks, under ``async_ps``. ``workers`` is empty except under ``async_ps``: it has the number of updates of each rank,
and their staleness, the number of updates that other ranks made between the rank's pull of the weights and its update.
A rank that was lost is in ``workers`` and not in ``ranks``.

A KEY is ``group/figure_unit`` with the groups ``throughput``, ``communication``, ``parameter_server`` and ``device``. A
figure that has no meaning in a run is absent; numbers are finite. In ``aggregate`` each statistic is the sum, maximum
or mean, as the table of keys says, of the ranks that have the figure.

``median``, ``p95`` and ``mean`` are over all optimizer steps of the fit but the first, which pays for allocations and
kernel tuning (over the first if there is no other), for ``device/`` keys over all samples. The mean of a rate is total
over total time. ``p95`` is the value that 95 % of the steps stay below, so for rates it is the fast end. Above 65,536
steps median and ``p95`` rest on evenly spread steps.

``pipelines`` has the pipelines side by side, each with its ranks by position. Its figures are those of one step: the
step with the median wall time among the newest nine steps that ran all micro-batches together (on GPUs one step in 16
is timed). ``wall_s`` is from the first pass of any rank of the pipeline to the last, and ``bubble`` 1 - busy / wall,
where forward, backward and weight passes are busy; ``theoretical_bubble`` is that of equal stages, whose messages take
no time, see :func:`lightning_multigpu.planning.pipelines.timeline.theoretical`. PASSES are ``forward_passes``,
``backward_passes`` and ``weight_passes``; TIMES ``forward_s``, ``backward_s``, ``weight_s``, ``send_s``, ``receive_s``
and ``idle_s``, which together are ``wall_s``, ``bubble`` and ``theoretical_bubble``. STEP, PASSES and TIMES are absent
if no such step was timed, in a fit of fewer than three batches of a shape for example. MEMORY is ``parameters_bytes``,
``gradients_bytes`` and ``optimizer_bytes`` that the rank held; ``activations_bytes``, the most that autograd kept for
backward at a time in the first such step, without parameters and buffers, each piece of memory once; and on GPUs
``device_peak_bytes``, the most that torch had allocated. Keys of figures that were not measured are absent.
``predicted_parameters_bytes``, ``predicted_gradients_bytes`` and ``predicted_optimizer_bytes`` are the predictions of
``plan --micro-batches`` for the rank, by the split and the optimizers' classes; reports of earlier versions of this
package lack them.
"""

SCHEMA_VERSION = 2


class ReportError(ValueError):
    """A document is no report, or has an unknown version."""
