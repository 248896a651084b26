"""Which ranks of a run start a vLLM or an SGLang, and on which devices.

Every `rollout.tensor_model_parallel_size` consecutive ranks of a machine have one, on the devices that they train on.
Where a machine has fewer ranks than that, the run has one engine, which rank 0 starts on all devices that it sees.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from forerun.config_rollout import check_ranks_to_an_engine
from forerun.errors import UsageError

_BOOT = Path("/proc/sys/kernel/random/boot_id")
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


def machine() -> str:
    """A name for this machine; containers of several may have one host name."""
    return socket.gethostname() + (_BOOT.read_text().strip() if _BOOT.exists() else "")


def own_place(rank: int, hosts: Sequence[str], size: int, device: torch.device) -> Place:
    """The part of a rank.

    Args:
        rank: which.
        hosts: the machine of every rank, see `machine`.
        size: ranks to an engine.
        device: what the rank trains on; the devices of the ranks after it follow it.

    Raises:
        UsageError: `size` does not divide the ranks of a machine, or the rank does not see so many GPUs.
    """
    counts = Counter(hosts).values()
    if min(counts) < size:
        return Place(0, rank == 0)
    for count in counts:
        check_ranks_to_an_engine(count, size)
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    starts = here.index(rank) % size == 0
    return Place(here[0], starts, _devices(size) if starts and device.type == "cuda" else {})


def _devices(size: int) -> dict[str, str]:
    """So many, this process's own first.

    Raises:
        UsageError: it does not see so many.
    """
    first, visible = torch.cuda.current_device(), os.environ.get(_VISIBLE)
    names = [str(index) for index in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    given = names[first : first + size]
    if len(given) < size:
        raise UsageError(
            f"an engine is to have {size} GPUs (rollout.tensor_model_parallel_size), and the rank that starts it sees "
            f"{len(given)} from its own on: let every rank see all GPUs of its machine, as torchrun does"
        )
    return {_VISIBLE: ",".join(given)}
