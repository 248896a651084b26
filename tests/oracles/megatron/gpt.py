"""A whole Megatron GPTModel with MTP: given weights and rows, the losses and the gradient of every parameter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import on_cpu
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor


class PackedAttention(DotProductAttention):
    """Megatron's local attention, which refuses packed rows (Transformer Engine's takes them): run per document."""

    def forward(self, query, key, value, attention_mask, *, packed_seq_params=None, **kwargs):  # type: ignore[no-untyped-def]
        if packed_seq_params is None:
            return super().forward(query, key, value, attention_mask, **kwargs)
        sizes = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = zip(*(x.unsqueeze(1).split(sizes) for x in (query, key, value)), strict=True)
        out = [super(PackedAttention, self).forward(*qkv, causal(len(qkv[0])), **kwargs) for qkv in parts]
        return torch.cat(out).squeeze(1)


def causal(length: int) -> Tensor:
    """True where attention is forbidden, [1, 1, S, S]."""
    return torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)


def make_model(shape: dict[str, Any], depths: int, tied: bool) -> GPTModel:
    config = TransformerConfig(
        num_layers=shape["num_hidden_layers"],
        hidden_size=shape["hidden_size"],
        ffn_hidden_size=shape["intermediate_size"],
        num_attention_heads=shape["num_attention_heads"],
        num_query_groups=shape["num_key_value_heads"],
        mtp_num_layers=depths,
        normalization="RMSNorm",
        layernorm_epsilon=shape["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return GPTModel(
        config,
        layer,
        vocab_size=shape["vocab_size"],
        max_sequence_length=shape["max_position_embeddings"],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False),
    )


def train_step(settings: dict[str, Any], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Answer, per case: `main`, `losses` [D] and `gradient/NAME` for every parameter."""
    answer = {}
    for name, case in settings.items():
        weights = {key.split("/", 2)[2]: value for key, value in given.items() if key.startswith(f"{name}/weight/")}
        model = make_model(case["shape"], case["depths"], case["tied"])
        missing, unknown = model.load_state_dict(weights, strict=False)
        assert not unknown and all(key.endswith("_extra_state") for key in missing), (missing, unknown)
        ids, labels, mask = (given[f"{name}/{field}"] for field in ("input_ids", "labels", "loss_mask"))
        packed = None
        if case["cu_seqlens"]:
            cu_seqlens = torch.tensor(case["cu_seqlens"], dtype=torch.int32)
            longest = int(cu_seqlens.diff().max())
            packed = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)
        MTPLossLoggingHelper.tracker.clear()
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        out = model(ids, positions, causal(ids.shape[1]), labels=labels, loss_mask=mask, packed_seq_params=packed)
        main = (out * mask).sum() / mask.sum()
        main.backward()
        answer[f"{name}/main"] = main.detach()
        answer[f"{name}/losses"] = MTPLossLoggingHelper.tracker["values"].clone()
        answer |= {f"{name}/gradient/{key}": p.grad for key, p in model.named_parameters()}
    return answer


if __name__ == "__main__":
    on_cpu.run(Path(sys.argv[1]), train_step)
