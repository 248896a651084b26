"""Qwen3-Next: a gated full-attention and mixture-of-experts layer over a hybrid trunk; norms are zero-centred."""

from forerun.families.record import FamilyRecord, LayerSource

MTP_NAMES = (
    ("embed_norm.", "mtp.pre_fc_norm_embedding."),
    ("hidden_norm.", "mtp.pre_fc_norm_hidden."),
    ("proj.", "mtp.fc."),
    ("final_norm.", "mtp.norm."),
    ("decoder.", "mtp.layers.{k}."),
)

QWEN3_NEXT = FamilyRecord(
    name="qwen3_next",
    model_types=("qwen3_next",),
    depth_key="num_nextn_predict_layers",
    tensor_names=MTP_NAMES,
    concat_order="embed_hidden",
    namespace="mtp.",
    absent_depth=1,
    layers=(LayerSource(has=("self_attn", "mlp.experts")),),
    zero_centred_norm=True,
    source="vLLM 0.32 model_executor/models/qwen3_next_mtp.py; transformers 5.24 models/qwen3_next",
)
