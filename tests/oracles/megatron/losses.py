"""Megatron's MTP loss on given hidden states: the arithmetic between the last layer and `loss.backward()`.

megatron-core 0.16.1 has it inside GPTModel._postprocess (later versions call it process_mtp_loss). A GPTModel whose
config asks for MTP but which was built without an MTP block takes the depths' hiddens from outside, beside the trunk's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import on_cpu
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor


def losses(settings: dict[str, Any], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Answer, per case: `losses` [D] (what Megatron logs), `hidden_states` [1 + D, B, S, d] and `head` (gradients).

    The main loss is the mean over its own tokens, or with per_token their sum, as Megatron's schedules have it.
    """
    answer = {}
    group = parallel_state.get_context_parallel_group()
    for name, case in settings.items():
        if case["context_parallel"] != group.size():
            continue
        suffix = f"/{group.rank()}" if group.size() > 1 else ""
        head = given[f"{name}/head"]
        hidden_states = given[f"{name}/hidden_states{suffix}"].requires_grad_()
        labels, mask = given[f"{name}/labels{suffix}"], given[f"{name}/loss_mask{suffix}"]
        depths = hidden_states.shape[0] - 1
        config = TransformerConfig(
            num_layers=1,
            hidden_size=head.shape[1],
            num_attention_heads=1,
            mtp_num_layers=depths,
            calculate_per_token_loss=case["per_token"],
        )
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=head.shape[0], max_sequence_length=64)
        model.output_layer.weight.data.copy_(head)
        packed = None
        if case.get("cu_seqlens"):
            cu_seqlens = torch.tensor(case["cu_seqlens"], dtype=torch.int32)
            packed = PackedSeqParams("thd", cu_seqlens, cu_seqlens)
        MTPLossLoggingHelper.tracker.clear()
        out = model._postprocess(
            hidden_states.transpose(1, 2).flatten(0, 1),  # Megatron's [(1 + D) S, B, d]
            input_ids=None,
            position_ids=None,
            labels=labels,
            rotary_pos_emb=None,
            rotary_pos_cos=None,
            rotary_pos_sin=None,
            loss_mask=mask,
            packed_seq_params=packed,
        )
        main = (out * mask).sum()
        (main if case["per_token"] else main / mask.sum()).backward()
        answer[f"{name}/losses{suffix}"] = MTPLossLoggingHelper.tracker["values"].clone()
        answer[f"{name}/hidden_states{suffix}"] = hidden_states.grad
        answer[f"{name}/head{suffix}"] = model.output_layer.weight.grad
    return answer


if __name__ == "__main__":
    for size in (1, 2):
        on_cpu.run(Path(sys.argv[1]), losses, context_parallel=size)
