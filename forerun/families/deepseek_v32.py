"""DeepSeek-V3.2: V3 with sparse attention; its indexer is part of the MTP layer. Files may omit the copied head."""

from dataclasses import replace

from forerun.families.deepseek_v3 import DEEPSEEK_V3

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    model_types=("deepseek_v32",),
    always_masked=True,
    duplicates=tuple(replace(copy, optional=copy.of == "head") for copy in DEEPSEEK_V3.duplicates),
    source="vLLM 0.32 models/deepseek_v32/{nvidia,amd}/mtp.py; transformers 5.24 models/deepseek_v32",
)
