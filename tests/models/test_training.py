"""A carrier's MTP loss and gradients: packing, splitting, isolation, and every way into the forward."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from forerun import MTPConfig, attach
from forerun.errors import ForerunError
from forerun.models.carrier import MTPCarrier
from forerun.models.training import mtp_forward
from forerun.models.trunk import base_model
from forerun.mtp.graft import graft
from forerun.mtp.shift import depth_counts, document_ids
from tests.models.tiny import VOCAB, gradients, tiny_model, token_rows

TRAIN = {"enable": True, "enable_train": True}


def carrier(depths: int = 2, *, tied: bool = True, seed: int = 0, **config: object) -> MTPCarrier:
    model = attach(tiny_model(tied=tied), MTPConfig(**TRAIN, num_layers=depths, **config), init="plain", seed=seed)
    return model.double().train()


def run(model: MTPCarrier, ids: Tensor, mask: Tensor, positions: Tensor, counts: list[float] | None = None) -> Tensor:
    """The MTP loss alone, differentiated."""
    model.zero_grad()
    hidden = base_model(model)(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    output = mtp_forward(
        model,
        hidden,
        input_ids=ids,
        position_ids=positions,
        document_ids=document_ids(positions),
        loss_mask=mask,
        counts=counts,
    )
    output.loss.backward()
    return output.loss.detach()


def naive_mtp_loss(model: MTPCarrier, documents: list[Tensor], masks: list[Tensor]) -> Tensor:
    """The objective document by document and position by position, from logits of the whole document."""
    config, block = model.mtp_config, model.mtp
    sums, counts = [0.0] * block.num_depths, [0] * block.num_depths
    for tokens, mask in zip(documents, masks, strict=True):
        positions = torch.arange(len(tokens)).unsqueeze(0)
        trunk = base_model(model)
        hidden = trunk(input_ids=tokens.unsqueeze(0), use_cache=False).last_hidden_state
        causal = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=hidden.dtype).triu(1)[None, None]
        for depth in range(1, block.num_depths + 1):
            read = torch.cat([tokens[depth:], tokens.new_zeros(min(depth, len(tokens)))])
            if depth == 1 and block.undo_norm is not None:
                hidden = block.undo_norm(hidden)
            for_head, before_norm = block.layer(depth)(
                hidden,
                model.get_input_embeddings()(read).unsqueeze(0),
                attention_mask=causal,
                position_embeddings=trunk.rotary_emb(hidden, positions),
            )
            hidden = before_norm if block.recurrence == "pre_norm" else for_head
            logits = model.get_output_embeddings()(for_head)[0]
            for i in range(len(tokens) - depth - 1):
                if mask[i + depth + 1]:
                    sums[depth - 1] = sums[depth - 1] - logits[i].log_softmax(-1)[tokens[i + depth + 1]]
                    counts[depth - 1] += 1
    total = sum(s / max(n, 1) for s, n in zip(sums, counts, strict=True))
    return config.mtp_loss_scaling_factor / block.num_depths * total


DOCUMENTS = [token_rows(1, n, seed=n)[0] for n in (7, 2, 9, 5)]
MASKS = [torch.arange(len(d)) >= len(d) // 3 for d in DOCUMENTS]


def packed(documents: list[Tensor], masks: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.cat(documents).unsqueeze(0),
        torch.cat(masks).unsqueeze(0),
        torch.cat([torch.arange(len(d)) for d in documents]).unsqueeze(0),
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("depths", [1, 2, 3])
def test_packed_documents_equal_the_definition(depths: int, tied: bool) -> None:
    model = carrier(depths, tied=tied)
    loss = run(model, *packed(DOCUMENTS, MASKS))
    ours = gradients(model)
    model.zero_grad()
    reference = naive_mtp_loss(model, DOCUMENTS, MASKS)
    reference.backward()
    torch.testing.assert_close(loss, reference.detach().to(loss.dtype), rtol=1e-6, atol=0)
    for name, expected in gradients(model).items():
        assert ours[name] is not None, name
        torch.testing.assert_close(ours[name], expected, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_another_document_changes_no_gradient_of_this_one() -> None:
    model = carrier(2)
    other = [DOCUMENTS[0], token_rows(1, 2, seed=99)[0], DOCUMENTS[2]]
    only_first = [MASKS[0], torch.zeros(2, dtype=torch.bool), torch.zeros(9, dtype=torch.bool)]
    run(model, *packed(DOCUMENTS[:3], only_first))
    before = gradients(model)
    run(model, *packed(other, only_first))
    for name, expected in gradients(model).items():
        torch.testing.assert_close(before[name], expected, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("mask_rule", ["target", "span"])
def test_any_split_into_micro_batches_gives_the_gradient_of_the_whole(mask_rule: str) -> None:
    model = carrier(2, mask_rule=mask_rule)
    ids, mask, positions = packed(DOCUMENTS, MASKS)
    counts = [float(n) for n in depth_counts(document_ids(positions), mask, 2, mask_rule)]
    whole_loss = run(model, ids, mask, positions)
    whole = gradients(model)
    parts: dict[str, Tensor] = {}
    split_loss = torch.zeros(())
    for chosen in ([0], [1], [2, 3]):  # uneven; the second has no valid position at depth 1
        split_loss = split_loss + run(
            model, *packed([DOCUMENTS[j] for j in chosen], [MASKS[j] for j in chosen]), counts
        )
        for name, grad in gradients(model).items():
            assert grad is not None
            parts[name] = parts.get(name, torch.zeros_like(grad)) + grad
    torch.testing.assert_close(split_loss, whole_loss)
    for name, grad in whole.items():
        torch.testing.assert_close(parts[name], grad, rtol=1e-6, atol=1e-9, msg=name)


def test_the_default_scale_contract() -> None:
    model = carrier(2)
    ids, mask, positions = packed(DOCUMENTS, MASKS)
    # With a cache, transformers does not look for packed documents in position_ids.
    model(input_ids=ids, labels=torch.where(mask, ids, -100), position_ids=positions, use_cache=False)
    stats = model.pop_mtp_stats()
    assert stats is not None
    figures = stats.compute()
    logged = 0.1 / 2 * sum(figures[f"mtp/depth_{k}/loss"] or 0.0 for k in (1, 2))
    torch.testing.assert_close(torch.tensor(logged), run(model, ids, mask, positions).float(), rtol=1e-6, atol=0)
    assert model.pop_mtp_stats() is None


# Ways through a forward. Each takes a plain model too, to say what happens without MTP. Trainers and engines are in
# tests/trainers/test_isolation.py.


def train_by_forward(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> None:
    model(input_ids=ids, labels=labels).loss.backward()


def train_by_logits(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> None:
    """A main loss that knows nothing of MTP and does not use the model's own."""
    logits = model(input_ids=ids, labels=labels).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()


