"""The ranks that share a step: who runs which micro-batch, what they tell one another, who writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from forerun.engines.accumulation import merge_metrics
from forerun.errors import ForerunError, UsageError, one_line
from forerun.mtp.stats import MTPStats

Item = TypeVar("Item")
Result = TypeVar("Result")


class RankGroup:
    """The ranks of a device mesh; without a mesh this process alone, which is rank 0 of 1.

    Every rank calls the same methods in the same order.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.rank, self.size = (0, 1) if mesh is None else (mesh.get_rank(), mesh.size())
        self._group: dist.ProcessGroup | None = None
        if mesh is not None:
            self._group = mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all of them; None for a process alone."""
        return self._group

    def apart(self) -> RankGroup:
        """The same ranks over a process group of its own, in host memory: for a thread beside the training.

        Every rank calls it at the same point.
        """
        same = RankGroup()
        same.rank, same.size = self.rank, self.size
        if self._group is not None:
            # torch names such a group after how many its process is in already, and ranks in fewer than others would
            # wait under another name: they make groups of themselves alone first.
            counts = self.collect(self.size, [len(c10d._world.pg_names)])
            for _ in range(max(counts) - counts[self.rank]):
                dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
            members, timeout = dist.get_process_group_ranks(self._group), _timeout(self._group)
            same._group = dist.new_group(members, timeout, backend="gloo", use_local_synchronization=True)
        return same

    def split(self, size: int) -> tuple[RankGroup, RankGroup]:
        """The `size` consecutive ranks that this one is among, and the ranks in its place among theirs.

        These are all ranks of the default group, and every one of them calls it at the same point.
        """
        ranks = [0] if self._group is None else dist.get_process_group_ranks(self._group)
        together = [ranks[start : start + size] for start in range(0, self.size, size)]
        return self._among(together), self._among([ranks[place::size] for place in range(size)])

    def _among(self, parts: Sequence[Sequence[int]]) -> RankGroup:
        """A group for each part, of which this rank sees its own."""
        own = RankGroup()
        timeout = None if self._group is None else _timeout(self._group)
        for part in parts:
            group = dist.new_group(list(part), timeout)
            if dist.get_rank() in part:
                own.rank, own.size, own._group = list(part).index(dist.get_rank()), len(part), group
        return own

    def deal(self, items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
        """This rank's items, each with whether it counts.

        Ranks must gather and reduce equally often, so where the last ones are too few for all, the ranks that get none
        run one of the others' for nothing.
        """
        source = iter(items)
        while turn := list(islice(source, self.size)):
            yield (turn[self.rank], True) if self.rank < len(turn) else (turn[0], False)

    def collect(self, count: int, own: Sequence[Result]) -> list[Result]:
        """What every rank made of its items, `items[rank::size]` of `count`, in the items' order. No CUDA tensors.

        What comes after a rank's share, as `deal` gives some, is left out.
        """
        if self._group is None:
            return list(own)
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, list(own), group=self._group)
        return [parts[place % self.size][place // self.size] for place in range(count)]

    def agree(self, value: Result) -> Result:
        """Rank 0's value."""
        if self._group is None:
            return value
        said = [value]
        dist.broadcast_object_list(said, group=self._group, group_src=0)
        return said[0]

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a contiguous tensor of any dtype with rank 0's, on a device that the ranks' group serves."""
        if self._group is not None and tensor.numel():
            dist.broadcast(tensor.detach().view(-1).view(torch.uint8), group=self._group, group_src=0)

    def merge(self, values: dict[str, float]) -> dict[str, float]:
        """Metrics of all ranks, by `merge_metrics`."""
        total: dict[str, float] = {}
        for part in self.collect(self.size, [values]):
            merge_metrics(total, part)
        return total

    def reduce(self, stats: MTPStats) -> MTPStats:
        """The sums over all ranks."""
        return stats if self._group is None else stats.reduce(self._group)

    def any(self, flag: Tensor) -> bool:
        """Whether a 0-dim flag is up on any rank."""
        if self._group is None:
            return bool(flag)
        raised = flag.to(torch.int32)
        dist.all_reduce(raised, dist.ReduceOp.MAX, group=self._group)
        return bool(raised)

    def on_first(self, work: Callable[[], Result]) -> Result:
        """Call `work` on rank 0 alone; the others wait for it. What it returned there, on every rank.

        Raises:
            ForerunError: on every rank, if it failed there; a UsageError, if that was one.
        """
        failure: Exception | None = None
        result: Any = None
        if self.rank == 0:
            try:
                result = work()
            except Exception as error:
                failure = error
        said, result = self.agree((_Said.of(failure), result))
        if failure is not None:
            raise failure
        if said is not None:
            raise said.error(rank=0)
        return result

    def on_each(self, work: Callable[[], Result]) -> Result:
        """Call `work`, in which no rank waits for another, on every rank; they wait until all have. What it returned.

        Raises:
            ForerunError: on every rank, if it failed on any; a UsageError, if that was one.
        """
        failure: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:
            failure = error
        self.fail_together(failure)
        return result

    def first_takes(self, items: Iterable[Item], work: Callable[[Iterator[Item]], None]) -> None:
        """Call `work` on rank 0 with items that all ranks make together, see `take`; the others let them go."""
        self.take(items, work if self.rank == 0 else None)

    def take(self, items: Iterable[Item], work: Callable[[Iterator[Item]], None] | None) -> None:
        """Call `work` with items that all ranks make together, one by one; a rank without work lets them go.

        Raises:
            ForerunError: on every rank, if work failed on any; a UsageError, if that was one.
            Exception: where items could not be made, why. Ranks that could go on wait for this one, and hear nothing
                else until its process ends.
        """
        made = Made(items)
        failure: Exception | None = None
        if work is not None:
            try:
                work(made)
            except Exception as error:
                failure = error
        for _ in made:  # to the end also where work gave up, or the others would wait
            pass
        self.fail_together(failure)

    def fail_together(self, failure: Exception | None) -> None:
        """Raise what failed here, once every rank has said how it fared; None: nothing did.

        Raises:
            ForerunError: on every rank, if it failed on any; a UsageError, if that was one.
        """
        said = self.collect(self.size, [_Said.of(failure)])
        if failure is not None:
            raise failure
        for rank, theirs in enumerate(said):
            if theirs is not None:
                raise theirs.error(rank)


class Made(Iterator[Item]):
    """Items as several ranks make them. A reader that gives up cannot end it, as it would end a generator, and once
    making one has failed it does so whenever it is read."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self._failure: Exception | None = None

    def __next__(self) -> Item:
        if self._failure is not None:
            raise self._failure
        try:
            return next(self._items)
        except StopIteration:
            raise
        except Exception as error:
            self._failure = error
            raise


@dataclass(frozen=True)
class _Said:
    """What a rank tells the others of its failure."""

    line: str
    usage: bool

    @classmethod
    def of(cls, failure: Exception | None) -> _Said | None:
        return None if failure is None else cls(one_line(failure), isinstance(failure, UsageError))

    def error(self, rank: int) -> ForerunError:
        """What another rank raises."""
        return (UsageError if self.usage else ForerunError)(f"rank {rank}: {self.line}")


def _timeout(group: dist.ProcessGroup) -> timedelta:
    """How long a group's ranks wait for one another. There is no public way to ask."""
    return group._get_backend(group._device_types[0]).options._timeout
