"""Forerun's objective inside megatron-core's GPTModel: log-probabilities for the main loss, and each MTP depth's loss.

Megatron-core computes both in `_postprocess`, the last thing that a GPTModel does, and leaves to its caller what
Forerun's objective fixes: it rolls tokens over document boundaries of padded rows, divides each depth by a count of
this rank and micro-batch, scales through a class attribute, and isolates the trunk in some versions and not in others.
`MTPModel` replaces that one method. The layers, trunk and MTP block, are megatron-core's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from forerun.engines.megatron.microbatch import MicroBatch
from forerun.engines.megatron.model import Blueprint
from forerun.engines.megatron.vocabulary import VocabularyShard
from forerun.models.training import MTPOutput, score_depths
from forerun.mtp.config import MaskRule, MTPConfig
from forerun.mtp.log_probs import chunked_log_probs
from forerun.mtp.shift import DepthTargets, depth_targets
from forerun.mtp.stats import MTPStats


@dataclass(frozen=True)
class Objective:
    """What a forward pass is to compute.

    Attributes:
        mtp: how the depths are trained; None leaves them out.
        counts: N_k of the whole step; None divides by the micro-batch's own.
        temperature: divides the logits behind the log-probabilities; of both distributions in the soft losses.
        chunk_size: positions whose logits exist at once; None: `mtp.losses.default_chunk_size`.
        main: whether log-probabilities are wanted.
        compare_with_trunk: also measure agreement with the trunk's choice.
    """

    mtp: MTPConfig | None
    counts: Sequence[int] | None
    temperature: float = 1.0
    chunk_size: int | None = None
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
        target = _targets(micro, 0)
        values, entropies = chunked_log_probs(
            self._positions_first(hidden_states, shard)[target.valid],
            target.labels[target.valid],
            shard.logits,
            wanted.chunk_size,
            wanted.temperature,
            shard,
        )
        blank = torch.zeros(target.valid.shape, dtype=values.dtype, device=values.device)

        def aligned(found: Tensor) -> Tensor:
            # A position's value belongs to the token behind it; nothing is predicted at the last, so nothing wraps.
            return micro.rows.whole(blank.masked_scatter(target.valid, found)).roll(1, dims=1)

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

        def run() -> Iterator[tuple[DepthTargets, Tensor]]:
            # A leaf that wants a gradient, or a recomputed layer none of whose inputs does would give its weights none.
            hidden = hidden_states.detach().requires_grad_() if isolated else hidden_states
            for depth, layer in enumerate(self.mtp.layers, start=1):
                target = _targets(micro, depth, config.mask_rule)

                # Megatron-core's layer rolls the ids that it is given, and embeds what it gets: here, ours.
                def embedding(input_ids: Tensor, position_ids: Tensor, ids: Tensor = target.input_ids) -> Tensor:
                    embedded = self.embedding(input_ids=ids, position_ids=position_ids)
                    return embedded.detach() if isolated else embedded

                hidden = layer(
                    input_ids=input_ids,
                    position_ids=position_ids,
                    hidden_states=hidden,
                    embedding=embedding,
                    **layer_inputs,
                )[0]
                yield target, self._positions_first(hidden, shard)

        with_teacher = wanted.compare_with_trunk or config.loss != "ce"
        stats = MTPStats.zeros(depths, hidden_states.device)
        total = score_depths(
            run(),
            config,
            shard.logits,
            stats,
            trunk_hidden=self._positions_first(hidden_states.detach(), shard) if with_teacher else None,
            counts=wanted.counts,
            temperature=wanted.temperature,
            compare_with_trunk=wanted.compare_with_trunk,
            projection_parameters=() if isolated or not weight.requires_grad else (weight,),
            look_ahead=micro.rows.look_ahead,
            vocabulary=shard,
        )
        return MTPOutput(config.mtp_loss_scaling_factor / depths * total, stats)


def _targets(micro: MicroBatch, depth: int, rule: MaskRule = "target") -> DepthTargets:
    """What this rank's positions read and predict. Every rank knows the whole rows, so there is nothing to exchange."""
    rows = micro.padded
    whole = depth_targets(rows.input_ids, rows.document_ids, rows.loss_mask, depth, rule)
    return DepthTargets(*(micro.rows.take(x) for x in (whole.input_ids, whole.labels, whole.valid)))
