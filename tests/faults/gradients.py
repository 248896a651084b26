"""Faults in what the loss is divided by and whom it trains (kinds 6-11)."""

from __future__ import annotations

from tests.faults.mutation import Mutation

SHIFT = "tests/mtp/test_shift.py"
STATS = "tests/mtp/test_stats.py"
GRAFT = "tests/mtp/test_graft.py"
BLOCK = "tests/mtp/test_block.py"
TRAINING = "tests/models/test_training.py"
ARGUMENTS = "tests/models/test_trainer_arguments.py"
COUNTS = "tests/engines/test_counts.py"
ENGINE = "tests/engines/test_torch_engine.py"
OBJECTIVE_TEST = "tests/trainers/test_policy_objective.py"
LOOP = f"{SHIFT}::test_targets_equal_a_loop_over_documents"
DEFINITION = f"{TRAINING}::test_packed_documents_equal_the_definition[2-True]"
ISOLATION = f"{TRAINING}::test_heads_isolation_leaves_every_trunk_gradient_bit_identical"
SAME_PATHS = f"{TRAINING}::test_every_path_gives_the_same_block_gradients"

_NORMALISATION = [
    Mutation(
        6,
        "mean-of-each-micro-batch",
        "Every micro-batch divides by its own count: short ones weigh too much.",
        "forerun.engines.torch_engine",
        "hidden_states, rows, counts, temperature=temperature)",
        "hidden_states, rows, None, temperature=temperature)",
        (f"{ENGINE}::test_any_split_has_the_gradient_of_the_whole[ce-True-True]",),
    ),
    Mutation(
        6,
        "counts-ignored",
        "The counts of the whole step are handed down and not used.",
        "forerun.models.training",
        "count = own_count.clamp(min=1) if counts is None else torch.as_tensor(counts[depth - 1]).clamp(min=1)",
        "count = own_count.clamp(min=1)",
        (f"{TRAINING}::test_any_split_into_micro_batches_gives_the_gradient_of_the_whole[target]",),
    ),
    Mutation(
        6,
        "one-count-for-all-depths",
        "Every depth divides by the count of the first.",
        "forerun.models.training",
        "torch.as_tensor(counts[depth - 1])",
        "torch.as_tensor(counts[0])",
        (f"{TRAINING}::test_any_split_into_micro_batches_gives_the_gradient_of_the_whole[target]",),
    ),
    Mutation(
        6,
        "trainers-count-ignored",
        "Trainer hands num_items_in_batch down; the main loss divides by it, the MTP loss by its own count.",
        "forerun.models.carrier",
        "counts=None if items is None else [items] * model.mtp.num_depths,",
        "counts=None,",
        (f"{TRAINING}::test_trainers_count_of_items_divides_every_depth",),
    ),
    Mutation(
        6,
        "accumulation-not-divided",
        "With gradient accumulation and no count of the whole, the MTP loss grows with the number of micro-batches.",
        "forerun.models.carrier",
        "loss = output.loss if items is not None else output.loss / model.mtp_accumulation_steps",
        "loss = output.loss",
        (f"{ARGUMENTS}::test_accumulation_steps_divide_where_no_count_is_handed_down",),
    ),
    Mutation(
        6,
        "ranks-not-counted",
        "The trainer multiplies its loss by the ranks that are averaged; the MTP loss is left behind.",
        "forerun.trainers.hf_callback",
        "float(args.world_size if args.average_tokens_across_devices else 1)",
        "1.0",
        (f"{ARGUMENTS}::test_ranks_with_uneven_counts_give_the_gradient_of_the_whole[True]",),
    ),
    Mutation(
        6,
        "counts-of-one-rank",
        "Data-parallel ranks divide by their own counts and sum their gradients.",
        "forerun.mtp.stats",
        "    dist.all_reduce(total, group=group)\n",
        "",
        (f"{STATS}::test_reducing_over_ranks",),
    ),
    Mutation(
        6,
        "figures-of-one-rank",
        "The logged figures are those of rank 0.",
        "forerun.mtp.stats",
        "        dist.all_reduce(sums, group=group)\n",
        "",
        (f"{STATS}::test_reducing_over_ranks",),
    ),
    Mutation(
        6,
        "mean-of-means",
        "Figures of micro-batches are averaged, whatever their counts.",
        "forerun.mtp.stats",
        "return MTPStats(self.sums + other.sums.to(self.sums.device))",
        "other_sums = other.sums.to(self.sums.device)\n"
        "        scale = self.sums[:, :1].clamp(min=1) / other_sums[:, :1].clamp(min=1)\n"
        "        return MTPStats(self.sums + other_sums * scale)",
        (f"{ENGINE}::test_any_split_has_the_gradient_of_the_whole[ce-True-True]",),
    ),
    Mutation(
        6,
        "main-loss-per-micro-batch",
        "The policy loss of each micro-batch is its own mean.",
        "forerun.trainers.policy_objective",
        "            self.counts,\n",
        "            count_targets(mask, document_ids),\n",
        (f"{OBJECTIVE_TEST}::test_the_step_s_loss_is_the_mean_that_was_asked_for[token-mean-1]",),
    ),
    Mutation(
        6,
        "empty-micro-batch-divides-by-zero",
        "A micro-batch without a target turns the loss into NaN.",
        "forerun.models.training",
        "count = own_count.clamp(min=1) if counts is None else",
        "count = own_count if counts is None else",
        ("tests/models/test_loss_scale.py::test_a_micro_batch_without_a_target_adds_nothing",),
    ),
    Mutation(
        7,
        "mtp-by-sequence",
        "N_k counts sequences with a target, not targets.",
        "forerun.mtp.shift",
        "look_ahead=look_ahead).valid.sum())",
        "look_ahead=look_ahead).valid.any(dim=1).sum())",
        (LOOP, f"{TRAINING}::test_any_split_into_micro_batches_gives_the_gradient_of_the_whole[target]"),
    ),
    Mutation(
        7,
        "main-loss-by-token",
        "A sequence mean was asked for and every token weighs the same.",
        "forerun.algorithms.aggregation",
        'if mode == "token-mean":',
        'if mode.startswith(("token-mean", "seq-mean-token-mean")):',
        (f"{OBJECTIVE_TEST}::test_the_step_s_loss_is_the_mean_that_was_asked_for[seq-mean-token-mean-1]",),
    ),
    Mutation(
        7,
        "a-packed-row-is-one-sequence",
        "The sequence mean takes a packed row for one sequence.",
        "forerun.algorithms.sequences",
        "starts[:, 1:] = (document_ids[:, 1:] != document_ids[:, :-1]).long()",
        "starts[:, 1:] = 0",
        (f"{OBJECTIVE_TEST}::test_the_step_s_loss_is_the_mean_that_was_asked_for[seq-mean-token-mean-4]",),
    ),
    Mutation(
        7,
        "mtp-takes-the-main-loss-s-counts",
        "The engine divides every depth by the main loss's targets.",
        "forerun.engines.torch_engine",
        "counts = self._depth_counts(batches)",
        "counts = self._depth_counts(batches) and [sum(b.num_targets for b in batches)] * self.model.mtp.num_depths",
        (f"{COUNTS}::test_each_depth_is_the_mean_over_the_positions_counted_by_hand[1-target]",),
    ),
]

