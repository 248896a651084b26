"""Rows laid out for the trunk's layers: recurrent ones get a document to a row, flash attention gets one row of all.

transformers' own code around flash attention runs here; the two kernels that it calls are plain products.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    PreTrainedModel,
    modeling_flash_attention_utils,
)

from forerun.data.batch import Batch
from forerun.data.packing import Document, pack
from forerun.engines.division import documents_apart, put_back
from forerun.engines.hidden_cache import HiddenCache
from forerun.engines.shared_rows import JoinedRows
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.models.attach import attach
from forerun.rollout.native.engine import NativeEngine
from forerun.trainers.batching import Rows, stack_rows
from forerun.trainers.sft import NextTokenLoss
from tests.engines.test_torch_engine import mtp_config
from tests.families.tiny import COMMON, TRUNKS, VOCAB, tiny_trunk

LENGTHS = (9, 4, 7, 5, 2)


def documents() -> list[Document]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    return [
        Document(row, [False, *[True] * (len(row) - 1)], {"weight": [1.0 + i] * len(row)}) for i, row in enumerate(ids)
    ]


def packed() -> Batch:
    """Documents that have another number than their neighbours in the row, and no more; the last row is padded."""
    rows = Rows(documents(), 15, packing=True)
    for number, row in enumerate(rows):
        local = row.document_ids.diff(prepend=row.document_ids[:, :1]).ne(0).cumsum(1)
        row.document_ids = (local + number) % 2
    return stack_rows(rows)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False
) -> Tensor:
    """As flash-attn's: [B, S, heads, d], every row one document."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """As flash-attn's: [tokens, heads, d], documents from one of `cu_seqlens_q` to the next."""
    sizes = cu_seqlens_q.diff().tolist()
    parts = zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
    return torch.cat([flash_attn_func(*(x[None] for x in part), 0.0, softmax_scale, causal)[0] for part in parts])


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    utils: Any = modeling_flash_attention_utils
    kernels = flash_attn_func, flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    monkeypatch.setattr(utils, "_lazy_imports", lambda *_, **__: kernels)


def model(kind: str, attention: str) -> PreTrainedModel:
    made: Any = tiny_trunk(kind, dtype=torch.float64)
    if "Experts" in "".join(type(module).__name__ for module in made.modules()):
        made.set_experts_implementation("eager")  # the default has no float64
    made.config._attn_implementation = attention
    return attach(made, mtp_config(detach_encoder=False), init="plain")


def trained(kind: str, attention: str, batches: list[Batch]) -> tuple[dict[str, float], dict[str, Tensor]]:
    engine = TorchEngine(model(kind, attention), TorchEngineConfig(chunk_size=5))
    figures = engine.forward_backward(batches, NextTokenLoss(batches))
    gradients = {n: p.grad for n, p in engine.model.named_parameters() if p.grad is not None}
    return figures, gradients


def test_one_row_of_all_holds_the_same_tokens() -> None:
    batch = packed()
    laid = JoinedRows(batch)
    for name in ("input_ids", "loss_mask"):
        x = getattr(batch, name)
        assert torch.equal(laid.whole(laid.take(x)), x) and torch.equal(laid.take(x), getattr(laid.batch, name))
    assert laid.batch.num_targets == batch.num_targets == sum(LENGTHS) - len(LENGTHS)
    assert torch.equal(laid.batch.extras["weight"], laid.take(batch.extras["weight"]))
    assert len(laid.batch.input_ids) == 1
    assert (laid.batch.position_ids == 0).sum() == (batch.position_ids == 0).sum()


def test_parts_hold_the_same_tokens() -> None:
    batch = packed()
    real = batch.document_ids >= 0
    parts = documents_apart(batch)
    for name in ("input_ids", "document_ids", "loss_mask"):
        x, found = getattr(batch, name), put_back(parts, [getattr(part.batch, name) for part in parts], batch)
        assert torch.equal(found[real], x[real])
    found = put_back(parts, [part.batch.extras["weight"] for part in parts], batch)
    assert torch.equal(found, batch.extras["weight"])
    assert sum(part.batch.num_targets for part in parts) == batch.num_targets == sum(LENGTHS) - len(LENGTHS)


def test_a_document_to_a_row_takes_no_more_room_than_the_packed_rows_did() -> None:
    """One long document and many short ones would be 9 x 20 tokens together; the rows that hold them have 2 x 20."""
    sizes = [20, 6, 2, 2, 2, 2, 2, 2, 2]
    given = [Document([1] * size, [True] * size) for size in sizes]
    parts = documents_apart(stack_rows(Rows(given, 20, packing=True)))
    assert [len(part.batch.input_ids) for part in parts] == [2, 7]
    assert [part.batch.input_ids.shape[1] for part in parts] == [20, 2]
    for part in parts:
        starts = (part.batch.position_ids == 0).sum(dim=1).tolist()
        assert starts == [1 + (len(span) < len(part.spans[0])) for span in part.spans]  # a document, and its padding


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize(
    ("kind", "attention"),
    [("qwen3_next", "sdpa"), ("qwen3_5_text", "flash_attention_2"), ("attached", "flash_attention_2")],
)
def test_documents_do_not_see_one_another(kind: str, attention: str) -> None:
    apart = pack(documents(), 15, micro_batch_size=1, layout="padded")
    expected, gradients = trained(kind, "sdpa", apart)
    found, own = trained(kind, attention, [packed()])
    assert found == pytest.approx(expected)
    assert own.keys() == gradients.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, gradients[name], msg=name)


def other_trunk(kind: str) -> PreTrainedModel:
    """Trunks of no family, which a head can be attached to."""
    sizes = COMMON | {"pad_token_id": 0}
    torch.manual_seed(0)
    if kind == "lfm2":
        return Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=["conv", "full_attention"]))
    return MiniMaxForCausalLM(
        MiniMaxConfig(
            **sizes, head_dim=8, block_size=4, num_local_experts=2, layer_types=["linear_attention", "full_attention"]
        )
    )


@pytest.mark.parametrize("kind", [*TRUNKS, "lfm2", "minimax"])
def test_what_stands_before_a_document_does_not_reach_it(kind: str) -> None:
    engine = TorchEngine((tiny_trunk(kind) if kind in TRUNKS else other_trunk(kind)).eval())
    batch = packed()
    last = batch.position_ids[0].eq(0).nonzero()[-1].item()
    assert last > 0 and (batch.document_ids[0] >= 0).all()
    other = batch.map(Tensor.clone)
    other.input_ids[0, :last] = (other.input_ids[0, :last] + 1) % VOCAB
    found, expected = (engine.trunk_hidden_states(each)[0] for each in (other, batch))
    assert not torch.allclose(found[:last], expected[:last], atol=0.1)
    torch.testing.assert_close(found[last:], expected[last:], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize(
    ("kind", "attention", "hits", "misses"),
    [("qwen3_next", "sdpa", 2, 5), ("attached", "flash_attention_2", 1, 2)],  # documents, and rows
)
def test_hiddens_are_cached_by_row(kind: str, attention: str, hits: int, misses: int) -> None:
    config = TorchEngineConfig(train_trunk=False)
    cache, first, second = HiddenCache(), *Rows(documents(), 15, packing=True)[:2]
    made = model(kind, attention)
    both = stack_rows([first, second])
    expected = TorchEngine(made, config).trunk_hidden_states(both)
    engine = TorchEngine(made, config, hidden_cache=cache)
    for batch in (first, both):
        found = engine.trunk_hidden_states(batch)
    assert (cache.hits, cache.misses) == (hits, misses)
    real = both.document_ids >= 0
    torch.testing.assert_close(found[real], expected[real])


def test_a_native_engine_copies_a_model_under_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model may be held in float32, which flash attention does not take: it must not run."""
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.delattr(modeling_flash_attention_utils, "_lazy_imports")
    made = model("attached", "flash_attention_2")
    engine = NativeEngine(made, products="linear")
    assert made.config._attn_implementation == "flash_attention_2"
    with pytest.raises(NameError):  # what a training step would call
        made(torch.tensor([[1, 2]]))
    assert engine.runner.vocab_size == VOCAB
