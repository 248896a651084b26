"""Gated delta nets (Yang et al. 2024, "Gated Delta Networks") with a state per row that verification can roll back.

Two states stand for all that such a layer has read: the last inputs of its short convolution, and a matrix per head.
Neither can be shortened afterwards, so a decoding step leaves both as they are and keeps what it read: the inputs of
the convolution, and for each token key, value, decay and strength of the matrix's update. `commit` then reads again as
many tokens as were accepted. That is exact: a token with decay 1 and strength 0 does not touch the matrix, so all rows
read the same number of tokens, and the projections, which are most of the work, are not repeated. (Keeping the matrix
after each of T tokens would take T times the memory, which is already the largest part of such a row.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from forerun.rollout.native.attention import current_step
from forerun.rollout.native.cache import DecodeStep, PrefillStep, RowCache
from forerun.speculative.drafter import resized

# Up to so many tokens are read one after the other; longer pieces in the chunks of 64 that the chunked rule pads to.
_FEW_TOKENS = 16


class Reads(NamedTuple):
    """What T tokens of R rows do to the states.

    Attributes:
        inputs: [R, C, kernel - 1 + T], the convolution's, with those of the state in front.
        key, value: [R, T, heads, dim].
        g: [R, T, heads], logarithm of the decay.
        beta: [R, T, heads], strength of the update.
        memory: float32 [R, heads, key_dim, value_dim], the matrix after all T tokens.
    """

    inputs: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor
    memory: Tensor


class DeltaStates:
    """A layer's states, by row.

    Attributes:
        inputs: [rows, C, kernel - 1], the convolution's last inputs.
        memory: float32 [rows, heads, key_dim, value_dim].
        reads: of the last decoding step, until it is committed.
    """

    def __init__(self, inputs: Tensor, memory: Tensor) -> None:
        self.inputs = inputs
        self.memory = memory
        self.reads: Reads | None = None

    def copy_row(self, source: int, target: int) -> None:
        self.inputs[target] = self.inputs[source]
        self.memory[target] = self.memory[source]

    def resize(self, rows: int) -> None:
        self.inputs = resized(self.inputs, rows)
        self.memory = resized(self.memory, rows)

    def commit(self, kept: Sequence[int]) -> None:
        """Read the first kept[r] tokens of the last step for good."""
        if self.reads is None:
            return
        inputs, key, value, g, beta, memory = self.reads
        rows, tokens = key.shape[:2]
        count = torch.tensor(kept, device=key.device)[:, None]
        width = self.inputs.shape[-1]
        at = count + torch.arange(width, device=key.device)
        self.inputs[:rows] = inputs.gather(2, at[:, None].expand(-1, inputs.shape[1], -1))
        if min(kept) < tokens:
            rejected = torch.arange(tokens, device=key.device) >= count
            _, memory = torch_recurrent_gated_delta_rule(
                key,
                key,
                value,
                g=g.masked_fill(rejected[..., None], 0),
                beta=beta.masked_fill(rejected[..., None], 0),
                initial_state=self.memory[:rows],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
        self.memory[:rows] = memory
        self.reads = None


class GatedDeltaNet(nn.Module):
    """transformers' gated delta net of Qwen3-Next or Qwen3.5, over the rows of a cache.

    Args:
        net: the module, whose projections, convolution and norm are used.
    """

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.activation = ACT2FN[net.activation]

    @staticmethod
    def is_one(module: nn.Module) -> bool:
        """Whether a module is of this kind, by its parts."""
        parts = ("conv1d", "A_log", "dt_bias", "norm", "out_proj", "head_k_dim", "head_v_dim", "num_v_heads")
        projections = ("in_proj_qkvz", "in_proj_ba"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return all(hasattr(module, part) for part in parts) and any(
            all(hasattr(module, part) for part in names) for names in projections
        )

    def make_states(self, cache: RowCache) -> DeltaStates:
        """States of rows that have read nothing."""
        net = self.net
        channels, _, kernel = net.conv1d.weight.shape
        return DeltaStates(
            torch.zeros(cache.rows, channels, kernel - 1, dtype=cache.dtype, device=cache.device),
            torch.zeros(cache.rows, net.num_v_heads, net.head_k_dim, net.head_v_dim, device=cache.device),
        )

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Of one row; twice the matrices, as a decoding step holds the old and the new ones."""
        net = self.net
        channels, _, kernel = net.conv1d.weight.shape
        inputs = channels * (kernel - 1) * torch.finfo(dtype).bits // 8
        return inputs + 2 * 4 * net.num_v_heads * net.head_k_dim * net.head_v_dim

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """[R, T, d] -> [R, T, d], over the current step."""
        net = self.net
        step = current_step()
        states = step.cache.states[self]
        assert isinstance(states, DeltaStates)
        mixed, z, b, a = self._project(hidden_states)
        beta = b.sigmoid()
        g = -net.A_log.float().exp() * F.softplus(a.float() + net.dt_bias)
        if isinstance(step, PrefillStep):
            outs, at = [], 0
            for row, start, count in step.pieces:
                piece = slice(at, at + count)
                outs.append(self._read_piece(states, row, start, mixed[:, piece], g[:, piece], beta[:, piece]))
                at += count
            out = torch.cat(outs, dim=1)
        else:
            assert isinstance(step, DecodeStep)
            rows = slice(0, step.rows)
            out, states.reads = self._read(mixed, g, beta, states.inputs[rows], states.memory[rows])
        out = net.norm(out.reshape(-1, net.head_v_dim), z.reshape(-1, net.head_v_dim))
        return net.out_proj(out.reshape(*hidden_states.shape[:2], -1))

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The convolution's inputs [R, T, C], the output's gate z, and what strength and decay are made of."""
        net = self.net
        if not hasattr(net, "in_proj_qkvz"):
            return tuple(p(hidden_states) for p in (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a))
        query, key, value, z, b, a = net.fix_query_key_value_ordering(
            net.in_proj_qkvz(hidden_states), net.in_proj_ba(hidden_states)
        )
        return torch.cat([x.flatten(2) for x in (query, key, value)], dim=-1), z, b, a

    def _read_piece(self, states: DeltaStates, row: int, start: int, mixed: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """A piece of a prompt, read for good. One that starts its row begins with nothing read."""
        inputs, memory = states.inputs[row : row + 1], states.memory[row : row + 1]
        if start == 0:
            inputs.zero_()
            memory.zero_()
        out, reads = self._read(mixed, g, beta, inputs, memory)
        inputs.copy_(reads.inputs[..., -inputs.shape[-1] :])
        memory.copy_(reads.memory)
        return out

    def _read(self, mixed: Tensor, g: Tensor, beta: Tensor, inputs: Tensor, memory: Tensor) -> tuple[Tensor, Reads]:
        """T tokens from the states `inputs` and `memory` on; the states stay as they are.

        Returns:
            The output [R, T, heads, value_dim], and what was read.
        """
        net = self.net
        inputs = torch.cat([inputs, mixed.transpose(1, 2)], dim=-1)
        convolved = F.conv1d(inputs, net.conv1d.weight, net.conv1d.bias, groups=inputs.shape[1])
        query, key, value = (
            self.activation(convolved).transpose(1, 2).split([net.key_dim, net.key_dim, net.value_dim], -1)
        )
        key, query = (x.unflatten(-1, (-1, net.head_k_dim)) for x in (key, query))
        value = value.unflatten(-1, (-1, net.head_v_dim))
        rule = torch_recurrent_gated_delta_rule if mixed.shape[1] <= _FEW_TOKENS else torch_chunk_gated_delta_rule
        out, memory = rule(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=memory,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out, Reads(inputs, key, value, g, beta, memory)
