"""Megatron's roll_tensor on given tensors, once per depth, in one process and in two with context parallelism."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import on_cpu
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor
from torch import Tensor

FIELDS = ("input_ids", "labels", "loss_mask")


def rolls(settings: dict[str, Any], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Answer `case/field/depth` with the field [B, S] rolled `depth` times, and `case/num_tokens/depth`, the sum that
    Megatron divides by. With context parallelism the given tensors are `case/field/rank`, and so are the answers."""
    answer = {}
    group = parallel_state.get_context_parallel_group()
    for name, case in settings.items():
        if case["context_parallel"] != group.size():
            continue
        suffix = f"/{group.rank()}" if group.size() > 1 else ""
        cu_seqlens = case.get("cu_seqlens") and torch.tensor(case["cu_seqlens"], dtype=torch.int32)
        padded = case.get("cu_seqlens_padded") and torch.tensor(case["cu_seqlens_padded"], dtype=torch.int32)
        packed = None
        if cu_seqlens is not None:
            packed = PackedSeqParams(
                "thd", cu_seqlens, cu_seqlens, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded
            )
        for field in FIELDS:
            rolled = given[f"{name}/{field}{suffix}"]
            for depth in range(1, case["depths"] + 1):
                rolled, total = roll_tensor(rolled, shifts=-1, dims=-1, cp_group=group, packed_seq_params=packed)
                answer[f"{name}/{field}/{depth}{suffix}"] = rolled
                if field == "loss_mask":
                    answer[f"{name}/num_tokens/{depth}{suffix}"] = total
    return answer


if __name__ == "__main__":
    for size in (1, 2):
        on_cpu.run(Path(sys.argv[1]), rolls, context_parallel=size)
