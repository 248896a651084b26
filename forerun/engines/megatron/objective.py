"""Forerun's objective inside megatron-core's GPTModel: log-probabilities for the main loss, and each MTP depth's loss.

Megatron-core computes both in `_postprocess`, the last thing that a GPTModel does, and leaves to its caller what
Forerun's objective fixes: it rolls tokens over document boundaries of padded rows, divides each depth by a count of
this rank and micro-batch, scales through a class attribute, and isolates the trunk in some versions and not in others.
`MTPModel` replaces that one method. The layers, trunk and MTP block, are megatron-core's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from forerun.engines.megatron.context import ahead, gather_positions
from forerun.engines.megatron.microbatch import MicroBatch
from forerun.engines.megatron.model import Blueprint
from forerun.engines.megatron.vocabulary import VocabularyShard
from forerun.models.training import MTPOutput
from forerun.mtp.config import MTPConfig
from forerun.mtp.losses import LossSpec
from forerun.mtp.shift import DepthTargets, depth_targets
from forerun.mtp.stats import MTPStats


@dataclass(frozen=True)
class Objective:
    """What a forward pass is to compute.

    Attributes:
        mtp: how the depths are trained; None leaves them out.
        counts: N_k of the whole step; None divides by the micro-batch's own.
        temperature: divides the logits behind the log-probabilities; of both distributions in the soft losses.
        chunk_size: positions whose logits exist at once.
        main: whether log-probabilities are wanted.
        compare_with_trunk: also measure agreement with the trunk's choice.
    """

    mtp: MTPConfig | None
    counts: Sequence[int] | None
    temperature: float = 1.0
    chunk_size: int = 64
    main: bool = True
    compare_with_trunk: bool = False


@dataclass(frozen=True)
class Outcome:
    """What the last pipeline stage finds of one micro-batch, padding included.

    Attributes:
        log_probs, entropy: float32 [B, S], aligned to tokens, 0 where nothing is predicted; the same on all ranks that
            share the micro-batch. None where `Objective.main` is off.
        mtp: loss and sums over this context-parallel rank's positions.
    """

    log_probs: Tensor | None
    entropy: Tensor | None
    mtp: MTPOutput | None


class MTPModel(GPTModel):
    """A GPTModel chunk whose last stage returns an `Outcome`.

    `labels` of its forward carries (MicroBatch, Objective); megatron-core hands them on as they are.

    Attributes:
        blueprint: see `forerun.engines.megatron.model`, which sets it.
    """

    blueprint: Blueprint

    def _postprocess(
        self, hidden_states: Tensor, input_ids: Tensor, position_ids: Tensor, labels: Any, **passed: Any
    ) -> Any:
        if not self.post_process:
            return hidden_states
        micro, wanted = labels
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        weight = self.output_layer.weight if weight is None else weight
        mtp = None
        if wanted.mtp is not None:
            names = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset")
            layer_inputs = {name: passed[name] for name in names}
            mtp = self._mtp(hidden_states, weight, micro, wanted, input_ids, position_ids, layer_inputs)
        log_probs = entropy = None
        if wanted.main:
            log_probs, entropy = self._log_probs(hidden_states, weight, micro, wanted)
        return Outcome(log_probs, entropy, mtp)

    def _shard(self, weight: Tensor) -> VocabularyShard:
        return VocabularyShard(weight, self.blueprint.vocab_size, self.pg_collection.tp)

    def _positions_first(self, hidden_states: Tensor, shard: VocabularyShard) -> Tensor:
        """[S, B, d] as layers hand it on, a part of S under sequence parallelism -> [B, S, d], whole, for logits."""
        if self.config.sequence_parallel:
            whole = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True, group=self.pg_collection.tp
            )
        else:
            whole = shard.enter(hidden_states)
        return whole.transpose(0, 1)

    def _log_probs(
        self, hidden_states: Tensor, weight: Tensor, micro: MicroBatch, wanted: Objective
    ) -> tuple[Tensor, Tensor]:
        shard = self._shard(weight)
        target = _targets(micro, 0, None)
        valid, labels = micro.take(target.valid), micro.take(target.labels)
        rows = self._positions_first(hidden_states, shard)
        values, entropies = shard.log_probs(rows[valid], labels[valid], wanted.chunk_size, wanted.temperature)
        blank = torch.zeros(valid.shape, dtype=values.dtype, device=values.device)

        def aligned(found: Tensor) -> Tensor:
            # A position's value belongs to the token behind it; nothing is predicted at the last, so nothing wraps.
            return gather_positions(blank.masked_scatter(valid, found), self.pg_collection.cp).roll(1, dims=1)

        return aligned(values), aligned(entropies)

    def _mtp(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        micro: MicroBatch,
        wanted: Objective,
        input_ids: Tensor,
        position_ids: Tensor,
        layer_inputs: dict[str, Any],
    ) -> MTPOutput:
        """`forerun.models.training.mtp_forward` with megatron-core's layers and a vocabulary in parts."""
        config = wanted.mtp
        assert config is not None
        depths = int(self.config.mtp_num_layers)
        isolated = config.detach_encoder
        shard = self._shard(weight.detach() if isolated else weight)
        spec = LossSpec(config.loss, wanted.temperature)
        with_teacher = wanted.compare_with_trunk or spec.kind != "ce"
        trunk = self._positions_first(hidden_states.detach(), shard) if with_teacher else None
        # A leaf that wants a gradient, or a recomputed layer none of whose inputs does would give its weights none.
        hidden = hidden_states.detach().requires_grad_() if isolated else hidden_states
        stats = MTPStats.zeros(depths, hidden.device)
        chain: Tensor | None = None  # positions valid at every depth so far
        agreed: Tensor | None = None  # ... where each of them chose as the trunk does
        total = hidden_states.new_zeros((), dtype=torch.float32)
        for depth in range(1, depths + 1):
            target = _targets(micro, depth, config)
            ids = micro.take(target.input_ids)

            # Megatron-core's layer rolls the ids that it is given, and embeds what it gets: here, ours.
            def embedding(input_ids: Tensor, position_ids: Tensor, ids: Tensor = ids) -> Tensor:
                embedded = self.embedding(input_ids=ids, position_ids=position_ids)
                return embedded.detach() if isolated else embedded

            hidden = self.mtp.layers[depth - 1](
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=hidden,
                embedding=embedding,
                **layer_inputs,
            )[0]
            valid, labels = micro.take(target.valid), micro.take(target.labels)
            result = shard.depth_loss(
                self._positions_first(hidden, shard)[valid],
                labels[valid],
                spec,
                config.chunk_size,
                None if trunk is None else ahead(trunk, depth, self.pg_collection.cp)[valid],
                wanted.compare_with_trunk,
                () if isolated or not weight.requires_grad else (weight,),
            )
            own_count = valid.sum()
            count = int(own_count) if wanted.counts is None else wanted.counts[depth - 1]
            total = total + result.loss / max(count, 1)
            stats.add(depth, count=own_count, loss=result.loss, label_hits=result.label_hits)
            if result.agrees is not None:
                assert result.trunk_hits is not None and result.overlap is not None
                agrees = torch.zeros_like(valid).masked_scatter(valid, result.agrees)
                chain = valid if chain is None else chain & valid
                agreed = agrees if agreed is None else agreed & agrees
                stats.add(depth, teacher_count=own_count, trunk_hits=result.trunk_hits, overlap=result.overlap)
                stats.add(depth, chain_count=chain.sum(), chain_hits=(agreed & chain).sum())
        return MTPOutput(config.mtp_loss_scaling_factor / depths * total, stats)


def _targets(micro: MicroBatch, depth: int, config: MTPConfig | None) -> DepthTargets:
    """Of whole rows: every rank knows them, so context parallelism has nothing to exchange."""
    rows = micro.padded
    rule = "target" if config is None else config.mask_rule
    return depth_targets(rows.input_ids, rows.document_ids, rows.loss_mask, depth, rule)
