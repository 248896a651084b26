"""DeepSeek-V3 and R1: an MLA and mixture-of-experts layer behind the trunk's last, copies of embedding and head."""

from forerun.families.record import Duplicate, FamilyRecord, LayerSource

NEXTN_NAMES = (
    ("embed_norm.", "model.layers.{layer}.enorm."),
    ("hidden_norm.", "model.layers.{layer}.hnorm."),
    ("proj.", "model.layers.{layer}.eh_proj."),
    ("final_norm.", "model.layers.{layer}.shared_head.norm."),
    ("decoder.", "model.layers.{layer}."),
)
# vLLM and transformers take the trunk's own whether the copies are there or not; older readers need them.
NEXTN_COPIES = (
    Duplicate("embedding", "model.layers.{layer}.embed_tokens.weight", written=True),
    Duplicate("head", "model.layers.{layer}.shared_head.head.weight", written=True),
)

DEEPSEEK_V3 = FamilyRecord(
    name="deepseek_v3",
    model_types=("deepseek_v3",),
    depth_key="num_nextn_predict_layers",
    tensor_names=NEXTN_NAMES,
    concat_order="embed_hidden",
    layers=(LayerSource(has=("mlp.experts",)),),
    duplicates=NEXTN_COPIES,
    engine_zeroes_position_0=True,
    source="vLLM 0.32 model_executor/models/deepseek_mtp.py; transformers 5.24 modeling_layers.py MtpLayer",
)
