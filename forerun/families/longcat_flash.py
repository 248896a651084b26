"""LongCat-Flash: one MLA and one dense MLP, half of a trunk layer, which holds two of each and a mixture of experts."""

from forerun.families.record import Duplicate, FamilyRecord, LayerSource

LONGCAT_FLASH = FamilyRecord(
    name="longcat_flash",
    model_types=("longcat_flash",),
    depth_key="num_nextn_predict_layers",
    tensor_names=(
        ("embed_norm.", "model.mtp.layers.0.enorm.m."),
        ("hidden_norm.", "model.mtp.layers.0.hnorm.m."),
        ("proj.", "model.mtp.layers.0.eh_proj."),
        ("final_norm.", "model.mtp.norm."),
        ("decoder.", "model.mtp.layers.0."),
        ("decoder.mlp.", "model.mtp.layers.0.transformer_layer.mlp."),
    ),
    concat_order="embed_hidden",
    namespace="model.mtp.",
    absent_depth=1,
    layers=(
        LayerSource(
            parts=(
                ("input_layernorm", "input_layernorm.1"),
                ("self_attn", "self_attn.1"),
                ("post_attention_layernorm", "post_attention_layernorm.1"),
                ("mlp", "mlps.1"),
            )
        ),
    ),
    max_layers=1,
    duplicates=(Duplicate("embedding", "model.mtp.embed_tokens.weight", written=True),),
    source="vLLM 0.32 model_executor/models/longcat_flash_mtp.py; transformers 5.24 models/longcat_flash",
)
