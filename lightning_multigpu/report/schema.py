"""The schema of ``multigpu_report.json``.

Version 1::

    {
      "schema_version": 1,
      "strategy": {"name": str, "options": {option: any JSON}},   the options that are not at their default
      "world": {"size": int, "nodes": int, "hosts": [str]},       ranks; nodes; one host name a node, in node order
      "versions": {software: str},
      "steps": int,                                               optimizer steps of the fit
      "ranks": [{"rank": int, "host": str, "metrics": METRICS}],  one a rank, in rank order
      "aggregate": {"metrics": METRICS},
      "pipeline": PIPELINE                                        only where the model was split into stages
    }
    METRICS = {KEY: {"median": number, "p95": number, "mean": number, "last": number}}
    PIPELINE = {"schedule": str, "stages_per_rank": int, "pipelines": [{**STEP, "ranks": [RANK]}]}
    STEP = {"num_micro_batches": int, "wall_s": number, "bubble": number, "theoretical_bubble": number}
    RANK = {"rank": int, "stages": [int], **PASSES, **TIMES, **MEMORY}

A KEY is ``group/figure_unit`` with the groups ``throughput``, ``communication`` and ``device``. A figure that has no
meaning in a run is absent; numbers are finite. In ``aggregate`` each statistic is the sum, maximum or mean, as the
table of keys says, of the ranks that have the figure.

``median``, ``p95`` and ``mean`` are over all optimizer steps of the fit but the first, which pays for allocations and
kernel tuning (over the first if there is no other), for ``device/`` keys over all samples. The mean of a rate is total
over total time. ``p95`` is the value that 95 % of the steps stay below, so for rates it is the fast end. Above 65,536
steps median and ``p95`` rest on evenly spread steps.

The pipelines side by side, and the ranks of each by position, tell of one step: that of median wall time among the
newest nine (on GPUs, of which one in 16 is timed) with all micro-batches in one run. ``wall_s`` is from the first pass
of any rank of the pipeline to the last, and ``bubble`` 1 - busy / wall, where forward, backward and weight passes are
busy; ``theoretical_bubble`` is that of equal stages, whose messages take no time, see
:func:`lightning_multigpu.planning.timeline.theoretical`. PASSES are ``forward_passes``, ``backward_passes`` and
``weight_passes``; TIMES ``forward_s``, ``backward_s``, ``weight_s``, ``send_s``, ``receive_s`` and ``idle_s``, which
together are ``wall_s``, ``bubble`` and ``theoretical_bubble``. STEP, PASSES and TIMES are absent where no such step was
timed, in a fit of fewer than three batches of a shape for example. MEMORY is ``parameters_bytes``, ``gradients_bytes``
and ``optimizer_bytes`` that the rank held, ``activations_bytes`` that autograd kept for backward at most at a time, in
the first such step, without parameters and buffers, each piece of memory once, and on GPUs ``device_peak_bytes``, the
most that torch had allocated; what was not measured is absent.
"""

SCHEMA_VERSION = 1


class ReportError(ValueError):
    """A document is no report, or has a version that is not known."""
