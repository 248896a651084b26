"""Faults in what the block is: halves, chaining, tensors on disk, the drafter's cache (kinds 13-17);
and in what a hybrid trunk remembers of rejected drafts (kind 29)."""

from __future__ import annotations

from tests.faults.mutation import Mutation

BLOCK = "tests/mtp/test_block.py"
TRAINING = "tests/models/test_training.py"
FORMULA = "tests/models/test_family_formula.py"
INIT = "tests/models/test_init.py"
SAVING = "tests/models/test_saving.py"
LOADING = "tests/models/test_load_paths.py"
DRAFTER = "tests/speculative/test_drafter.py"

FILES = "tests/families/test_round_trip.py"
FAMILY_FORMULA = "tests/families/test_formula.py::test_two_depths_follow_the_formula"
UNDO_NORM = "tests/models/test_pre_norm.py::test_undoing_the_norm_equals_taking_the_hidden_before_it"

HALVES = f"{FORMULA}::test_the_halves_of_mimo_s_projection"
BROKEN = f"{SAVING}::test_a_broken_checkpoint_is_named_in_one_line"
ROUND_TRIP = f"{SAVING}::test_round_trip[False-True-plain]"
DEFINITION = f"{TRAINING}::test_packed_documents_equal_the_definition[2-True]"
CACHED = f"{DRAFTER}::test_cached_drafts_equal_uncached_ones"

_BLOCK = [
    Mutation(
        13,
        "halves-swapped",
        "The projection reads [embedding, hidden] where the family has [hidden, embedding].",
        "forerun.mtp.block",
        'if self.concat_order == "embed_hidden":',
        'if self.concat_order == "hidden_embed":',
        (f"{BLOCK}::test_depths_follow_the_formula[True-post_norm-hidden_embed]", HALVES + "[mimo]"),
    ),
    Mutation(
        13,
        "family-record-has-the-other-order",
        "MiMo's record says embedding first.",
        "forerun.families.mimo",
        'concat_order="hidden_embed"',
        'concat_order="embed_hidden"',
        (HALVES + "[mimo]", HALVES + "[attached]"),
    ),
    Mutation(
        13,
        "other-family-s-order",
        "DeepSeek-V3's projection is read hidden first, as MiMo's.",
        "forerun.families.deepseek_v3",
        'concat_order="embed_hidden"',
        'concat_order="hidden_embed"',
        (FAMILY_FORMULA + "[deepseek_v3]",),
    ),
    Mutation(
        13,
        "norms-swapped-on-disk",
        "The halves are right, but hidden_layernorm is loaded as the embedding's norm and the other way round.",
        "forerun.families.mimo",
        '("embed_norm.", "model.mtp_layers.{k}.token_layernorm."),\n'
        '        ("hidden_norm.", "model.mtp_layers.{k}.hidden_layernorm."),',
        '("embed_norm.", "model.mtp_layers.{k}.hidden_layernorm."),\n'
        '        ("hidden_norm.", "model.mtp_layers.{k}.token_layernorm."),',
        (HALVES + "[mimo]",),
    ),
    Mutation(
        13,
        "family-order-not-asked",
        "Attach and load build every family's block in one order.",
        "forerun.models.attach",
        "family.concat_order",
        '"hidden_embed"',
        (f"{FORMULA}::test_a_record_of_the_other_order_swaps_the_halves",),
    ),
    Mutation(
        13,
        "start-fitted-for-the-other-order",
        "The closed-form start fits the halves in one order whatever the family's.",
        "forerun.models.init",
        'if layer.concat_order == "embed_hidden":',
        "if False:",
        (f"{INIT}::test_the_fit_is_the_least_squares_solution",),
    ),
    Mutation(
        14,
        "every-depth-reads-the-trunk",
        "Depth 2 is fed the trunk's hidden again.",
        "forerun.mtp.block",
        "for_head, hidden_states = self.step(",
        "for_head, _ = self.step(",
        (f"{BLOCK}::test_depths_follow_the_formula[True-post_norm-hidden_embed]", DEFINITION),
    ),
    Mutation(
        14,
        "pre-norm-for-post-norm",
        "The next depth gets the hidden before the final norm where the family hands on the one after it.",
        "forerun.mtp.block",
        'post_norm if self.recurrence == "post_norm" else pre_norm',
        'post_norm if self.recurrence == "pre_norm" else pre_norm',
        (
            f"{BLOCK}::test_depths_follow_the_formula[True-post_norm-hidden_embed]",
            f"{BLOCK}::test_depths_follow_the_formula[True-pre_norm-hidden_embed]",
        ),
    ),
    Mutation(
        14,
        "hidden-after-the-trunk-s-norm",
        "A family whose block reads the hidden before the trunk's final norm is given the one after it.",
        "forerun.models.attach",
        'undo_norm = UndoNorm(norm) if family.trunk_hidden == "pre_norm" else None',
        "undo_norm = None",
        (UNDO_NORM + "[1-False]",),
    ),
    Mutation(
        14,
        "trunk-s-norm-undone-at-every-depth",
        "What the block hands to depth 2 is treated as if the trunk's final norm had made it.",
        "forerun.mtp.block",
        "if depth == 1:",
        "if depth >= 1:",
        (UNDO_NORM + "[2-False]",),
    ),
    Mutation(
        14,
        "first-layer-for-every-depth",
        "Depth 2 runs the layer of depth 1.",
        "forerun.mtp.block",
        "self.layers[min(depth, len(self.layers)) - 1]",
        "self.layers[0]",
        (f"{BLOCK}::test_depths_follow_the_formula[True-post_norm-hidden_embed]",),
    ),
    Mutation(
        14,
        "every-depth-reads-the-same-token",
        "Depth 2 is given the embedding of t_{i+1} again.",
        "forerun.models.training",
        "embedded = embed(model, targets[depth - 1].input_ids)",
        "embedded = embed(model, targets[0].input_ids)",
        (DEFINITION,),
    ),
    Mutation(
        14,
        "draft-chains-from-the-trunk",
        "The second draft starts from the trunk's last hidden again, not from the block's own.",
        "forerun.speculative.drafter",
        "                for_head, hidden_states = self.block.step(\n",
        "                for_head, _ = self.block.step(\n",
        (CACHED + "[1-llama-1-False]",),
    ),
]

