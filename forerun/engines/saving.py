"""Checkpoints written one at a time: while the caller waits, or from a copy in host memory while it trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from forerun.engines.checkpoint_directory import whole_directory
from forerun.engines.ranks import RankGroup

# By group: what an engine writes in different ways.
Tensors = Mapping[str, Mapping[str, Tensor]]
Write = Callable[[Path, Tensors, RankGroup], None]


class Saver:
    """Writes checkpoint directories for an engine, on every rank.

    A save that does not wait copies this rank's tensors into host memory, which it keeps for the next one (pinned where
    there is CUDA), and writes them in a thread. The ranks' threads talk over a process group of their own.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._beside: _Beside | None = None
        self._pending: Future[None] | None = None

    def save(self, directory: Path, tensors: Tensors, write: Write, wait: bool) -> None:
        """Write one checkpoint, after the one before is finished.

        Args:
            directory: its name, see `whole_directory`.
            tensors: groups of tensors, as they are now.
            write: is called with the unfinished directory, the groups (or their copy) and the ranks to talk to.
            wait: until it is written. Otherwise what goes wrong is raised by the next call of a method.

        Raises:
            ForerunError: this checkpoint, or the one before, could not be written.
        """
        self.finish()
        if wait:
            _save(directory, tensors, write, self._ranks)
            return
        if self._beside is None:
            self._beside = _Beside(self._ranks)
        self._pending = self._beside.start(directory, tensors, write)

    def finish(self) -> None:
        """Wait for a checkpoint that is still being written.

        Raises:
            ForerunError: it could not be.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


class _Beside:
    """The group that the writing threads talk over, the memory that they write from."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks.apart()
        cuda = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
            )
        )

    def start(self, directory: Path, tensors: Tensors, write: Write) -> Future[None]:
        copy: Any = self._stager.stage(dict(tensors))
        thread = ThreadPoolExecutor(1, "checkpoint")
        writing = thread.submit(_save, directory, copy, write, self._ranks)
        thread.shutdown(wait=False)  # it ends with the save, so none outlives the training
        return writing


def _save(directory: Path, tensors: Tensors, write: Write, ranks: RankGroup) -> None:
    with whole_directory(directory, ranks) as unfinished:
        write(unfinished, tensors, ranks)
