"""The MTP block: one layer per depth over the trunk's hidden and the embedding of a token already known.

    x  = W_k · concat( norm(h^{k-1}_i), norm(E[t_{i+k}]) )      halves in the family's order
    h^k = norm_out( DecoderLayer_k(x) )                         predicts t_{i+k+1} through the trunk's LM head

(DeepSeek-V3 technical report, section 2.2, with the depth-wise final norm that published checkpoints carry.) The
decoder layer and the norms come from outside, so a block has exactly the trunk's kind of layer; the embedding and the
LM head are the trunk's and are never parameters of the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

ConcatOrder = Literal["hidden_embed", "embed_hidden"]
Recurrence = Literal["post_norm", "pre_norm"]


class MTPLayer(nn.Module):
    """One depth: two norms, the projection 2d -> d, a decoder layer of the trunk's kind, an optional final norm.

    Args:
        hidden_size: d.
        decoder: called as `decoder(x, **decoder_kwargs)`; returns a tensor of x's shape, or a tuple starting with one.
        make_norm: makes a norm over d.
        concat_order: which half of the projection's input is the hidden.
        final_norm: whether the family has a norm after the decoder layer.
    """

    def __init__(
        self,
        hidden_size: int,
        decoder: nn.Module,
        make_norm: Callable[[], nn.Module],
        concat_order: ConcatOrder = "hidden_embed",
        final_norm: bool = True,
    ) -> None:
        super().__init__()
        self.concat_order: ConcatOrder = concat_order
        self.hidden_norm = make_norm()
        self.embed_norm = make_norm()
        self.proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.decoder = decoder
        self.final_norm = make_norm() if final_norm else nn.Identity()

    def combine(self, hidden_states: Tensor, inputs_embeds: Tensor) -> Tensor:
        """The decoder layer's input. Both arguments and the result: [..., d]."""
        halves = (self.hidden_norm(hidden_states), self.embed_norm(inputs_embeds))
        if self.concat_order == "embed_hidden":
            halves = halves[::-1]
        return self.proj(torch.cat(halves, dim=-1))

    def forward(self, hidden_states: Tensor, inputs_embeds: Tensor, **decoder_kwargs: Any) -> tuple[Tensor, Tensor]:
        """h^{k-1} and E[t_{i+k}], both [B, S, d] -> (h^k after the final norm, h^k before it)."""
        out = self.decoder(self.combine(hidden_states, inputs_embeds), **decoder_kwargs)
        pre_norm = out[0] if isinstance(out, tuple) else out
        return self.final_norm(pre_norm), pre_norm


class MTPBlock(nn.Module):
    """The depths 1..D: a layer each, or one layer repeated.

    Args:
        layers: D layers, or a single one that every depth repeats.
        num_depths: D.
        recurrence: whether the next depth takes the hidden after the final norm or before it.
        undo_norm: turns the trunk's hidden, as its LM head takes it, into what the first depth takes, where that is
            the hidden before the trunk's final norm. None: the first depth takes it as it is.
    """

    def __init__(
        self,
        layers: list[MTPLayer],
        num_depths: int,
        recurrence: Recurrence = "post_norm",
        undo_norm: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if len(layers) not in (1, num_depths):
            raise ValueError(
                f"{len(layers)} layers cannot serve {num_depths} depths: give one per depth, or one to repeat"
            )
        self.layers = nn.ModuleList(layers)
        self.num_depths = num_depths
        self.recurrence: Recurrence = recurrence
        self.undo_norm = undo_norm

    def layer(self, depth: int) -> MTPLayer:
        """The layer that runs at a depth (from 1)."""
        found = self.layers[min(depth, len(self.layers)) - 1]
        assert isinstance(found, MTPLayer)
        return found

    def enter(self, hidden_states: Tensor) -> Tensor:
        """What depth 1 takes of the trunk's hidden, as the LM head takes it. [..., d] both."""
        return hidden_states if self.undo_norm is None else self.undo_norm(hidden_states)

    def step(
        self, depth: int, hidden_states: Tensor, inputs_embeds: Tensor, **decoder_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """One depth (from 1). Returns (the hidden for the LM head, the hidden for the next depth), both [B, S, d].

        `hidden_states` are the trunk's at depth 1, as its LM head takes them; later those that the depth before
        returned. A depth past the last layer runs that one again, so a drafter chains further than it was trained.
        """
        layer = self.layer(depth)
        if depth == 1:
            hidden_states = self.enter(hidden_states)
        post_norm, pre_norm = layer(hidden_states, inputs_embeds, **decoder_kwargs)
        return post_norm, post_norm if self.recurrence == "post_norm" else pre_norm

    def forward(self, hidden_states: Tensor, embeds: Callable[[int], Tensor], **decoder_kwargs: Any) -> list[Tensor]:
        """All depths. `embeds(k)` gives E[t_{i+k}], [B, S, d]. Returns h^1..h^D for the LM head, each [B, S, d]."""
        outputs = []
        for depth in range(1, self.num_depths + 1):
            for_head, hidden_states = self.step(depth, hidden_states, embeds(depth), **decoder_kwargs)
            outputs.append(for_head)
        return outputs