_GRADIENTS = [
    Mutation(
        8,
        "hidden-not-detached",
        "detach_encoder=True, but the trunk's hidden carries the MTP loss's gradient.",
        "forerun.models.training",
        "trunk_hidden = hidden_states.detach() if isolated else hidden_states",
        "trunk_hidden = hidden_states",
        (
            f"{ISOLATION}[True-ce-1-train_by_forward]",
            f"{ISOLATION}[True-ce-1-train_by_logits]",
            f"{ISOLATION}[True-ce-1-train_with_recompute]",
            f"{ISOLATION}[True-ce-1-train_by_hidden]",
        ),
    ),
    Mutation(
        8,
        "embedding-not-detached",
        "detach_encoder=True, but the token embedding learns from the MTP loss.",
        "forerun.models.training",
        "return embedded.detach() if isolated else embedded",
        "return embedded",
        (
            f"{ISOLATION}[False-ce-1-train_by_forward]",
            f"{ISOLATION}[False-ce-1-train_with_recompute]",
            f"{ISOLATION}[False-ce-1-train_by_hidden]",
        ),
    ),
    Mutation(
        8,
        "deeper-embeddings-not-detached",
        "Only depth 1's embedding is detached.",
        "forerun.models.training",
        "return embedded.detach() if isolated else embedded",
        "return embedded.detach() if isolated and depth == 1 else embedded",
        (f"{ISOLATION}[True-ce-2-train_by_forward]",),
    ),
    Mutation(
        8,
        "head-not-detached",
        "detach_encoder=True, but the LM head learns from the MTP loss.",
        "forerun.models.training",
        "projection_parameters = () if isolated else tuple(",
        "projection_parameters = tuple(",
        (
            f"{ISOLATION}[False-ce-1-train_by_forward]",
            f"{ISOLATION}[False-tv-1-train_by_logits]",
            f"{ENGINE}::test_heads_isolation_leaves_the_trunk_bit_identical[True]",
        ),
    ),
    Mutation(
        8,
        "decoder-layer-shared-with-the-trunk",
        "The block's decoder layer is the trunk's last one itself, so its loss trains the trunk.",
        "forerun.models.layers",
        "made = copy.deepcopy(layer, {id(config): config})",
        "made = layer",
        (f"{ISOLATION}[True-ce-1-train_by_forward]",),
    ),
    Mutation(
        8,
        "norms-shared-with-the-trunk",
        "The block's norms are the trunk's final norm itself.",
        "forerun.models.attach",
        "made = copy.deepcopy(norm)",
        "made = norm",
        (f"{ISOLATION}[True-ce-1-train_by_forward]",),
    ),
    Mutation(
        8,
        "one-clip-for-both",
        "Gradients are clipped by their total norm: a large MTP gradient shrinks the trunk's update.",
        "forerun.engines.torch_engine",
        "clip_gradients(list(parameters.values()), max_norm)",
        "clip_gradients(list(self.groups.named().values()), max_norm)",
        (f"{ENGINE}::test_heads_isolation_leaves_the_trunk_bit_identical[False]",),
    ),
    Mutation(
        8,
        "frozen-trunk-is-trained",
        "train_trunk=false, but a joint MTP loss trains embedding and LM head.",
        "forerun.engines.optimizer",
        "wanted = train_mtp if is_head else train_trunk",
        "wanted = train_mtp",
        ("tests/engines/test_frozen_trunk.py::test_a_frozen_trunk_stays_as_it_is_even_in_joint_training",),
    ),
    Mutation(
        8,
        "joint-training-is-isolated",
        "detach_encoder=False is not heard: the trunk never learns from the MTP loss.",
        "forerun.models.training",
        "isolated = config.detach_encoder",
        "isolated = True",
        (f"{TRAINING}::test_joint_training_reaches_trunk_embedding_and_head[train_by_forward]",),
    ),
    Mutation(
        9,
        "detach-between-depths",
        "The hidden is detached before it is handed to the next depth.",
        "forerun.mtp.block",
        'return post_norm, post_norm if self.recurrence == "post_norm" else pre_norm',
        'return post_norm, (post_norm if self.recurrence == "post_norm" else pre_norm).detach()',
        (f"{BLOCK}::test_the_loss_at_depth_2_reaches_the_block_of_depth_1", DEFINITION),
    ),
    Mutation(
        9,
        "isolation-detaches-every-depth",
        "detach_encoder=True is applied to each depth's input in turn, not to the trunk's hidden alone.",
        "forerun.models.training",
        "    outputs = block(trunk_hidden, embeds, "
        "**decoder_inputs(model, trunk_hidden, position_ids, attention_mask))",
        "    outputs, inputs = [], decoder_inputs(model, trunk_hidden, position_ids, attention_mask)\n"
        "    for depth in range(1, block.num_depths + 1):\n"
        "        trunk_hidden = trunk_hidden.detach() if isolated else trunk_hidden\n"
        "        for_head, trunk_hidden = block.step(depth, trunk_hidden, embeds(depth), **inputs)\n"
        "        outputs.append(for_head)",
        (f"{TRAINING}::test_isolation_cuts_the_trunk_off_and_no_depth_from_the_ones_before[False]",),
    ),
    Mutation(
        9,
        "every-depth-s-input-detached",
        "Isolation is written as a detach of each depth's input.",
        "forerun.mtp.block",
        "self.step(depth, hidden_states, embeds(depth), **decoder_kwargs)",
        "self.step(depth, hidden_states.detach(), embeds(depth), **decoder_kwargs)",
        (f"{BLOCK}::test_the_loss_at_depth_2_reaches_the_block_of_depth_1", DEFINITION),
    ),
    Mutation(
        10,
        "recompute-loses-the-attention-mask",
        "Under activation recompute the block's decoder layer is called without its mask: packed documents see others.",
        "forerun.mtp.block",
        "        out = self.decoder(",
        '        if getattr(self.decoder, "gradient_checkpointing", False):\n'
        '            decoder_kwargs["attention_mask"] = None\n'
        "        out = self.decoder(",
        (f"{ENGINE}::test_activation_recompute_gives_identical_gradients[True]",),
    ),
    Mutation(
        10,
        "recompute-cuts-the-projection-off",
        "What is recomputed starts from a detached input: projection and norms get no gradient.",
        "forerun.mtp.block",
        "        out = self.decoder(self.combine(hidden_states, inputs_embeds), **decoder_kwargs)",
        "        x = self.combine(hidden_states, inputs_embeds)\n"
        '        x = x.detach() if getattr(self.decoder, "gradient_checkpointing", False) else x\n'
        "        out = self.decoder(x, **decoder_kwargs)",
        (f"{ENGINE}::test_activation_recompute_gives_identical_gradients[True]", SAME_PATHS + "[train_with_recompute]"),
    ),
    Mutation(
        10,
        "recompute-without-keywords",
        "The old checkpoint function takes no keyword arguments: TypeError for the mask.",
        "forerun.mtp.block",
        "        out = self.decoder(self.combine(hidden_states, inputs_embeds), **decoder_kwargs)",
        "        x = self.combine(hidden_states, inputs_embeds)\n"
        '        if getattr(self.decoder, "gradient_checkpointing", False):\n'
        "            from torch.utils.checkpoint import checkpoint\n\n"
        "            out = checkpoint(self.decoder, x, use_reentrant=True, **decoder_kwargs)\n"
        "        else:\n"
        "            out = self.decoder(x, **decoder_kwargs)",
        (f"{ENGINE}::test_activation_recompute_gives_identical_gradients[True]",),
    ),
    Mutation(
        10,
        "recompute-of-the-logits-drops-the-head",
        "Logits are recomputed under the reentrant checkpoint, which differentiates only what it is handed.",
        "forerun.mtp.log_probs",
        "checkpoint(one, h, t, use_reentrant=False, preserve_rng_state=False) if differentiable",
        "checkpoint(one, h.detach(), t, use_reentrant=True) if differentiable",
        ("tests/mtp/test_losses.py::test_chunked_log_probs[both-0.6-3]",),
    ),
    Mutation(
        10,
        "graft-needs-a-graph",
        "With a frozen or recomputed trunk the hidden has no graph, and the MTP loss is dropped without a word.",
        "forerun.models.carrier",
        "return graft(hidden_states, loss, scale)",
        "return graft(hidden_states, loss, scale) if hidden_states.requires_grad else hidden_states",
        (f"{TRAINING}::test_a_frozen_trunk_gets_no_gradient_and_the_block_learns",),
    ),
    Mutation(
        11,
        "not-divided-by-depths",
        "The factor applies to the sum over depths, not to their mean.",
        "forerun.models.training",
        "MTPOutput(config.mtp_loss_scaling_factor / block.num_depths * total, stats)",
        "MTPOutput(config.mtp_loss_scaling_factor * total, stats)",
        (f"{TRAINING}::test_the_default_scale_contract", DEFINITION),
    ),
    Mutation(
        11,
        "divided-by-layers",
        "A layer that is repeated over the depths counts once.",
        "forerun.models.training",
        "config.mtp_loss_scaling_factor / block.num_depths * total",
        "config.mtp_loss_scaling_factor / len(block.layers) * total",
        ("tests/models/test_loss_scale.py::test_a_repeated_layer_is_divided_by_its_depths",),
    ),
    Mutation(
        11,
        "another-default",
        "The default factor is not Megatron's and verl's 0.1.",
        "forerun.mtp.config",
        "mtp_loss_scaling_factor: float = 0.1",
        "mtp_loss_scaling_factor: float = 0.3",
        (f"{TRAINING}::test_the_default_scale_contract",),
    ),
    Mutation(
        11,
        "factor-applied-twice",
        "The loss is scaled where it is made and again where it is grafted.",
        "forerun.models.carrier",
        "return graft(hidden_states, loss, scale)",
        "return graft(hidden_states, loss * model.mtp_config.mtp_loss_scaling_factor, scale)",
        (SAME_PATHS + "[train_by_hidden]",),
    ),
    Mutation(
        11,
        "scaled-loss-logged",
        "The logged loss is the scaled one: 0.1 of what the head has learned.",
        "forerun.models.training",
        "stats.add(depth, count=own_count, loss=result.loss, label_hits=result.label_hits)",
        "stats.add(depth, count=own_count, loss=result.loss * config.mtp_loss_scaling_factor)",
        (f"{TRAINING}::test_the_default_scale_contract",),
    ),
    Mutation(
        11,
        "scaler-forgotten",
        "GradScaler multiplies the main loss and not the grafted one: under fp16 the block learns nothing.",
        "forerun.mtp.graft",
        "torch.as_tensor(scale, dtype=dtype, device=device)",
        "torch.ones((), dtype=dtype, device=device)",
        (f"{GRAFT}::test_grad_scaler",),
    ),
]

GRADIENTS = [*_NORMALISATION, *_GRADIENTS]
