"""Which ranks of a run start a vLLM or an SGLang, and on which devices.

Every `rollout.tensor_model_parallel_size` consecutive ranks of a machine have one, on the devices that they train on.
On a machine with fewer ranks than that it is rank 0's alone, on all devices that this one sees.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from forerun.config_rollout import check_ranks_to_an_engine

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Place:
    """A rank's part in starting engines.

    Attributes:
        writer: the rank that makes the directory which the engines of this machine start on.
        starts: whether this rank starts one.
        environment: variables for it.
    """

    writer: int
    starts: bool
    environment: Mapping[str, str] = field(default_factory=dict)


def own_place(rank: int, hosts: Sequence[str], size: int, device: torch.device) -> Place:
    """The part of a rank.

    Args:
        rank: which.
        hosts: the machine of every rank.
        size: ranks to an engine.
        device: what the rank trains on; the devices of the ranks after it follow it.

    Raises:
        UsageError: `size` does not divide the ranks of this machine.
    """
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    if len(here) < size:
        return Place(0, rank == 0)
    check_ranks_to_an_engine(len(here), size)
    starts = here.index(rank) % size == 0
    return Place(here[0], starts, _devices(size) if starts and device.type == "cuda" else {})


def _devices(size: int) -> dict[str, str]:
    """So many, this process's own first."""
    first, visible = torch.cuda.current_device(), os.environ.get(_VISIBLE)
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return {_VISIBLE: ",".join(names[first : first + size])}