_TENSORS = [
    Mutation(
        15,
        "missing-tensors-skipped",
        "A tensor that the file lacks is left as it was initialised.",
        "forerun.models.loading",
        "        read.update(fill(",
        "        if stored_name in names:\n            read.update(fill(",
        (BROKEN + "[one tensor gone-has no tensor model.mtp_layers.0.mlp.up_proj.weight]",),
    ),
    Mutation(
        15,
        "trunk-fills-in-random-weights",
        "transformers fills a missing embedding or head with random numbers, and nobody looks.",
        "forerun.models.loading",
        'if missing := sorted(found["missing_keys"]):',
        "if missing := []:",
        (
            BROKEN + "[trunk weight gone-lacks 1 of the trunk's weights, first model.layers.1.mlp.up_proj.weight]",
            f"{LOADING}::test_a_missing_embedding_or_head_is_named",
        ),
    ),
    Mutation(
        15,
        "declared-and-gone",
        "config.json declares MTP, the tensors are gone, and a trunk without a block is returned.",
        "forerun.models.loading",
        "if depth != declared:",
        "if depth > declared:",
        (BROKEN + "[head gone-declares num_nextn_predict_layers=1 but holds 0]",),
    ),
    Mutation(
        15,
        "block-left-out-of-a-save",
        "A state dict without the block's tensors is saved as a whole model.",
        "forerun.models.carrier",
        "missing = [name for name in names if name not in state_dict]",
        "missing: list[str] = []",
        (f"{SAVING}::test_a_state_dict_without_the_block_is_refused_and_nothing_is_written",),
    ),
    Mutation(
        15,
        "partial-update-taken-for-whole",
        "A weight update without the block's tensors is accepted.",
        "forerun.models.carrier",
        "missing = sorted(own.keys() - given.keys())",
        "missing: list[str] = []",
        (f"{SAVING}::test_an_incomplete_update_changes_nothing[missing]",),
    ),
    Mutation(
        15,
        "unknown-tensors-dropped",
        "A tensor that has no place in the model is ignored in an update.",
        "forerun.models.carrier",
        "unknown = sorted(given.keys() - own.keys())",
        "unknown: list[str] = []\n    given = {name: tensor for name, tensor in given.items() if name in own}",
        (f"{SAVING}::test_an_incomplete_update_changes_nothing[unknown]",),
    ),
    Mutation(
        15,
        "copy-of-the-embedding-not-compared",
        "The file's copy of embedding or head differs from the trunk's and is ignored.",
        "forerun.models.loading",
        "if not torch.equal(copy, trunk_weight.detach().cpu()):",
        "if copy.shape != trunk_weight.shape:",
        (f"{FILES}::test_a_copy_that_differs_from_the_trunk_is_named",),
    ),
    Mutation(
        15,
        "copy-of-the-embedding-not-written",
        "The copies of embedding and head that older readers need are left out: they read uninitialised memory.",
        "forerun.models.layout",
        "        if duplicate.written\n",
        "        if not duplicate.written\n",
        (f"{FILES}::test_a_block_is_written_under_the_family_s_names[deepseek_v3]",),
    ),
    Mutation(
        15,
        "leftover-tensors-ignored",
        "MTP tensors that have no place in the block are dropped without a word, and lost at the next save.",
        "forerun.models.loading",
        "unknown = {n for n in names - read if",
        "unknown = {n for n in read - names if",
        (f"{FILES}::test_a_tensor_that_a_save_would_lose_is_named[deepseek_v3]",),
    ),
    Mutation(
        15,
        "a-deeper-layer-is-not-loaded",
        "Of two MTP layers the file's first is loaded, the second is not looked for.",
        "forerun.families",
        "        depth += 1\n    return depth",
        "        depth += 1\n        break\n    return depth",
        (ROUND_TRIP,),
    ),
    Mutation(
        16,
        "prefix-renamed",
        "The block's attribute was renamed and the prefix was not: its tensors keep names that no reader knows.",
        "forerun.models.carrier",
        '_PREFIX = "mtp.layers."',
        '_PREFIX = "mtp.blocks."',
        (ROUND_TRIP, f"{SAVING}::test_mimo_layout_and_config"),
    ),
    Mutation(
        16,
        "names-of-nobody-else",
        "Save and load agree with each other, but not with the family's own code.",
        "forerun.families.mimo",
        '("decoder.", "model.mtp_layers.{k}."),',
        '("decoder.", "model.mtp_layers.{k}.layer."),',
        (f"{SAVING}::test_mimo_layout_and_config",),
    ),
    Mutation(
        16,
        "depth-counted-from-one",
        "The checkpoint's layers are numbered from 1.",
        "forerun.families.record",
        "return theirs.format(k=k, layer=trunk_layers + k) + parameter[len(ours) :]",
        "return theirs.format(k=k + 1, layer=trunk_layers + k + 1) + parameter[len(ours) :]",
        (f"{SAVING}::test_mimo_layout_and_config",),
    ),
    Mutation(
        16,
        "gate-and-up-swapped",
        "An expert's two halves are stacked in the other order.",
        "forerun.families.record",
        '("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight")',
        '("mlp.experts.{e}.up_proj.weight", "mlp.experts.{e}.gate_proj.weight")',
        (FAMILY_FORMULA + "[deepseek_v3]",),
    ),
    Mutation(
        16,
        "experts-not-renamed-on-resume",
        "A lenient load_state_dict renames single tensors, not experts that lie apart in the file.",
        "forerun.models.carrier",
        "if pieces is not None and all(part in given for parts in pieces for part in parts):",
        "if pieces is not None and stored_name in given:",
        (f"{FILES}::test_a_lenient_load_state_dict_takes_the_file_s_experts[deepseek_v3]",),
    ),
    Mutation(
        16,
        "unmapped-parameter-keeps-its-name",
        "A parameter that the record does not cover is written under our name, which no engine reads.",
        "forerun.families.record",
        'raise KeyError(f"family {self.name!r} has no name for the MTP parameter {parameter!r}")',
        "return parameter",
        (f"{SAVING}::test_an_mtp_parameter_without_a_name_is_an_error",),
    ),
    Mutation(
        16,
        "loaded-into-a-copy",
        "Loading binds the dictionary's entry instead of writing the parameter: the block stays random.",
        "forerun.models.layout",
        "    place.copy_(tensor)",
        "    place = tensor.clone()",
        (ROUND_TRIP,),
    ),
    Mutation(
        16,
        "update-into-a-copy",
        "A weight update binds names instead of writing parameters.",
        "forerun.models.carrier",
        "        own[name].copy_(tensor)",
        "        own = {**own, name: tensor}",
        (f"{SAVING}::test_named_weights_cover_everything_once_and_load_in_place",),
    ),
    Mutation(
        16,
        "resume-does-not-rename",
        "A trainer resumes with load_state_dict(strict=False); the file's names match nothing.",
        "forerun.models.carrier",
        "        if prefix + stored_name in state_dict:\n",
        "        if prefix and prefix + stored_name in state_dict:\n",
        (
            f"{LOADING}::test_a_lenient_load_state_dict_fills_the_block",
            f"{SAVING}::test_load_state_dict_takes_the_names_of_the_file",
        ),
    ),
]

