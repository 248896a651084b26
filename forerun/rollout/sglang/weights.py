"""What a server's weights are called and shaped, and an update cut to that and checked as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from forerun.checkpoint.reader import CheckpointReader
from forerun.errors import UsageError
from forerun.families import FamilyRecord, family_of, present_depth, text_section, trunk_layers
from forerun.rollout.served import split_experts
from forerun.rollout.sync import Named, check_complete, digest

# Left out by a trainer whose model has none, and zeros in the files: an export to another layout added them.
_BIAS = ".bias"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class ServedWeights:
    """The weights that an update has to bring.

    Attributes:
        shapes: name -> shape, as the checkpoint's files have them.
        dtypes: name -> dtype in the server.
        drafter: which of them are the MTP block's.
        optional: which of them an update may lack, as they are copies of others or zeros for ever.
        family: says how its files hold experts.
        drafter_digest: of the block as the files hold it, see `digest_of`; None where they hold none.
    """

    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, torch.dtype]
    drafter: frozenset[str]
    optional: frozenset[str]
    family: FamilyRecord
    drafter_digest: str | None

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
            if name in sent or name not in self.optional
        }
        check_complete(expected, stored, sorted(self.drafter - self.optional))
        return [(name, tensor.detach().to(self.dtypes[name])) for name, tensor in stored]

    def digest_of(self, stored: Iterable[Named]) -> str:
        """`rollout.sync.digest` of the drafter's tensors among these, without those that are copies or zeros."""
        own = self.drafter - self.optional
        return digest((name, tensor.to(self.dtypes[name])) for name, tensor in stored if name in own)

    def is_drafter(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor of an update is the drafter's, under the files' name or stacked."""
        return all(piece in self.drafter for piece, _ in split_experts([(name, tensor)], self.family, self.shapes))


def of_checkpoint(path: Path, dtype: torch.dtype | None) -> ServedWeights:
    """What the files say.

    Args:
        path: the checkpoint.
        dtype: the server's; None is the files'.

    Raises:
        UsageError: the directory is no readable checkpoint, or its weights are quantised.
    """
    reader = CheckpointReader(path)
    family = family_of(reader.config)
    layers = trunk_layers(reader.config)
    depth = present_depth(family, reader.config, reader.tensor_names)
    headers = {name: header for shard in reader.shards for name, header in reader.headers(shard).items()}
    for name, header in headers.items():
        if header.dtype not in _DTYPES:
            raise UsageError(
                f"{path} holds {name} in {header.dtype}: weights are sent to unquantised checkpoints alone"
            )
    drafter = frozenset(name for name in headers if family.owns(name, depth, layers))
    optional = {family.duplicate_name(copy, k, layers) for copy in family.duplicates for k in range(depth)}
    if text_section(reader.config).get("tie_word_embeddings", reader.config.get("tie_word_embeddings", False)):
        optional.add("lm_head.weight")
    optional |= {name for name in headers if name.endswith(_BIAS) and not reader.tensor(name).any()}
    served = ServedWeights(
        shapes={name: torch.Size(header.shape) for name, header in headers.items()},
        dtypes={name: dtype or _DTYPES[header.dtype] for name, header in headers.items()},
        drafter=drafter,
        optional=frozenset(optional) & headers.keys(),
        family=family,
        drafter_digest=None,
    )
    if not drafter:
        return served
    return replace(served, drafter_digest=served.digest_of((name, reader.tensor(name)) for name in drafter))
