"""Qwen3.5, 3.6 and 3.8, dense or with experts, text-only or multimodal (the key then lies under text_config)."""

from dataclasses import replace

from forerun.families.qwen3_next import QWEN3_NEXT
from forerun.families.record import LayerSource

QWEN3_5 = replace(
    QWEN3_NEXT,
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    depth_key="mtp_num_hidden_layers",
    layers=(LayerSource(has=("self_attn",)),),
    source="vLLM 0.32 model_executor/models/qwen3_5_mtp.py; transformers 5.24 models/qwen3_5 and qwen3_5_moe",
)
