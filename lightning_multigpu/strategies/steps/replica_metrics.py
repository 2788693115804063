"""Metrics of replicas: each replica updates a copy; after a step the states are merged into the module's metrics."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MinMaxMetric, Running


class ReplicaMetrics:
    """Copies of a module's metrics for its replicas.

    The first replica updates the module's own metrics. A copy holds the samples of one step only. :meth:`merge` adds up
    the states in the order of the replicas, by the reductions that they declare for several ranks. So a metric counts
    each sample once, as on one device.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._copies: dict[tuple[int, int], tuple[nn.Module, nn.Module]] = {}

    def substitute(self, part: nn.Module, number: int) -> nn.Module | None:
        """The empty copy of a metric or a collection for the replica ``number``; None for other modules.

        Raises:
            ValueError: a state of the metric cannot be merged.
        """
        if not isinstance(part, Metric | MetricCollection):
            return None
        key = (id(part), number)
        if key not in self._copies:
            with torch.inference_mode(mode=False):
                self._copies[key] = part, _copied(part, self._devices[number])
        own = self._copies[key][1]
        own.train(part.training)
        return own

    def merge(self) -> None:
        """Adds the states of all copies that were updated to the module's metrics.

        Raises:
            ValueError: a metric counts each update, and every replica makes one.
        """
        for _, (part, copied) in sorted(self._copies.items(), key=lambda item: item[0][1]):
            for metric, of_replica in zip(_metrics_in(part), _metrics_in(copied), strict=True):
                if of_replica.update_called or (isinstance(of_replica, Running) and of_replica._num_vals_seen):
                    _merge(metric, of_replica, self._devices[0])
                    of_replica.reset()


def _copied(part: nn.Module, device: torch.device) -> nn.Module:
    for metric in _metrics_in(part):
        for name, reduction in metric._reductions.items():
            if reduction is None and isinstance(metric._defaults[name], Tensor):
                raise ValueError(
                    f"{type(metric).__name__} cannot be merged over the replicas of dp: its state {name!r} has "
                    "dist_reduce_fx=None, which keeps one value of each replica; use strategy='ring_ddp', or devices=1"
                )
    own = copy.deepcopy(part).to(device)
    for metric in _metrics_in(own):
        metric.reset()
    for collection in own.modules():
        if isinstance(collection, MetricCollection):
            # torchmetrics compares values to find metrics that share a state, and few samples may agree by chance.
            collection._enable_compute_groups, collection._groups_checked = False, False
    return own


def _metrics_in(part: nn.Module) -> Iterator[Metric]:
    if isinstance(part, MetricCollection) and part._groups_checked:
        part._compute_groups_create_state_ref()  # only the first metric of a group has been updated
    return (each for each in part.modules() if isinstance(each, Metric))


def _merge(metric: Metric, of_replica: Metric, device: torch.device) -> None:
    """Merges the state of ``of_replica`` into ``metric``, which comes first."""
    if isinstance(metric, Running | MinMaxMetric):
        raise ValueError(
            f"{type(metric).__name__} cannot be merged over the replicas of dp: it counts each update, and each "
            "replica makes one for its part of the batch; update it in on_train_batch_end or "
            "on_validation_batch_end, from what the step returns, or use strategy='ring_ddp'"
        )
    if of_replica.device != device:
        of_replica = copy.deepcopy(of_replica).to(device)
    count = metric.update_count + of_replica.update_count if metric.update_called else of_replica.update_count
    of_replica._update_count = metric.update_count + 1  # the weight of the other state in a mean
    with torch.no_grad():
        of_replica._reduce_states(metric.metric_state)
    states: dict[str, Any] = of_replica.metric_state
    for name, value in states.items():
        setattr(metric, name, [*value] if isinstance(value, list) else value)  # reset() clears the copy's list
    metric._update_count = count
    metric._computed = None
