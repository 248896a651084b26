"""A weight update in the terms of the checkpoint that SGLang serves, checked as a whole."""

from __future__ import annotations

from pathlib import Path

import torch

from forerun.checkpoint.reader import CheckpointReader
from forerun.models.weight_stream import Named, WeightStream
from forerun.rollout.served import ServedFiles, split_experts
from forerun.rollout.sync import check_complete, digest


class ServedWeights(ServedFiles):
    """The weights that an update has to bring: those of the files, less copies and zeros, which a server keeps.

    Args:
        path: the checkpoint.
        dtype: the server's; None is the files'.

    Attributes:
        dtypes: name -> dtype in the server.
        drafter_names: of the block's, without those that are copies or zeros.
        drafter_digest: `rollout.sync.digest` of these as the files hold them, in the server's dtypes; None where they
            hold none.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype | None) -> None:
        super().__init__(path)
        if dtype is not None:
            self.dtypes = dict.fromkeys(self.dtypes, dtype)
        self._optional = self.copies.keys() | self.zero_biases
        reader, drafter = CheckpointReader(path), [name for name in self.shapes if self.is_drafter(name)]
        self.drafter_names = frozenset(drafter) - self._optional
        held = ((name, reader.tensor(name).to(self.dtypes[name])) for name in self.drafter_names)
        self.drafter_digest = digest(held) if drafter else None

    def as_stored(self, given: WeightStream) -> WeightStream:
        """The update under the files' names and in the server's dtypes, checked against them before any of it is made.

        Raises:
            ForerunError: a tensor is missing, unknown, sent twice, of another shape, or of no floating dtype.
        """
        stored = list(split_experts(given.described, self.family, self.shapes))
        sent = {name for name, _ in stored}
        expected = {
            name: torch.empty(shape, device="meta")
            for name, shape in self.shapes.items()
            if name in sent or name not in self._optional
        }
        check_complete(expected, stored, sorted(self.drafter_names))
        made = split_experts(given, self.family, self.shapes)
        # No loop of Python's: its variable would hold what was made while the next is.
        return WeightStream(map(self._rounded, stored), map(self._rounded, made))

    def _rounded(self, stored: Named) -> Named:
        name, tensor = stored
        return name, tensor.detach().to(self.dtypes[name])
