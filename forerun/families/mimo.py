"""MiMo-7B: a Qwen2 trunk with one or more dense MTP layers, hidden first in the projection's input."""

from forerun.families.record import FamilyRecord

MIMO = FamilyRecord(
    name="mimo",
    model_types=("mimo",),
    depth_key="num_nextn_predict_layers",
    tensor_names=(
        ("embed_norm.", "model.mtp_layers.{k}.token_layernorm."),
        ("hidden_norm.", "model.mtp_layers.{k}.hidden_layernorm."),
        ("proj.", "model.mtp_layers.{k}.input_proj."),
        ("final_norm.", "model.mtp_layers.{k}.final_layernorm."),
        ("decoder.", "model.mtp_layers.{k}."),
    ),
    concat_order="hidden_embed",
    namespace="model.mtp_layers.",
    trunk_model_type="qwen2",
    architecture="MiMoForCausalLM",
    # vLLM's trunk hands out the hidden before its norm and normalises in compute_logits; SGLang's the one after.
    trunk_hidden="pre_norm",
    engine_zeroes_position_0=True,
    source="vLLM model_executor/models/mimo_mtp.py; the checkpoint's own modeling_mimo.py",
)
