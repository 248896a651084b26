"""The MTP loss of a batch, given the trunk's hidden states: the one entry that every trainer's path goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.models.trunk import decoder_inputs, embed, project
from forerun.mtp.config import MTPConfig
from forerun.mtp.losses import WHOLE, LossSpec, Vocabulary, fused_loss
from forerun.mtp.shift import DepthTargets, LookAhead, depth_targets, look_ahead_in_rows
from forerun.mtp.stats import MTPStats

if TYPE_CHECKING:
    from forerun.models.carrier import MTPCarrier


@dataclass
class MTPOutput:
    """Attributes:
    loss: 0-dim, mtp_loss_scaling_factor / D times the sum over depths of (loss sum / N_k). Differentiable.
    stats: sums per depth.
    """

    loss: Tensor
    stats: MTPStats


def mtp_forward(
    model: MTPCarrier,
    hidden_states: Tensor,
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    document_ids: Tensor,
    loss_mask: Tensor,
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    counts: Sequence[float | Tensor] | None = None,
    temperature: float = 1.0,
    compare_with_trunk: bool = False,
    vocabulary: Tensor | None = None,
    look_ahead: LookAhead = look_ahead_in_rows,
) -> MTPOutput:
    """Run the MTP block over the trunk's hiddens and score every depth.

    Isolation follows `model.mtp_config.detach_encoder`: with it, trunk hidden, token embedding and LM head are detached
    and only the block's own parameters learn; depth k still reaches the blocks before it.

    Args:
        hidden_states: [B, S, d], what the trunk hands its LM head.
        input_ids, position_ids, document_ids, loss_mask: as in `forerun.data.batch.Batch`, all [B, S].
        labels: long [B, S], what to predict in each token's place; the tokens themselves if None.
        attention_mask: 2D padding mask or 4D mask, where the trunk was given one.
        counts: N_k per depth of the whole global batch; None divides by this call's own counts.
        temperature: of the trunk's and the drafter's distributions in the soft losses and the expected acceptance.
        compare_with_trunk: also measure agreement with the trunk (always measured by the soft losses).
        vocabulary: long [v]; restrict the soft losses to these tokens, both distributions renormalised. Cheaper, for a
            drafter that drafts from them alone. Agreement is then counted among them too.
        look_ahead: what follows a position, where the rows are parts of longer ones (context parallelism); then with
            the 4D mask of these, and `counts`.

    Raises:
        ValueError: `vocabulary` with the loss "ce", whose labels may lie outside it.
    """
    if vocabulary is not None and model.mtp_config.loss == "ce":
        raise ValueError("a restricted vocabulary needs loss=soft_ce or tv")
    config, block = model.mtp_config, model.mtp
    isolated = config.detach_encoder
    trunk_hidden = hidden_states.detach() if isolated else hidden_states
    head = model.get_output_embeddings()
    projection_parameters = () if isolated else tuple(p for p in head.parameters() if p.requires_grad)
    targets = [
        depth_targets(input_ids, document_ids, loss_mask, depth, config.mask_rule, labels, look_ahead=look_ahead)
        for depth in range(1, block.num_depths + 1)
    ]

    def embeds(depth: int) -> Tensor:
        embedded = embed(model, targets[depth - 1].input_ids)
        return embedded.detach() if isolated else embedded

    outputs = block(trunk_hidden, embeds, **decoder_inputs(model, trunk_hidden, position_ids, attention_mask))

    if vocabulary is not None:
        index_of = torch.full((model.config.get_text_config().vocab_size,), -1, device=input_ids.device)
        index_of[vocabulary] = torch.arange(len(vocabulary), device=input_ids.device)
        targets = [replace(target, labels=index_of[target.labels * target.valid]) for target in targets]
    stats = MTPStats.zeros(block.num_depths, hidden_states.device)
    total = score_depths(
        zip(targets, outputs, strict=True),
        config,
        lambda h: project(model, h, vocabulary),
        stats,
        trunk_hidden=hidden_states,
        counts=counts,
        temperature=temperature,
        compare_with_trunk=compare_with_trunk,
        projection_parameters=projection_parameters,
        look_ahead=look_ahead,
    )
    return MTPOutput(config.mtp_loss_scaling_factor / block.num_depths * total, stats)


def score_depths(
    depths: Iterable[tuple[DepthTargets, Tensor]],
    config: MTPConfig,
    to_logits: Callable[[Tensor], Tensor],
    stats: MTPStats,
    *,
    trunk_hidden: Tensor | None,
    counts: Sequence[float | Tensor] | None,
    temperature: float,
    compare_with_trunk: bool,
    projection_parameters: Sequence[Tensor],
    look_ahead: LookAhead,
    vocabulary: Vocabulary = WHOLE,
) -> Tensor:
    """Sum over the depths of (loss sum / N_k), 0-dim, differentiable.

    Args:
        depths: what each predicts, and its hiddens [B, S, d] for the LM head; taken one by one.
        to_logits: the LM head, hiddens [n, d] -> logits [n, V].
        stats: gets the depths' sums added.
        trunk_hidden: [B, S, d], which the soft losses and the comparison with the trunk need.
        counts, temperature, compare_with_trunk, look_ahead: as in `mtp_forward`.
        projection_parameters, vocabulary: as in `forerun.mtp.losses.fused_loss`.
    """
    with_teacher = compare_with_trunk or config.loss != "ce"
    spec = LossSpec(config.loss, temperature, config.loss_top_k)
    chain = agreed = torch.ones((), dtype=torch.bool, device=stats.sums.device)
    losses = []
    for depth, (target, output) in enumerate(depths, start=1):
        teacher = None
        if with_teacher:
            assert trunk_hidden is not None
            teacher = _ahead(trunk_hidden, target, depth, look_ahead)
        result = fused_loss(
            output[target.valid],
            target.labels[target.valid],
            to_logits,
            spec,
            chunk_size=config.chunk_size,
            teacher_hidden=teacher,
            projection_parameters=projection_parameters,
            compare_with_trunk=compare_with_trunk,
            vocabulary=vocabulary,
        )
        own_count = target.valid.sum()
        count = own_count.clamp(min=1) if counts is None else torch.as_tensor(counts[depth - 1]).clamp(min=1)
        losses.append(result.loss / count.to(result.loss.device))
        stats.add(depth, count=own_count, loss=result.loss, label_hits=result.label_hits)
        if result.agrees is not None:
            assert result.trunk_hits is not None and result.overlap is not None
            chain = chain & target.valid  # valid at every depth so far
            # ... and every depth so far chose as the trunk does
            agreed = agreed & torch.zeros_like(target.valid).masked_scatter(target.valid, result.agrees)
            stats.add(depth, teacher_count=own_count, trunk_hits=result.trunk_hits, overlap=result.overlap)
            stats.add(depth, chain_count=chain.sum(), chain_hits=(agreed & chain).sum())
    return torch.stack(losses).sum()


def _ahead(hidden_states: Tensor, target: DepthTargets, depth: int, look_ahead: LookAhead) -> Tensor:
    """h⁰_{i+k} at the valid positions, [N, d]: the trunk's hiddens that predict the same tokens as depth k."""
    if look_ahead is not look_ahead_in_rows:
        return look_ahead(hidden_states.detach().transpose(1, 2), depth)(depth).transpose(1, 2)[target.valid]
    rows, positions = target.valid.nonzero(as_tuple=True)
    return hidden_states.detach()[rows, positions + depth]