_CACHE = [
    Mutation(
        17,
        "drafter-not-fed-by-prefill",
        "The drafter's cache starts empty after the prompt: its first drafts see nothing.",
        "forerun.rollout.native.model",
        "if next_tokens is not None and self.block is not None:",
        "if next_tokens is not None and self.block is None:",
        (CACHED + "[1-llama-1-False]",),
    ),
    Mutation(
        17,
        "prefill-feeds-the-same-token",
        "The prompt's entries are made from (h_i, E[t_i]) instead of E[t_{i+1}].",
        "forerun.rollout.native.prefill",
        "after = s.prompt[start + 1 : start + count + 1]",
        "after = s.prompt[start : start + count]",
        (CACHED + "[1-llama-1-False]",),
    ),
    Mutation(
        17,
        "drafts-kept-after-verification",
        "Entries that drafting made from the block's own hidden are not written again from the trunk's.",
        "forerun.rollout.native.run",
        "        return self.runner.drafter.draft(\n"
        "            self.pending.hidden[:, :width],\n"
        "            self.pending.following[:, :width],\n",
        "        last = (counts - 1)[:, None]\n"
        "        hidden = self.pending.hidden.take_along_dim(last[..., None], 1)\n"
        "        following = self.pending.following.take_along_dim(last, 1)\n"
        "        counts = torch.ones_like(counts)\n"
        "        return self.runner.drafter.draft(\n            hidden,\n            following,\n",
        (CACHED + "[4-llama-1-False]",),
    ),
    Mutation(
        17,
        "chain-stays-in-place",
        "Every further draft overwrites the entry of the one before.",
        "forerun.speculative.drafter",
        "                at = at + 1\n",
        "",
        (CACHED + "[1-llama-1-False]",),
    ),
    Mutation(
        17,
        "chain-one-place-late",
        "The chain starts one position behind the last verified entry and leaves a gap.",
        "forerun.speculative.drafter",
        "at = (positions + counts - 1)[:, None]",
        "at = (positions + counts)[:, None]",
        (CACHED + "[1-llama-1-False]",),
    ),
    Mutation(
        17,
        "slowest-row-s-length-for-all",
        "Every row drafts from the last column, also where it accepted fewer tokens.",
        "forerun.speculative.drafter",
        "last = (counts - 1)[:, None, None]",
        "last = (counts.max() - 1).expand_as(counts)[:, None, None]",
        (CACHED + "[4-llama-1-False]",),
    ),
    Mutation(
        17,
        "layers-share-a-cache",
        "Two MTP layers write their keys and values into one cache.",
        "forerun.rollout.native.trunks",
        "FusedDecoderLayer(layer.decoder, len(self.layers) + k, copies)",
        "FusedDecoderLayer(layer.decoder, len(self.layers), copies)",
        (CACHED + "[4-llama-2-False]",),
    ),
    Mutation(
        17,
        "later-layers-keep-drafted-entries",
        "After verification only the first layer's entries are written again; the second's were made from a draft.",
        "forerun.speculative.drafter",
        "early = positions.clamp(max=self.layers - 1)",
        "early = positions.clamp(max=0)",
        (CACHED + "[4-llama-2-False]",),
    ),
    Mutation(
        17,
        "later-layers-end-with-the-piece",
        "A prompt in pieces: the second layer's last entry of each piece never learns its token.",
        "forerun.speculative.drafter",
        "for early in (min(self.layers - 1, start),)",
        "for early in (0,)",
        (CACHED + "[1-llama-3-False]",),
    ),
    Mutation(
        17,
        "later-layers-read-the-first-s-tokens",
        "Layer k reads t_{i+1} at position i, as layer 1 does, and not t_{i+k}.",
        "forerun.speculative.drafter",
        "                next_tokens = F.pad(next_tokens[:, 1:], (0, 1))\n                if index < depth:",
        "                next_tokens = next_tokens.clone()\n                if index < depth:",
        (CACHED + "[4-llama-2-False]",),
    ),
]

