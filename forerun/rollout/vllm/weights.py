"""A weight update in the terms of the checkpoint that vLLM serves: a plan, checked before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from forerun.errors import ForerunError
from forerun.models.weight_stream import Named, WeightStream
from forerun.rollout.served import ServedFiles, split_experts
from forerun.rollout.sync import check_complete


class Plan(NamedTuple):
    """An update that will be complete.

    Attributes:
        tensors: what goes to vLLM, in host memory, the trunk's first; each is made as it is read.
        biased: whether the trainer sends the biases that the served checkpoint has as zeros.
    """

    tensors: Iterator[Named]
    biased: bool


class ServedWeights(ServedFiles):
    """What a served checkpoint holds, and how an update becomes that."""

    def plan(self, given: WeightStream, dtypes: Mapping[str, torch.dtype] | None = None, drafts: bool = True) -> Plan:
        """Check an update as a whole by what is to come, before any of it is made.

        Args:
            given: under the trainer's names (`engines.protocol.TrainingEngine.named_weights`).
            dtypes: name in the files -> what a wider tensor is rounded to; see `sent_in`.
            drafts: whether there is a drafter; its weights are left out otherwise, though they must be given.

        Raises:
            ForerunError: a weight is missing, unknown, sent twice, or of another shape; the message names it.
        """
        pieces = list(split_experts(given.described, self.family, self.shapes))
        sent = {name for name, _ in pieces}
        lent = list(self._lent(pieces, sent))
        needed = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        drafters = [name for name in self.shapes if self.is_drafter(name)]
        check_complete(needed, lent, drafters)
        ours = self._lent(self._brought(split_experts(given, self.family, self.shapes), dtypes or {}), sent)
        return Plan(self._trunk_first(ours, len(lent) - len(drafters), drafts), bool(self.zero_biases & sent))

    def sent_in(self, dtype: torch.dtype, wider: Iterable[str]) -> dict[str, torch.dtype]:
        """Name -> `dtype` for the weights that the engine rounds to it, so that they can be rounded before they travel.

        Args:
            dtype: the model's.
            wider: the engine's names of parameters that it holds in a wider one (routers, say). Their last two parts
                are those of the files unless it fuses them; if it does, it is not known which these are, and none is
                rounded here.
        """
        kept, ends = {_end(name) for name in wider}, {_end(name) for name in self.shapes}
        return {name: dtype for name in self.shapes if _end(name) not in kept} if kept <= ends else {}

    def _lent(self, pieces: Iterable[Named], sent: Container[str]) -> Iterator[Named]:
        """The pieces, each with what the files hold besides: zeros beside their weight, and copies."""
        for name, tensor in pieces:
            yield name, tensor
            bias = name.removesuffix(".weight") + ".bias"
            if bias != name and bias in self.zero_biases and bias not in sent:
                yield bias, tensor.new_zeros(self.shapes[bias])
            yield from ((copy, tensor) for copy, of in self.copies.items() if of == name and copy not in sent)
            del tensor  # or it would be there while the next one is made

    def _brought(self, pieces: Iterable[Named], dtypes: Mapping[str, torch.dtype]) -> Iterator[Named]:
        """In host memory; rounded on the device that they come from."""
        for name, tensor in pieces:
            dtype = dtypes.get(name, tensor.dtype)
            yield name, tensor.detach().to("cpu", dtype if dtype.itemsize < tensor.dtype.itemsize else tensor.dtype)
            del tensor

    def _trunk_first(self, lent: Iterable[Named], trunk: int, drafts: bool) -> Iterator[Named]:
        """The drafter's wait, those that come before the last of the trunk's: copies of its embedding and LM head."""
        waiting: list[Named] = []
        for name, tensor in lent:
            if not self.is_drafter(name):
                trunk -= 1
                yield name, tensor
            elif drafts and trunk:
                waiting.append((name, tensor))
            elif drafts:
                yield name, tensor
            del tensor
        yield from waiting

    def drafter_layout(self, biased: bool) -> list[tuple[str, tuple[int, ...], list[tuple[str, tuple[int, ...]]]]]:
        """(name, shape, pieces) per weight of the block as the trainer holds it; pieces as (name, shape) in the files.

        Args:
            biased: whether the trainer has the biases that the checkpoint has as zeros.
        """
        stacked: dict[str, int] = {}  # name -> how many experts
        layout = []
        for name, shape in self.shapes.items():
            if not self.is_drafter(name) or name in self.copies or (name in self.zero_biases and not biased):
                continue
            if (expert := self._expert(name)) is not None:
                stacked[expert[0]] = max(stacked.get(expert[0], 0), expert[1] + 1)
            else:
                layout.append((name, shape, [(name, shape)]))
        for name, experts in stacked.items():
            names = self.family.piece_names(name, experts)
            assert names is not None
            if missing := [piece for parts in names for piece in parts if piece not in self.shapes]:
                raise ForerunError(f"the served checkpoint lacks {missing[0]}: restore it")
            rows, *rest = self.shapes[names[0][0]]
            pieces = [(piece, self.shapes[piece]) for parts in names for piece in parts]
            layout.append((name, (experts, rows * len(names[0]), *rest), pieces))
        return layout

    def _expert(self, name: str) -> tuple[str, int] | None:
        """(stacked name, expert) of an expert's part; None for any other weight."""
        for end, parts in self.family.pieces:
            for part in parts:
                start, _, rest = part.partition("{e}")
                if found := re.fullmatch(rf"(.*){re.escape(start)}(\d+){re.escape(rest)}", name):
                    return found[1] + end, int(found[2])
        return None


def _end(name: str) -> str:
    return ".".join(name.split(".")[-2:])
