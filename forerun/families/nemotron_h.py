"""Nemotron-3: an attention block and a mixture-of-experts block in a row (pattern "*E"), without rotary embedding."""

from forerun.families.record import FamilyRecord, LayerSource

NEMOTRON_H = FamilyRecord(
    name="nemotron_h",
    model_types=("nemotron_h",),
    depth_key="num_nextn_predict_layers",
    tensor_names=(
        ("embed_norm.", "mtp.layers.0.enorm."),
        ("hidden_norm.", "mtp.layers.0.hnorm."),
        ("proj.", "mtp.layers.0.eh_proj."),
        ("final_norm.", "mtp.layers.1.final_layernorm."),
        ("decoder.0.", "mtp.layers.0."),
        ("decoder.1.", "mtp.layers.1."),
    ),
    concat_order="embed_hidden",
    namespace="mtp.",
    layers=(LayerSource(has=("mixer.q_proj",)), LayerSource(has=("mixer.experts",))),
    max_layers=1,
    pieces=(
        ("mixer.experts.up_proj", ("mixer.experts.{e}.up_proj.weight",)),
        ("mixer.experts.down_proj", ("mixer.experts.{e}.down_proj.weight",)),
    ),
    source="vLLM 0.32 model_executor/models/nemotron_h_mtp.py; transformers 5.24 models/nemotron_h",
)
