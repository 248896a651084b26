"""ERNIE 4.5: a dense layer without final norm, even where the trunk has experts.

vLLM 0.32 drafts only for ernie4_5_moe, and rotates the block's queries and keys in halves where ERNIE's trunk (in
transformers and in vLLM itself) rotates pairs; a block trained with the trunk's rotation is served with another.
"""

from forerun.families.record import FamilyRecord, LayerSource

ERNIE4_5 = FamilyRecord(
    name="ernie4_5",
    model_types=("ernie4_5", "ernie4_5_moe"),
    depth_key="num_nextn_predict_layers",
    tensor_names=(
        ("embed_norm.", "model.mtp_emb_norm.{k}."),
        ("hidden_norm.", "model.mtp_hidden_norm.{k}."),
        ("proj.", "model.mtp_linear_proj.{k}."),
        ("decoder.", "model.mtp_block.{k}."),
    ),
    concat_order="embed_hidden",
    namespace="model.mtp_",
    layers=(LayerSource(lacks=("mlp.experts",)),),
    final_norm=False,
    engine_zeroes_position_0=True,
    source="vLLM 0.32 model_executor/models/ernie_mtp.py, config/speculative.py; transformers 5.24 models/ernie4_5_moe",
)
