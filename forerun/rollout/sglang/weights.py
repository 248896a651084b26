"""A weight update in the terms of the checkpoint that SGLang serves, checked as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from forerun.checkpoint.reader import CheckpointReader
from forerun.rollout.served import ServedFiles, split_experts
from forerun.rollout.sync import Named, check_complete, digest


class ServedWeights(ServedFiles):
    """The weights that an update has to bring: those of the files, less copies and zeros, which a server keeps.

    Args:
        path: the checkpoint.
        dtype: the server's; None is the files'.

    Attributes:
        dtypes: name -> dtype in the server.
        drafter_digest: of the block as the files hold it, see `digest_of`; None where they hold none.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype | None) -> None:
        super().__init__(path)
        if dtype is not None:
            self.dtypes = dict.fromkeys(self.dtypes, dtype)
        self._optional = self.copies.keys() | self.zero_biases
        reader, drafter = CheckpointReader(path), [name for name in self.shapes if self.is_drafter(name)]
        self._drafter = sorted(set(drafter) - self._optional)
        self.drafter_digest = self.digest_of((name, reader.tensor(name)) for name in drafter) if drafter else None

    def as_stored(self, given: Sequence[Named]) -> list[Named]:
        """The update under the files' names and in the server's dtypes, checked against them.

        Raises:
            ForerunError: a tensor is missing, unknown, sent twice, of another shape, or of no floating dtype.
        """
        stored = list(split_experts(given, self.family, self.shapes))
        sent = {name for name, _ in stored}
        expected = {
            name: torch.empty(shape, device="meta")
            for name, shape in self.shapes.items()
            if name in sent or name not in self._optional
        }
        check_complete(expected, stored, self._drafter)
        return [(name, tensor.detach().to(self.dtypes[name])) for name, tensor in stored]

    def digest_of(self, stored: Iterable[Named]) -> str:
        """`rollout.sync.digest` of the drafter's tensors among these, without those that are copies or zeros."""
        own = set(self._drafter)
        return digest((name, tensor.to(self.dtypes[name])) for name, tensor in stored if name in own)
