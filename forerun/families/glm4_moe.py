"""GLM-4.5, 4.6 and 4.7: DeepSeek's names around a grouped-query and mixture-of-experts layer.

transformers hands the normed hidden to the next depth, as Megatron and SGLang do for this layout; vLLM 0.32 the hidden
before the norm. It matters only for drafts further than one token.
"""

from dataclasses import replace

from forerun.families.deepseek_v3 import NEXTN_COPIES, NEXTN_NAMES
from forerun.families.record import FamilyRecord, LayerSource

GLM4_MOE = FamilyRecord(
    name="glm4_moe",
    model_types=("glm4_moe",),
    depth_key="num_nextn_predict_layers",
    tensor_names=NEXTN_NAMES,
    concat_order="embed_hidden",
    layers=(LayerSource(has=("mlp.experts",)),),
    # 4.5 ships them, 4.6 does not.
    duplicates=tuple(replace(copy, written=False, optional=True) for copy in NEXTN_COPIES),
    engine_zeroes_position_0=True,
    engine_recurrence="pre_norm",
    source="vLLM 0.32 model_executor/models/glm4_moe_mtp.py; transformers 5.24 modeling_layers.py MtpLayer",
)
