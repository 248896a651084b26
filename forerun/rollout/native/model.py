"""The model runner: the engine's copy of a model, run over the engine's cache."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier, mtp_weight_names
from forerun.models.trunk import base_model
from forerun.rollout.native.cache import DecodeStep, KVShape, PrefillStep, Rotary, RowCache
from forerun.rollout.native.copying import ModelCopy
from forerun.rollout.native.layers import Head
from forerun.speculative.drafter import Drafter, History

Pieces = Sequence[tuple[int, int, int]]


class ModelRunner:
    """A causal LM and its MTP block.

    Args:
        model: the Hugging Face model; not kept.
        copy: its copy.
        draft_vocabulary: token ids to which drafting is restricted; None is all.

    Attributes:
        weights: see `ModelCopy`.
        drafter_names: which of them are the MTP block's.
        rewinds: whether a row can go back to an earlier length by forgetting what lies behind it. One with recurrent
            states cannot: `copy_row` then copies where the row stands now.
        shapes: of the cache's layers, as far as they have run.

    Raises:
        UsageError: the draft vocabulary is none.
    """

    def __init__(self, model: PreTrainedModel, copy: ModelCopy, draft_vocabulary: Tensor | None) -> None:
        self.config: Any = base_model(model).config
        self.dtype, self.device = copy.head.weight.dtype, copy.head.weight.device
        self.trunk, self.head, self.block = copy.trunk, copy.head, copy.block
        self.weights, self.table = copy.weights, copy.table
        self.drafter_names = tuple(mtp_weight_names(model).values()) if isinstance(model, MTPCarrier) else ()
        self.vocab_size = self.head.weight.shape[0]
        self.draft_vocabulary = _sorted_vocabulary(draft_vocabulary, self.vocab_size, self.device)
        self.draft_head = self._make_draft_head()
        self.drafter: Drafter | None = None
        if self.block is not None:
            self.drafter = Drafter(
                self.block, self.trunk.embed, self.draft_head, self._drafter_kwargs, self.draft_vocabulary
            )
        self.rewinds = not self.trunk.delta_nets
        self.shapes: Mapping[Hashable, KVShape] = {}
        self.cache: RowCache | None = None
        self._rotary: Rotary | None = None

    # Memory

    @property
    def bytes_per_token(self) -> int:
        """What a position of a row takes in the caches."""
        size = torch.finfo(self.dtype).bits // 8
        taken = sum(shape.heads * (shape.key_dim + shape.value_dim) * size for shape in self.shapes.values())
        if self.drafter is not None and self.drafter.layers > 1:
            taken += self.head.weight.shape[1] * size + 8
        return taken

    @property
    def bytes_per_row(self) -> int:
        """What a row takes besides, however long it is."""
        return sum(net.state_bytes(self.dtype) for net in self.trunk.delta_nets)

    def allocate(self, rows: int, capacity: int) -> None:
        """Make the caches, for `rows` sequences of up to `capacity` tokens each."""
        self.release()
        self.cache = RowCache(rows, capacity, self.dtype, self.device, self.shapes)
        for net in self.trunk.delta_nets:
            self.cache.states[net] = net.make_states(self.cache)
        self._rotary = self.trunk.make_rotary(capacity)
        if self.drafter is not None and self.drafter.layers > 1:
            size = self.head.weight.shape[1]
            self.drafter.history = History(rows, capacity, size, self.dtype, self.device)

    def resize(self, rows: int, capacity: int) -> None:
        """Give the caches another size and keep what the rows hold."""
        assert self.cache is not None
        self.cache.resize(rows, capacity)
        self._rotary = self.trunk.make_rotary(capacity)
        if self.drafter is not None and self.drafter.history is not None:
            self.drafter.history.resize(rows, capacity)

    def release(self) -> None:
        """Free the caches."""
        self.cache = None
        self._rotary = None
        if self.drafter is not None:
            self.drafter.history = None

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make row `target` stand where row `source` stands, `length` tokens in."""
        assert self.cache is not None
        self.cache.copy_row(source, target, length)
        if self.drafter is not None and self.drafter.history is not None:
            self.drafter.history.copy_row(source, target, length)

    def commit(self, kept: Sequence[int]) -> None:
        """After a `decode` of T tokens for rows 0..R-1: row r keeps its first kept[r] >= 1, the others never were."""
        assert self.cache is not None
        self.cache.commit(kept)

    def tune(self) -> None:
        """Choose how the products are computed; measures on first use."""
        self.table.prepare()

    # Computation

    def decode(self, tokens: Tensor, positions: Tensor, live: int, uniform: bool) -> Tensor:
        """tokens, positions long [R, T] at the end of rows 0..R-1 -> hiddens [R, T, d] that the LM head takes.

        To be followed by a `commit`.
        """
        assert self.cache is not None
        return self.trunk(tokens, DecodeStep(self.cache, self._rotary, positions, live, uniform))

    def prefill(self, tokens: Tensor, next_tokens: Tensor | None, pieces: Pieces) -> Tensor:
        """Pieces of prompts, tokens long [1, N] end to end -> hiddens [1, N, d].

        With `next_tokens` [1, N] the drafter's cache is fed, too; where the next token is not known yet any id will do,
        as that entry is written again by the first draft.
        """
        hidden_states = self.trunk(tokens, self._prefill_step(pieces))
        if next_tokens is not None and self.block is not None:
            self.feed(hidden_states, next_tokens, pieces)
        return hidden_states

    def feed(self, hidden_states: Tensor, next_tokens: Tensor, pieces: Pieces) -> None:
        """Feed the drafter's cache: hiddens [1, N, d] and the token after each, pieces as in `prefill`."""
        assert self.drafter is not None
        self.drafter.feed(hidden_states, next_tokens, pieces, lambda wider: {"step": self._prefill_step(wider)})

    def _prefill_step(self, pieces: Pieces) -> PrefillStep:
        assert self.cache is not None
        return PrefillStep(self.cache, self._rotary, pieces)

    def _drafter_kwargs(self, positions: Tensor, live: int) -> dict[str, Any]:
        assert self.cache is not None
        return {"step": DecodeStep(self.cache, self._rotary, positions, live, uniform=positions.shape[0] == 1)}

    # Weights

    def refresh(self) -> None:
        """After the weights changed: remake what was derived from them."""
        self.table.drop_packed()
        if self.draft_vocabulary is not None:
            self.draft_head.weight.copy_(self.head.weight[self.draft_vocabulary])
            if self.head.bias is not None and self.draft_head.bias is not None:
                self.draft_head.bias.copy_(self.head.bias[self.draft_vocabulary])

    def _make_draft_head(self) -> Head:
        if self.draft_vocabulary is None:
            return self.head
        bias = None if self.head.bias is None else self.head.bias[self.draft_vocabulary]
        return Head(self.head.weight[self.draft_vocabulary], bias, self.table, self.head.config)


def _sorted_vocabulary(vocabulary: Tensor | None, size: int, device: torch.device) -> Tensor | None:
    if vocabulary is None:
        return None
    words = torch.as_tensor(vocabulary, dtype=torch.long).unique()
    if len(words) == 0 or int(words[0]) < 0 or int(words[-1]) >= size:
        raise UsageError(f"the draft vocabulary must hold token ids from 0 to {size - 1}, and at least one")
    return words.to(device)
