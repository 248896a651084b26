"""GLM-5: an MLA layer with sparse attention and a mixture of experts; one block serves every depth."""

from dataclasses import replace

from forerun.families.glm4_moe import GLM4_MOE
from forerun.families.record import LayerSource

GLM_MOE_DSA = replace(
    GLM4_MOE,
    name="glm_moe_dsa",
    model_types=("glm_moe_dsa",),
    # Some of the trunk's layers borrow the indices of the layer before them and have no indexer; the block has its own.
    layers=(LayerSource(has=("mlp.experts", "self_attn.indexer")),),
    max_layers=1,
    always_masked=True,
    engine_recurrence=None,
    source="vLLM 0.32 models/deepseek_v32/{nvidia,amd}/mtp.py; transformers 5.24 models/glm_moe_dsa",
)