def train_with_recompute(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> None:
    model.activation_checkpointing_enable()
    train_by_forward(model, ids, labels)


def train_by_hidden(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> None:
    """As an engine does it: the trunk, the graft, then a loss from the hidden."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = base_model(model)(input_ids=ids, use_cache=False).last_hidden_state
    if isinstance(model, MTPCarrier):
        output = mtp_forward(
            model,
            hidden,
            input_ids=ids,
            position_ids=positions,
            document_ids=document_ids(positions),
            loss_mask=labels != -100,
        )
        hidden = graft(hidden, output.loss)
    logits = model.get_output_embeddings()(hidden)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()


FORWARD_PATHS = [train_by_forward, train_by_logits, train_with_recompute, train_by_hidden]


@pytest.mark.parametrize("path", FORWARD_PATHS)
@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize("loss", ["ce", "soft_ce", "tv"])
@pytest.mark.parametrize("tied", [True, False])
def test_heads_isolation_leaves_every_trunk_gradient_bit_identical(path, depths: int, loss: str, tied: bool) -> None:
    ids, labels = token_rows(2, 12), token_rows(2, 12).masked_fill(torch.arange(12) < 4, -100)
    plain = tiny_model(tied=tied).train()
    path(plain, ids, labels)
    model = carrier(depths, tied=tied, detach_encoder=True, loss=loss)
    path(model, ids, labels)
    ours = gradients(model)
    for name, expected in gradients(plain).items():
        assert torch.equal(ours[name], expected), name
    for name, grad in ours.items():
        if name.startswith("mtp."):
            assert grad is not None and grad.abs().sum() > 0, name


@pytest.mark.parametrize("repeat", [True, False])
def test_isolation_cuts_the_trunk_off_and_no_depth_from_the_ones_before(repeat: bool) -> None:
    """The same forward, so the block's own gradients are those of joint training: depth 2's loss reaches block 1."""
    ids, labels = token_rows(2, 12), token_rows(2, 12).masked_fill(torch.arange(12) < 4, -100)
    found = []
    for isolated in (True, False):
        model = carrier(3, tied=False, detach_encoder=isolated, repeat_layer=repeat)
        train_by_forward(model, ids, labels)
        found.append({name: grad for name, grad in gradients(model).items() if name.startswith("mtp.")})
    for name, grad in found[1].items():
        torch.testing.assert_close(found[0][name], grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("path", FORWARD_PATHS)
def test_joint_training_reaches_trunk_embedding_and_head(path) -> None:
    ids, labels = token_rows(2, 12), token_rows(2, 12)
    plain = tiny_model(tied=False).train()
    path(plain, ids, labels)
    model = carrier(1, tied=False)
    path(model, ids, labels)
    ours = gradients(model)
    for name, alone in gradients(plain).items():
        assert not torch.equal(ours[name], alone), f"the MTP loss did not reach {name}"


def test_a_frozen_trunk_gets_no_gradient_and_the_block_learns() -> None:
    model = carrier(2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("mtp."))
    train_by_forward(model, token_rows(2, 12), token_rows(2, 12))
    for name, grad in gradients(model).items():
        assert (grad is not None) == name.startswith("mtp."), name


@pytest.mark.parametrize("path", FORWARD_PATHS)
def test_every_path_gives_the_same_block_gradients(path) -> None:
    ids, labels = token_rows(2, 12), token_rows(2, 12).masked_fill(torch.arange(12) < 4, -100)
    first, second = carrier(2, detach_encoder=True), carrier(2, detach_encoder=True)
    train_by_forward(first, ids, labels)
    path(second, ids, labels)
    for name, grad in gradients(first).items():
        if name.startswith("mtp."):
            torch.testing.assert_close(gradients(second)[name], grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("isolated", [True, False])
def test_recompute_gives_identical_gradients_and_runs_trunk_and_block_again(isolated: bool, reentrant: bool) -> None:
    ids, labels = token_rows(2, 12), token_rows(2, 12).masked_fill(torch.arange(12) < 4, -100)
    found = []
    for recompute in (False, True):
        model = carrier(2, detach_encoder=isolated)
        if recompute:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
        runs = Counter()
        layers = {"trunk": base_model(model).layers[0], "block": model.mtp.layer(2).decoder}
        for name, layer in layers.items():
            layer.self_attn.register_forward_pre_hook(lambda *_, n=name, r=runs: r.update([n]))
        train_by_forward(model, ids, labels)
        assert runs == dict.fromkeys(layers, 2 if recompute else 1)
        found.append(gradients(model))
    for name, grad in found[0].items():
        assert grad is not None and torch.equal(found[1][name], grad), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_whole_model_inside_a_checkpoint_gives_the_same_gradients(reentrant: bool) -> None:
    """The graft and the MTP loss are then made again in backward."""
    ids = token_rows(2, 12)
    plain, inside = carrier(2), carrier(2)
    train_by_logits(plain, ids, ids)
    anchor = torch.zeros((), requires_grad=True)  # a reentrant checkpoint wants an input that has a gradient
    logits = checkpoint(lambda _: inside(input_ids=ids, labels=ids).logits, anchor, use_reentrant=reentrant)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for name, grad in gradients(plain).items():
        assert torch.equal(gradients(inside)[name], grad), name


def train_twice(model: MTPCarrier, scale: float, gate: threading.Barrier | None = None) -> None:
    """Two micro-batches whose forwards, backwards and scales lie between those of whoever waits at the same gate."""
    model.mtp_loss_scale = scale
    for seed in (1, 2):
        ids = token_rows(2, 12, seed=seed)
        loss = model(input_ids=ids, labels=ids).loss
        if gate is not None:
            gate.wait(30)
        (loss * scale).backward()
        if gate is not None:
            gate.wait(30)


def test_two_models_in_two_threads_do_not_disturb_each_other() -> None:
    kinds = [({"depths": 1, "loss": "ce"}, 1.0), ({"depths": 2, "loss": "soft_ce", "detach_encoder": True}, 8.0)]
    alone = [carrier(**kind) for kind, _ in kinds]
    for model, (_, scale) in zip(alone, kinds, strict=True):
        train_twice(model, scale)
    together, gate = [carrier(**kind) for kind, _ in kinds], threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train_twice, together, [scale for _, scale in kinds], [gate, gate]))
    for one, other in zip(alone, together, strict=True):
        for name, grad in gradients(one).items():
            assert grad is not None and torch.equal(gradients(other)[name], grad), name
        ours, theirs = one.pop_mtp_stats(), other.pop_mtp_stats()
        assert ours is not None and theirs is not None and torch.equal(ours.sums, theirs.sums)


def test_interleaved_forwards_and_backwards_of_one_model_keep_their_losses() -> None:
    """A pipeline schedule runs several micro-batches' forwards before the first backward."""
    batches = [token_rows(2, 12, seed=seed) for seed in (1, 2, 3)]
    ordered, interleaved = carrier(2), carrier(2)
    for ids in batches:
        ordered(input_ids=ids, labels=ids).loss.backward()
    losses = [interleaved(input_ids=ids, labels=ids).loss for ids in batches]
    for loss in losses:
        loss.backward()
    for name, grad in gradients(ordered).items():
        torch.testing.assert_close(gradients(interleaved)[name], grad, rtol=1e-12, atol=1e-14, msg=name)


def test_left_padding_equals_no_padding() -> None:
    ids = token_rows(1, 9)
    model = carrier(2, detach_encoder=True)
    train_by_forward(model, ids, ids)
    expected = gradients(model)
    model.zero_grad()
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    attention = torch.cat([torch.zeros(1, 4, dtype=torch.long), torch.ones_like(ids)], dim=1)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    labels = padded.masked_fill(attention == 0, -100)
    model(input_ids=padded, attention_mask=attention, position_ids=positions, labels=labels).loss.backward()
    for name, grad in gradients(model).items():
        if name.startswith("mtp."):
            torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def test_token_zero_is_never_trained_on_at_vacated_places() -> None:
    ids = token_rows(2, 10)  # holds no 0
    model = carrier(3, tied=False)
    train_by_forward(model, ids, ids)
    embedding = model.get_input_embeddings().weight.grad
    assert embedding is not None and embedding[0].abs().sum() == 0
    stats = model.pop_mtp_stats()
    assert stats is not None and [row[0] for row in stats.sums.tolist()] == [16.0, 14.0, 12.0]


def test_trainers_count_of_items_divides_every_depth() -> None:
    ids = token_rows(2, 12)
    whole, split = carrier(1, detach_encoder=True), carrier(1, detach_encoder=True)
    items = torch.tensor(22)
    whole(input_ids=ids, labels=ids, num_items_in_batch=items).loss.backward()
    for row in ids:
        split(input_ids=row[None], labels=row[None], num_items_in_batch=items).loss.backward()
    for name, grad in gradients(whole).items():
        torch.testing.assert_close(gradients(split)[name], grad, rtol=1e-6, atol=1e-9, msg=name)


def test_autocast_and_compiled_trunk() -> None:
    ids = token_rows(2, 12)
    reference = carrier(1, detach_encoder=True).float()
    train_by_forward(reference, ids, ids)
    expected = gradients(reference)

    compiled = copy.deepcopy(reference)
    compiled.zero_grad()
    compiled.model.forward = torch.compile(compiled.model.forward, backend="eager")
    train_by_forward(compiled, ids, ids)
    for name, grad in gradients(compiled).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-7, msg=name)

    reference.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = reference(input_ids=ids, labels=ids).loss
    loss.backward()
    for name, grad in gradients(reference).items():
        assert grad is not None and F.cosine_similarity(grad.flatten(), expected[name].flatten(), dim=0) > 0.97, name


def test_evaluation_and_generation_do_not_graft() -> None:
    model = carrier(1).eval()
    ids = token_rows(1, 8)
    model(input_ids=ids, labels=ids)
    model.generate(ids, max_new_tokens=3, do_sample=False)
    assert model.pop_mtp_stats() is None


def test_a_forward_without_labels_warns_and_one_that_raises_leaves_no_hook() -> None:
    model = carrier(1)
    with pytest.warns(UserWarning, match="no labels"):
        model(input_ids=token_rows(1, 8))
    with pytest.raises(ForerunError, match="input_ids"):
        model(inputs_embeds=torch.zeros(1, 8, 16, dtype=torch.float64), labels=token_rows(1, 8))
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 4), 10_000), labels=token_rows(1, 4))
    assert not base_model(model)._forward_hooks


def test_a_vocabulary_of_all_tokens_in_another_order_changes_nothing() -> None:
    results = []
    for vocabulary in (None, torch.arange(VOCAB - 1, -1, -1)):
        model = carrier(1, detach_encoder=True, loss="soft_ce")
        ids = token_rows(2, 12)
        positions = torch.arange(12).expand_as(ids)
        output = mtp_forward(
            model,
            base_model(model)(input_ids=ids, use_cache=False).last_hidden_state,
            input_ids=ids,
            position_ids=positions,
            document_ids=document_ids(positions),
            loss_mask=torch.ones_like(ids).bool(),
            vocabulary=vocabulary,
        )
        output.loss.backward()
        results.append((output.loss.detach(), output.stats.sums, gradients(model)["mtp.layers.0.proj.weight"]))
    for full, permuted in zip(*results, strict=True):
        torch.testing.assert_close(full, permuted, rtol=1e-9, atol=1e-12)