TRUNKS = "tests/rollout/test_trunks.py"
ROLLED_BACK = f"{TRUNKS}::test_rolling_back_leaves_the_states_of_the_accepted_tokens_alone"
SHARED_STATE = f"{TRUNKS}::test_samples_of_one_prompt_share_its_state_only_while_it_stands_there"

_STATES = [
    Mutation(
        29,
        "convolution-not-rolled-back",
        "The short convolution goes on from the rejected drafts.",
        "forerun.rollout.native.delta_net",
        "at = count + torch.arange(width, device=key.device)",
        "at = 0 * count + tokens + torch.arange(width, device=key.device)",
        (ROLLED_BACK + "[2]",),
    ),
    Mutation(
        29,
        "recurrent-state-not-rolled-back",
        "The state has read the rejected drafts.",
        "forerun.rollout.native.delta_net",
        "if min(kept) < tokens:",
        "if min(kept) < 0:",
        (ROLLED_BACK + "[2]",),
    ),
    Mutation(
        29,
        "rejected-drafts-decay-the-state",
        "Rejected drafts write nothing into the state, and still let it decay.",
        "forerun.rollout.native.delta_net",
        "g=g.masked_fill(rejected[..., None], 0),",
        "g=g,",
        (ROLLED_BACK + "[2]",),
    ),
    Mutation(
        29,
        "state-stays-behind-when-a-row-moves",
        "Keys and values move with a row, the recurrent state does not.",
        "forerun.rollout.native.delta_net",
        "        self.memory[target] = self.memory[source]\n",
        "        self.memory[target] = self.memory[target]\n",
        (SHARED_STATE + "[qwen3_next]",),
    ),
    Mutation(
        29,
        "prefix-shared-with-a-row-that-has-gone-on",
        "The prompt's keys and values are still there; the state is that of the text after it.",
        "forerun.rollout.native.model",
        "self.rewinds = not self.trunk.delta_nets",
        "self.rewinds = True",
        (SHARED_STATE + "[qwen3_next]",),
    ),
    Mutation(
        29,
        "prompt-begins-with-another-s-state",
        "A row's state is not cleared for the next prompt.",
        "forerun.rollout.native.delta_net",
        "if start == 0:",
        "if start < 0:",
        (SHARED_STATE + "[qwen3_next]",),
    ),
]

STRUCTURE = [*_BLOCK, *_TENSORS, *_CACHE, *_STATES]
