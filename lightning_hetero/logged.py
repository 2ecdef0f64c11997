"""Logged values: reduced over the driver's replicas, each counted once whatever its tensor-parallel size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch.distributed.tensor import DTensor


class ReplicaResults(_ResultCollection):
    """A loop's logged values whose ``sync_dist`` runs over the driver's data-parallel group unless told otherwise.

    Lightning's default is the world, over which a sum would count every tensor-parallel copy of a replica.
    """

    group: Callable[[], dist.ProcessGroup]

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if kwargs.get("sync_dist_group") is None:
            kwargs["sync_dist_group"] = self.group()
        super().log(fx, name, value, *args, **kwargs)


def reduce_logged_values_over(group: Callable[[], dist.ProcessGroup], loop: Any) -> None:
    """Makes a loop's result collection a :class:`ReplicaResults`."""
    loop._results.__class__ = ReplicaResults
    loop._results.group = group
