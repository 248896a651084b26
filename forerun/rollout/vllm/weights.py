"""A weight update in the terms of the checkpoint that vLLM serves: a plan, checked before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.rollout.served import ServedFiles, split_experts
from forerun.rollout.sync import Named, check_complete


class Plan(NamedTuple):
    """An update that is complete: what goes to vLLM's trunk and what to its drafter, in the order of the layers.

    Attributes:
        biased: whether the trainer sent the biases that the served checkpoint has as zeros.
    """

    trunk: list[Named]
    drafter: list[Named]
    biased: bool


class ServedWeights(ServedFiles):
    """What a served checkpoint holds, and how an update becomes that."""

    def plan(self, given: Sequence[Named]) -> Plan:
        """Check an update as a whole.

        Args:
            given: under the trainer's names (`models.carrier.named_weights`). Nothing is copied.

        Raises:
            ForerunError: a weight is missing, unknown, sent twice, or of another shape; the message names it.
        """
        pieces = list(split_experts(given, self.family, self.shapes))
        sent = dict(pieces)
        biased = bool(self.zero_biases & sent.keys())
        lent = list(self._lent(pieces, sent))
        needed = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        drafters = [name for name in self.shapes if self.is_drafter(name)]
        check_complete(needed, lent, drafters)
        return Plan(
            [(name, tensor) for name, tensor in lent if not self.is_drafter(name)],
            [(name, tensor) for name, tensor in lent if self.is_drafter(name)],
            biased,
        )

    def _lent(self, pieces: Iterable[Named], sent: dict[str, Tensor]) -> Iterator[Named]:
        """The pieces, with what the files hold besides: zeros beside their weight, copies at the end."""
        for name, tensor in pieces:
            yield name, tensor
            bias = name.removesuffix(".weight") + ".bias"
            if bias != name and bias in self.zero_biases and bias not in sent:
                yield bias, tensor.new_zeros(self.shapes[bias])
        for name, of in self.copies.items():
            if name not in sent and of in sent:
                yield name, sent[of]

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
